// Memory of the index's nodes, in chunks: 52 bytes a node and 8 for each tier. Numbers of freed nodes are reused, the
// last freed first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace kvcache {

constexpr std::size_t SIGNATURE = 32;
constexpr std::uint32_t NIL = ~std::uint32_t{0};

// A node's links for one tier: its position in that tier's eviction order, or the number of its children in the tier.
// A node with children there is in no order, so one field serves both.
struct TierLinks {
    union {
        std::uint32_t before;  // subtree of nodes evicted earlier
        std::uint32_t children;
    };
    std::uint32_t after;
};

struct __attribute__((packed, aligned(4))) Node {
    std::uint8_t signature[SIGNATURE];
    std::uint32_t shard;   // number of the shard key
    std::uint32_t parent;  // node of the block before, or one of the constants below
    std::uint64_t stamp : 40, uses : 8, holds : 16;
    std::uint32_t depth : 24, tiers : 4, listed : 4;  // bit masks: tiers that have it, tiers in whose order it is

    static constexpr std::uint32_t FIRST = NIL;        // first block of a prompt: no parent
    static constexpr std::uint32_t UNKNOWN = NIL - 1;  // the caller did not give it
    static constexpr std::uint32_t GONE = NIL - 2;     // no tier has this node any more
    static constexpr std::uint32_t NEVER = NIL - 3;    // no tier has had this node yet: only its children are known

    // `uses`: the use count in the low bits, the class of the age at the last reuse above them.
    static constexpr unsigned MAX_USES = 0x1f, USES_BITS = 5, MAX_GAPS = 7;
    static constexpr unsigned MAX_TIERS = 4, MAX_HOLDS = 0xffff, MAX_DEPTH = 0xffffff;

    TierLinks& in(unsigned tier) { return reinterpret_cast<TierLinks*>(this + 1)[tier]; }
    const TierLinks& in(unsigned tier) const { return reinterpret_cast<const TierLinks*>(this + 1)[tier]; }
    bool resident(unsigned tier) const { return tiers >> tier & 1; }
    bool is_listed(unsigned tier) const { return listed >> tier & 1; }
    std::uint32_t children(unsigned tier) const { return is_listed(tier) ? 0 : in(tier).children; }
    bool has_parent() const { return parent < NEVER; }
};

static_assert(sizeof(Node) == 52, "packed");

class NodePool {
  public:
    explicit NodePool(unsigned tiers) : node_bytes_(sizeof(Node) + tiers * sizeof(TierLinks)) {}

    Node& operator[](std::uint32_t i) const {
        return *reinterpret_cast<Node*>(chunks_[i / CHUNK_NODES].get() + i % CHUNK_NODES * node_bytes_);
    }

    std::uint32_t allocate() {  // uninitialised; may throw std::bad_alloc
        if (free_ == NIL) {
            if (node_count_ / CHUNK_NODES == chunks_.size())
                chunks_.emplace_back(new std::uint8_t[CHUNK_NODES * node_bytes_]);
            return node_count_++;
        }
        const std::uint32_t i = free_;
        free_ = (*this)[i].parent;
        return i;
    }

    void free(std::uint32_t i) {
        (*this)[i].tiers = (*this)[i].listed = 0, (*this)[i].holds = 0;
        (*this)[i].parent = free_;
        free_ = i;
    }

    // Allocates and touches memory for this many nodes, so that a later `copy` causes no page fault.
    void prepare(std::uint32_t nodes) {
        while (chunks_.size() * CHUNK_NODES < nodes)
            chunks_.emplace_back(new std::uint8_t[CHUNK_NODES * node_bytes_]());
    }

    void copy(const NodePool& other) {
        prepare(other.node_count_);
        for (std::size_t c = 0; c * CHUNK_NODES < other.node_count_; ++c) {
            const std::size_t nodes = other.node_count_ - c * CHUNK_NODES;
            std::memcpy(chunks_[c].get(), other.chunks_[c].get(),
                        (nodes < CHUNK_NODES ? nodes : CHUNK_NODES) * node_bytes_);
        }
        node_count_ = other.node_count_, free_ = other.free_;
    }

    // By number, whether a node is in use.
    std::vector<bool> used() const {
        std::vector<bool> used(node_count_, true);
        for (std::uint32_t i = free_; i < node_count_ && used[i]; i = (*this)[i].parent) used[i] = false;
        return used;
    }

    std::uint32_t node_count() const { return node_count_; }
    std::size_t bytes() const { return chunks_.size() * CHUNK_NODES * node_bytes_; }

  private:
    static constexpr std::uint32_t CHUNK_NODES = 1 << 12;

    std::size_t node_bytes_;
    std::vector<std::unique_ptr<std::uint8_t[]>> chunks_;
    std::uint32_t node_count_ = 0, free_ = NIL;
};

}  // namespace kvcache
