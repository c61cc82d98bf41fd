// What is remembered of the blocks that left last: when they were last used, and how often. 12 bytes each and a table
// slot; the name is not kept, only 48 bits of its keyed hash, which is enough for counting.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "table.h"

namespace kvcache {

class Ghosts {
  public:
    struct Use {
        std::uint64_t stamp;
        std::uint64_t uses;
    };

    // The block with this hash left; it is not here.
    void add(std::uint64_t hash, Use use);

    bool find(std::uint64_t hash, Use* use) const;
    bool take(std::uint64_t hash, Use* use);  // then it is here no longer

    // Forgets the first to leave until at most `departures` are remembered, those that came back among them; calls
    // `gone(use)` for each that did not.
    template <class Gone>
    void trim(std::size_t departures, Gone gone) {
        for (; left_.size() > departures; left_.pop_front(), ++first_) {
            const Departure& oldest = left_.front();
            if (oldest.stamp == BACK) continue;
            table_.erase(oldest.tag, first_ & POSITIONS);
            gone(Use{oldest.stamp, oldest.uses});
        }
    }

    // call(hash, use) for each of those that left last, the first of them first; of a hash the upper 16 and lower 32
    // bits are known.
    template <class Call>
    void newest(std::size_t most, Call call) const {
        for (std::size_t i = left_.size() - std::min(most, left_.size()); i < left_.size(); ++i) {
            const Departure& departure = left_[i];
            if (departure.stamp == BACK) continue;
            call(std::uint64_t{departure.print} << 48 | departure.tag, Use{departure.stamp, departure.uses});
        }
    }

    std::size_t size() const { return table_.size(); }
    std::size_t bytes() const { return table_.bytes() + left_.size() * sizeof(Departure); }

  private:
    static constexpr std::uint64_t BACK = (std::uint64_t{1} << 40) - 1;  // as a stamp: the block came back
    static constexpr std::uint32_t POSITIONS = 0x7fffffff;               // more are never remembered at a time

    struct __attribute__((packed, aligned(4))) Departure {
        std::uint32_t tag;  // the hash's lower half, as in the table
        std::uint64_t stamp : 40, uses : 8, print : 16;
    };

    std::uint32_t position(std::uint64_t hash) const;  // Table::NONE where it is not here
    const Departure& at(std::uint32_t position) const { return left_[(position - first_) & POSITIONS]; }

    Table table_;                 // positions by tag
    std::deque<Departure> left_;  // the first of them at position `first_`
    std::uint32_t first_ = 0;
};

}  // namespace kvcache
