#include "age_histogram.h"

#include <algorithm>
#include <utility>

namespace kvcache {

AgeHistogram::AgeHistogram(std::size_t classes, std::vector<std::uint64_t> edges)
    : classes_(classes), edges_(std::move(edges)), counts_(classes) {}

std::size_t AgeHistogram::bin(std::uint64_t age) const {
    return static_cast<std::size_t>(std::upper_bound(edges_.begin() + 1, edges_.end(), age) - edges_.begin()) - 1;
}

void AgeHistogram::begin(std::uint64_t now) {
    starts_.assign(1, 0);
    for (std::size_t b = bins(); b-- > 0;) {
        if (edges_[b] < now && now - edges_[b] > starts_.back()) starts_.push_back(now - edges_[b]);
    }
    counts_.assign(starts_.size() * classes_, 0);
    merged_ = starts_.size();
}

void AgeHistogram::tick(std::uint64_t now) {
    starts_.push_back(now);
    counts_.resize(counts_.size() + classes_);
    if (starts_.size() > 2 * merged_ + 16) merge(now);
}

void AgeHistogram::merge(std::uint64_t now) {
    std::size_t last = 0;  // the span that later ones merge into
    for (std::size_t span = 1; span < starts_.size(); ++span) {
        const std::uint64_t end = span + 1 < starts_.size() ? starts_[span + 1] - 1 : now;
        if (bin(now - starts_[last]) == bin(now - end)) {
            for (std::size_t c = 0; c < classes_; ++c) counts_[last * classes_ + c] += counts_[span * classes_ + c];
            continue;
        }
        starts_[++last] = starts_[span];
        std::copy_n(counts_.begin() + static_cast<std::ptrdiff_t>(span * classes_), classes_,
                    counts_.begin() + static_cast<std::ptrdiff_t>(last * classes_));
    }
    merged_ = last + 1;
    starts_.resize(merged_);
    counts_.resize(merged_ * classes_);
}

void AgeHistogram::add(std::size_t use_class, std::uint64_t stamp, std::int64_t blocks) {
    const auto after = std::upper_bound(starts_.begin() + 1, starts_.end(), stamp);
    const std::size_t span = static_cast<std::size_t>(after - starts_.begin()) - 1;
    counts_[span * classes_ + use_class] += blocks;
}

void AgeHistogram::count(std::uint64_t now, std::int64_t* out) const {
    std::fill_n(out, classes_ * bins(), 0);
    for (std::size_t span = 0; span < starts_.size(); ++span) {
        const std::size_t b = bin(now - starts_[span]);
        for (std::size_t c = 0; c < classes_; ++c) out[c * bins() + b] += counts_[span * classes_ + c];
    }
}

}  // namespace kvcache
