// The nodes of the index in one row of chunks: 52 bytes a node and 8 a tier. Numbers of freed nodes are given out
// again, the last freed first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace kvcache {

constexpr std::size_t SIGNATURE = 32;
constexpr std::uint32_t NIL = ~std::uint32_t{0};

// What a node is to one tier: where it stands in that tier's order, or, as what stands there has none, how many of its
// children the tier has.
struct Standing {
    union {
        std::uint32_t before;  // the subtree of those that leave earlier
        std::uint32_t children;
    };
    std::uint32_t after;
};

struct __attribute__((packed, aligned(4))) Node {
    std::uint8_t signature[SIGNATURE];
    std::uint32_t place;   // number of the namespace, group and shard
    std::uint32_t parent;  // number of the node of the block before, or one of the four below
    std::uint64_t stamp : 40, uses : 8, holds : 16;
    std::uint32_t depth : 24, tiers : 4, listed : 4;  // by bit: the tiers that have it, in whose orders it stands

    static constexpr std::uint32_t FIRST = NIL;        // there is none
    static constexpr std::uint32_t UNKNOWN = NIL - 1;  // it was not told
    static constexpr std::uint32_t GONE = NIL - 2;     // no tier has this node any more
    static constexpr std::uint32_t NEVER = NIL - 3;    // no tier has had this node yet: only its children are known

    // Of the uses again: how many there were, and in the bits above that after how long the last of them came.
    static constexpr unsigned MOST_USES = 0x1f, USES_BITS = 5, MOST_GAPS = 7;
    static constexpr unsigned MOST_TIERS = 4, MOST_HOLDS = 0xffff, MOST_DEPTH = 0xffffff;

    Standing& in(unsigned tier) { return reinterpret_cast<Standing*>(this + 1)[tier]; }
    const Standing& in(unsigned tier) const { return reinterpret_cast<const Standing*>(this + 1)[tier]; }
    bool resident(unsigned tier) const { return tiers >> tier & 1; }
    bool stands(unsigned tier) const { return listed >> tier & 1; }
    std::uint32_t children(unsigned tier) const { return stands(tier) ? 0 : in(tier).children; }
    bool has_parent() const { return parent < NEVER; }
};

static_assert(sizeof(Node) == 52, "packed");

class Nodes {
  public:
    explicit Nodes(unsigned tiers) : node_bytes_(sizeof(Node) + tiers * sizeof(Standing)) {}

    Node& operator[](std::uint32_t i) const {
        return *reinterpret_cast<Node*>(chunks_[i / A_CHUNK].get() + i % A_CHUNK * node_bytes_);
    }

    std::uint32_t take() {  // what is in it is anything; std::bad_alloc
        if (free_ == NIL) {
            if (made_ / A_CHUNK == chunks_.size()) chunks_.emplace_back(new std::uint8_t[A_CHUNK * node_bytes_]);
            return made_++;
        }
        const std::uint32_t i = free_;
        free_ = (*this)[i].parent;
        return i;
    }

    void give(std::uint32_t i) {
        (*this)[i].tiers = (*this)[i].listed = 0, (*this)[i].holds = 0;
        (*this)[i].parent = free_;
        free_ = i;
    }

    // Room for a copy of so many nodes, touched: the copying thread need not wait for the system.
    void prepare(std::uint32_t nodes) {
        while (chunks_.size() * A_CHUNK < nodes) chunks_.emplace_back(new std::uint8_t[A_CHUNK * node_bytes_]());
    }

    void copy(const Nodes& other) {
        prepare(other.made_);
        for (std::size_t c = 0; c * A_CHUNK < other.made_; ++c) {
            const std::size_t nodes = other.made_ - c * A_CHUNK;
            std::memcpy(chunks_[c].get(), other.chunks_[c].get(), (nodes < A_CHUNK ? nodes : A_CHUNK) * node_bytes_);
        }
        made_ = other.made_, free_ = other.free_;
    }

    // By number, whether a node is in use.
    std::vector<bool> used() const {
        std::vector<bool> used(made_, true);
        for (std::uint32_t i = free_; i < made_ && used[i]; i = (*this)[i].parent) used[i] = false;
        return used;
    }

    std::uint32_t made() const { return made_; }
    std::size_t bytes() const { return chunks_.size() * A_CHUNK * node_bytes_; }

  private:
    static constexpr std::uint32_t A_CHUNK = 1 << 12;

    std::size_t node_bytes_;
    std::vector<std::unique_ptr<std::uint8_t[]>> chunks_;
    std::uint32_t made_ = 0, free_ = NIL;
};

}  // namespace kvcache
