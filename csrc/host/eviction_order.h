// One eviction order of a tier: least recently used first, then deeper first, then by signature and shard key. A treap
// over links within the nodes. Insertion, removal and search take a logarithmic number of steps. Most of these steps
// hit the processor's caches, because consecutive victims share them.
#pragma once

#include <cstdint>
#include <cstring>

#include "node_pool.h"

namespace kvcache {

// `shard_order(a, b)` compares two shard keys: negative if a is first.
template <class ShardOrder>
class EvictionOrder {
  public:
    EvictionOrder(const NodePool& nodes, unsigned tier, std::uint32_t secret, ShardOrder shard_order)
        : nodes_(nodes), tier_(tier), secret_(secret), shard_order_(shard_order) {}

    bool earlier(std::uint32_t a, std::uint32_t b) const {
        const Node &one = nodes_[a], &other = nodes_[b];
        if (one.stamp != other.stamp) return one.stamp < other.stamp;
        if (one.depth != other.depth) return one.depth > other.depth;
        const int order = std::memcmp(one.signature, other.signature, SIGNATURE);
        return order ? order < 0 : one.shard != other.shard && shard_order_(one.shard, other.shard) < 0;
    }

    void insert(std::uint32_t* root, std::uint32_t node) const {
        while (*root != NIL && weight(*root) >= weight(node)) root = side(*root, earlier(*root, node));
        std::uint32_t tree = *root;
        *root = node;
        std::uint32_t *before = side(node, false), *after = side(node, true);
        while (tree != NIL) {
            const bool is_before = earlier(tree, node);
            std::uint32_t*& end = is_before ? before : after;
            *end = tree;
            end = side(tree, is_before);
            tree = *end;
        }
        *before = *after = NIL;
    }

    void erase(std::uint32_t* root, std::uint32_t node) const {
        while (*root != node) root = side(*root, earlier(*root, node));
        std::uint32_t before = *side(node, false), after = *side(node, true);
        while (before != NIL && after != NIL) {
            const bool take_after = weight(before) < weight(after);
            std::uint32_t& top = take_after ? after : before;
            *root = top;
            root = side(top, !take_after);
            top = *root;
        }
        *root = before != NIL ? before : after;
    }

    // The first node last used at `stamp` or later, or NIL.
    std::uint32_t first(std::uint32_t root, std::uint64_t stamp) const {
        std::uint32_t found = NIL;
        while (root != NIL) {
            const bool later = nodes_[root].stamp >= stamp;
            if (later) found = root;
            root = *side(root, !later);
        }
        return found;
    }

    // Heap priority: a larger weight is nearer to the root. Keyed by a secret, so that no insertion order makes the
    // tree deep.
    std::uint32_t weight(std::uint32_t node) const {
        std::uint32_t mixed = node ^ secret_;
        mixed = (mixed ^ mixed >> 16) * 0x85ebca6b;
        mixed = (mixed ^ mixed >> 13) * 0xc2b2ae35;
        return mixed ^ mixed >> 16;
    }

  private:
    std::uint32_t* side(std::uint32_t node, bool after) const {
        TierLinks& listed_nodes = nodes_[node].in(tier_);
        return after ? &listed_nodes.after : &listed_nodes.before;
    }

    const NodePool& nodes_;
    unsigned tier_;
    std::uint32_t secret_;
    ShardOrder shard_order_;
};

}  // namespace kvcache
