// What is remembered of the blocks that left last: when they were last used, and how often. 12 bytes each and a table
// slot; the name is not kept, only 48 bits of its keyed hash, which is enough for counting.
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

    // The block with this hash left; it is not here.
    void add(std::uint64_t hash, Use use);

    bool find(std::uint64_t hash, Use* use) const;
    bool remove(std::uint64_t hash, Use* use);  // then it is here no longer

    // Forgets the first to leave until at most `departures` and the spared are remembered, those that came back among
    // them; calls `gone(use)` for each that did not.
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

    // What is here may stay, however few departures `trim` is to leave, until `press` says otherwise: then so many of
    // those beyond `departures` no longer.
    void spare() { spared_ = left_.size(); }
    void shrink(std::size_t departures, std::size_t count) {
        spared_ = std::min(spared_, left_.size() - std::min(departures, left_.size()));
        spared_ -= std::min(count, spared_);
    }

    // Departures that follow on one another; more may leave and some be forgotten while somebody goes through them.
    struct Span {
        std::uint32_t first, end;
    };

    Span newest(std::size_t most) const {
        const std::uint32_t end = first_ + static_cast<std::uint32_t>(left_.size());
        return {end - static_cast<std::uint32_t>(std::min(most, left_.size())), end};
    }

    // call(hash, use) for those among the next `count` of the span that are here, the first to leave first; of a hash
    // the upper 16 and lower 32 bits are known. False behind the last.
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
    static constexpr std::uint64_t BACK = (std::uint64_t{1} << 40) - 1;  // as a stamp: the block came back
    static constexpr std::uint32_t POSITIONS = 0x7fffffff;               // more are never remembered at a time

    struct __attribute__((packed, aligned(4))) Departure {
        std::uint32_t tag;  // the hash's lower half, as in the table
        std::uint64_t stamp : 40, uses : 8, print : 16;
    };

    std::uint32_t position(std::uint64_t hash) const;  // Table::NONE where it is not here
    const Departure& at(std::uint32_t position) const { return left_[(position - first_) & POSITIONS]; }

    HashTable table_;             // positions by tag
    std::deque<Departure> left_;  // the first of them at position `first_`
    std::uint32_t first_ = 0;
    std::size_t spared_ = 0;
};

}  // namespace kvcache
