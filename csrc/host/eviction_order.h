// Those of a tier that may leave, in the order in which they would: the least recently used first, among equals the
// deeper. A treap over the nodes' own links: finding, entering and leaving anywhere takes a logarithmic number of
// steps, most of them within the processor's caches as they are those of the victim before.
#pragma once

#include <cstdint>
#include <cstring>

#include "node_pool.h"

namespace kvcache {

// `shard_order(a, b)` compares the names of two shards: negative where a comes first.
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

    // The first that was last used at `stamp` or later; NIL where there is none.
    std::uint32_t first(std::uint32_t root, std::uint64_t stamp) const {
        std::uint32_t found = NIL;
        while (root != NIL) {
            const bool later = nodes_[root].stamp >= stamp;
            if (later) found = root;
            root = *side(root, !later);
        }
        return found;
    }

    // Who has more stands nearer to the root; as good as random, so that no order of coming makes a deep tree.
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
