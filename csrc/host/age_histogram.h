// How many blocks wait, by class of use and by the time they were last used, at a cost that does not depend on how
// many.
//
// Times are kept in spans. Every tick begins one; as they age, neighbours become one where both lie within one bin of
// age, so that there are about as many spans as bins. A span is never cut, so each counts wholly in the bin of its
// first time. Plain twin: kvcache/index/reference/eviction_order.py, which must do the same to the letter.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache {

class AgeHistogram {
  public:
    // `edges[b]` is the least age in bin b; the first is 0.
    AgeHistogram(std::size_t classes, std::vector<std::uint64_t> edges);

    std::size_t classes() const { return classes_; }
    std::size_t bins() const { return edges_.size(); }
    std::uint64_t edge(std::size_t bin) const { return edges_[bin]; }
    std::size_t bin(std::uint64_t age) const;

    void begin(std::uint64_t now);  // nothing is counted yet; what comes first may be of any age, in exact bins
    void tick(std::uint64_t now);
    void add(std::size_t use_class, std::uint64_t stamp, std::int64_t blocks);
    void count(std::uint64_t now, std::int64_t* out) const;  // (classes, bins)

  private:
    void merge(std::uint64_t now);

    std::size_t classes_;
    std::vector<std::uint64_t> edges_;
    std::vector<std::uint64_t> starts_{0};  // of the spans, ascending
    std::vector<std::int64_t> counts_;      // (spans, classes)
    std::size_t merged_ = 1;                // spans that the last merge left
};

}  // namespace kvcache
