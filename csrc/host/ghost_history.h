// Ghosts: last use and use count of recently evicted blocks. 12 bytes each and a slot of a hash table. A ghost keeps 48
// bits of its block's keyed hash instead of the name, which is enough to count reuses.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "hash_table.h"

namespace kvcache {

class GhostHistory {
  public:
    struct Use {
        std::uint64_t stamp;
        std::uint64_t uses;
    };

    // Adds an evicted block that is not in the history.
    void add(std::uint64_t hash, Use use);

    bool find(std::uint64_t hash, Use* use) const;
    bool remove(std::uint64_t hash, Use* use);  // find, and remove it

    // Removes the oldest entries until at most `departures` and the spared ones remain, entries of returned blocks
    // included. Calls `gone(use)` for each removed block that did not return.
    template <class Gone>
    void trim(std::size_t departures, Gone gone) {
        const std::size_t most = departures + spared_;
        while (left_.size() > most) {
            const Departure oldest = left_.front();
            const std::uint32_t position = first_ & POSITIONS;
            left_.pop_front();
            ++first_;
            if (oldest.stamp == BACK) continue;
            table_.erase(oldest.tag, position);
            gone(Use{oldest.stamp, oldest.uses});
        }
    }

    // `spare` exempts the current entries from `trim`. `shrink` ends the exemption for `count` of the entries beyond
    // `departures`.
    void spare() { spared_ = left_.size(); }
    void shrink(std::size_t departures, std::size_t count) {
        spared_ = std::min(spared_, left_.size() - std::min(departures, left_.size()));
        spared_ -= std::min(count, spared_);
    }

    // A range of consecutive entries. Entries may be added and removed while a caller iterates over it.
    struct Span {
        std::uint32_t first, end;
    };

    Span newest(std::size_t most) const {
        const std::uint32_t end = first_ + static_cast<std::uint32_t>(left_.size());
        return {end - static_cast<std::uint32_t>(std::min(most, left_.size())), end};
    }

    // Calls call(hash, use) for those of the next `count` entries that did not return, oldest first. A hash has its
    // upper 16 and lower 32 bits. Returns false after the last entry.
    template <class Call>
    bool next(Span* span, std::uint32_t count, Call call) const {
        const auto ahead = [](std::uint32_t a, std::uint32_t b) { return static_cast<std::int32_t>(a - b) > 0; };
        if (ahead(first_, span->first)) span->first = ahead(first_, span->end) ? span->end : first_;
        for (; count && span->first != span->end; --count, ++span->first) {
            const Departure& departure = left_[span->first - first_];
            if (departure.stamp == BACK) continue;
            call(std::uint64_t{departure.print} << 48 | departure.tag, Use{departure.stamp, departure.uses});
        }
        return span->first != span->end;
    }

    std::size_t size() const { return table_.size(); }
    std::size_t bytes() const { return table_.bytes() + left_.size() * sizeof(Departure); }

  private:
    static constexpr std::uint64_t BACK = (std::uint64_t{1} << 40) - 1;  // as a stamp: the block returned
    static constexpr std::uint32_t POSITIONS = 0x7fffffff;               // most entries at a time

    struct __attribute__((packed, aligned(4))) Departure {
        std::uint32_t tag;  // the hash's lower half, as in the table
        std::uint64_t stamp : 40, uses : 8, print : 16;
    };

    std::uint32_t position(std::uint64_t hash) const;  // HashTable::NONE if absent
    const Departure& at(std::uint32_t position) const { return left_[(position - first_) & POSITIONS]; }

    HashTable table_;             // positions by tag
    std::deque<Departure> left_;  // entries, oldest first, the first at position `first_`
    std::uint32_t first_ = 0;
    std::size_t spared_ = 0;
};

}  // namespace kvcache
