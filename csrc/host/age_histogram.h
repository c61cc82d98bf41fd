// Counts of resident blocks by class of use and age of the last use. The cost does not depend on the number of blocks.
//
// Last uses are counted in spans of time. Each tick begins a span. Adjacent spans merge once both are in one age bin,
// so that there are about as many spans as bins. A span is never split: it counts in the bin of its first time. The
// reference twin kvcache/index/reference/eviction_order.py must give exactly the same counts.
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

    void begin(std::uint64_t now);  // before any count; the first stamps may have any age and keep exact bins
    void tick(std::uint64_t now);
    void add(std::size_t use_class, std::uint64_t stamp, std::int64_t blocks);
    void count(std::uint64_t now, std::int64_t* out) const;  // (classes, bins)

  private:
    void merge(std::uint64_t now);

    std::size_t classes_;
    std::vector<std::uint64_t> edges_;
    std::vector<std::uint64_t> starts_{0};  // first time of each span, ascending
    std::vector<std::int64_t> counts_;      // (spans, classes)
    std::size_t merged_ = 1;                // spans after the last merge
};

}  // namespace kvcache
