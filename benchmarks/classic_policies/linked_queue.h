// Blocks of a simulated policy in order, the first to leave first: linked lists within arrays, so that every step costs
// the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache {

using Block = std::int32_t;
constexpr Block NONE = -1;
// A block stands in one of the orders that share a `Links`.
struct Links {
    explicit Links(std::size_t unique) : before(unique, NONE), after(unique, NONE), owner(unique, nullptr) {}
    std::vector<Block> before, after;
    std::vector<const void*> owner;
};

class Queue {
  public:
    explicit Queue(Links& links) : links_(links) {}
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    bool has(Block block) const { return links_.owner[at(block)] == this; }
    Block first() const { return first_; }
    Block after(Block block) const { return links_.after[at(block)]; }
    std::size_t size() const { return size_; }

    void push(Block block) {
        links_.owner[at(block)] = this;
        links_.before[at(block)] = last_, links_.after[at(block)] = NONE;
        (last_ == NONE ? first_ : links_.after[at(last_)]) = block;
        last_ = block;
        ++size_;
    }

    void erase(Block block) {
        const Block b = links_.before[at(block)], a = links_.after[at(block)];
        (b == NONE ? first_ : links_.after[at(b)]) = a;
        (a == NONE ? last_ : links_.before[at(a)]) = b;
        links_.owner[at(block)] = nullptr;
        --size_;
    }

    void renew(Block block) { erase(block), push(block); }

  private:
    static std::size_t at(Block block) { return static_cast<std::size_t>(block); }

    Links& links_;
    Block first_ = NONE, last_ = NONE;
    std::size_t size_ = 0;
};

}  // namespace kvcache
