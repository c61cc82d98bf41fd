// Blocks of a simulated policy in a circle, with a hand that passes them in turn. A block is marked where the hand has
// something to do; those that are not are passed all at once, however many they are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>
#include <vector>

#include "linked_queue.h"

namespace kvcache {

class Ring {
  public:
    explicit Ring(std::size_t unique) : label_of_(unique, NOWHERE) {}

    std::size_t size() const { return all_.size(); }
    bool has(Block block) const { return label(block) != NOWHERE; }

    // The last that the hand comes to; not marked.
    void push(Block block) {
        std::uint64_t before = just_before(), step = (hand_ - before) / PARTS;
        if (step == 0) {
            spread();
            before = just_before(), step = (hand_ - before) / PARTS;
        }
        label(block) = before + step;
        all_.emplace(before + step, block);
    }

    void erase(Block block) {
        all_.erase(label(block));
        marked_.erase(label(block));
        label(block) = NOWHERE;
    }

    void renew(Block block) { erase(block), push(block); }

    // It is here.
    void mark(Block block, bool on) {
        if (on) {
            marked_.emplace(label(block), block);
        } else {
            marked_.erase(label(block));
        }
    }

    // The next that is marked, to which the hand goes; there is one.
    Block next() {
        auto found = marked_.lower_bound(hand_);
        if (found == marked_.end()) found = marked_.begin();
        hand_ = found->first;
        return found->second;
    }

  private:
    static constexpr std::uint64_t NOWHERE = 0, END = std::uint64_t{1} << 62, PARTS = 512;

    std::uint64_t& label(Block block) { return label_of_[static_cast<std::size_t>(block)]; }
    const std::uint64_t& label(Block block) const { return label_of_[static_cast<std::size_t>(block)]; }

    std::uint64_t just_before() const {
        const auto at = all_.lower_bound(hand_);
        return at == all_.begin() ? 0 : std::prev(at)->first;
    }

    // Labels evenly anew, in the order in which the hand comes to them.
    void spread() {
        std::vector<std::pair<Block, bool>> order;
        for (const auto& [name, block] : all_) order.emplace_back(block, marked_.count(name) != 0);
        const auto passed = std::distance(all_.begin(), all_.lower_bound(hand_));
        std::rotate(order.begin(), order.begin() + passed, order.end());
        all_.clear(), marked_.clear();
        const std::uint64_t gap = END / 2 / (order.size() + 1);
        for (std::size_t i = 0; i < order.size(); ++i) {
            label(order[i].first) = (i + 1) * gap;
            all_.emplace_hint(all_.end(), (i + 1) * gap, order[i].first);
            if (order[i].second) marked_.emplace_hint(marked_.end(), (i + 1) * gap, order[i].first);
        }
        hand_ = END;
    }

    std::vector<std::uint64_t> label_of_;
    std::map<std::uint64_t, Block> all_, marked_;  // by label: the order of the circle
    std::uint64_t hand_ = END;                     // before the first that has this label or a later one
};

}  // namespace kvcache
