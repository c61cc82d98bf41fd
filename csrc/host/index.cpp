#include "index.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <random>
#include <utility>

namespace kvcache {

Index::Index(unsigned tiers, std::vector<unsigned> bounds, std::vector<std::uint64_t> edges, double ghosts,
             std::vector<std::uint64_t> gaps)
    : tiers_(tiers),
      bounds_(std::move(bounds)),
      gaps_(std::move(gaps)),
      ghosts_per_block_(ghosts),
      nodes_(tiers),
      ages_(1 + bounds_.size() * (gaps_.size() + 1), std::move(edges)),
      reused_(ages_.classes() * ages_.bins()),
      forgotten_(ages_.classes() * ages_.bins()) {
    roots_.assign(2 * tiers * ages_.classes(), NIL);
    oldest_.resize(roots_.size());
    std::random_device random;
    for (std::uint64_t& word : secret_) word = std::uint64_t{random()} << 32 | random();
}

std::uint64_t Index::tick() {
    restoring_ = false;
    ghosts_.shrink(max_ghosts(), TRIMMED_PER_TICK);
    trim_ghosts();
    ages_.tick(++clock_);
    return clock_;
}

void Index::assign(const std::vector<std::string>& shards, unsigned cost_class) {
    if (cost_class >= cost_classes()) {
        roots_.resize((cost_class + 1) * 2 * tiers_ * ages_.classes(), NIL);
        oldest_.resize(roots_.size());
        by_cost_class_.resize(cost_class + 1);
    }
    std::vector<std::uint32_t> moving;
    for (const std::string& name : shards) {
        if (cost_class == 0) {
            assigned_.erase(name);
        } else {
            assigned_[name] = static_cast<std::uint16_t>(cost_class);
        }
        const std::uint32_t shard = find_shard(reinterpret_cast<const std::uint8_t*>(name.data()));
        if (shard != NIL && shards_[shard].cost_class != cost_class) moving.push_back(shard);
    }
    if (moving.empty()) return;
    const auto each = [&](auto call) {
        for (std::uint32_t i = 0; i < nodes_.node_count(); ++i) {
            const Node& node = nodes_[i];
            if (node.tiers && std::find(moving.begin(), moving.end(), node.shard) != moving.end()) call(i);
        }
    };
    each([&](std::uint32_t i) {
        remove_from_orders(i);
        for (unsigned t = 0; t < tiers_; ++t) {
            by_cost_class_[this->cost_class(nodes_[i])][t] -= nodes_[i].resident(t),
                by_cost_class_[cost_class][t] += nodes_[i].resident(t);
        }
    });
    for (const std::uint32_t shard : moving) shards_[shard].cost_class = static_cast<std::uint16_t>(cost_class);
    each([&](std::uint32_t i) { add_to_orders(i); });
}

// changes

std::uint32_t Index::create(std::uint32_t shard, const std::uint8_t* signature) {
    const std::uint32_t i = nodes_.allocate();
    Node& node = nodes_[i];
    std::memcpy(node.signature, signature, SIGNATURE);
    node.shard = shard, node.parent = Node::NEVER;
    node.stamp = clock_, node.uses = 0, node.holds = 0;
    node.depth = 0, node.tiers = 0, node.listed = 0;
    for (unsigned t = 0; t < tiers_; ++t) node.in(t).children = 0;
    try {
        table_.insert(static_cast<std::uint32_t>(hash(shard, signature)), i);
    } catch (const std::bad_alloc&) {
        nodes_.free(i);
        throw;
    }
    ++shards_[shard].nodes;
    return i;
}

void Index::insert(const BlockRun& run, const std::uint8_t* parent, unsigned tier) {
    if (run.blocks == 0) return;
    const std::uint32_t shard = acquire_shard(run.shard_key);
    std::uint32_t before = NIL;
    for (std::size_t i = 0; i < run.blocks; ++i) {
        const std::uint8_t* signature = run.signatures + i * SIGNATURE;
        std::uint32_t node = find(shard, signature);
        try {
            if (node == NIL) node = create(shard, signature);
            if (!nodes_[node].tiers) {
                if (i == 0) {
                    if (!parent) {
                        before = Node::UNKNOWN;
                    } else if (std::memcmp(parent, run.shard_key, SIGNATURE) == 0) {
                        before = Node::FIRST;
                    } else if ((before = find(shard, parent)) == NIL) {
                        before = create(shard, parent);
                    }
                }
                attach(node, before);
            }
        } catch (const std::bad_alloc&) {
            if (node != NIL) {
                free_if_unused(node);
            } else {
                release_shard(shard);
            }
            throw;
        }
        add_to_tier(node, tier);
        before = node;
    }
}

// Called before the first tier gets the node.
void Index::attach(std::uint32_t i, std::uint32_t parent) {
    Node& node = nodes_[i];
    GhostHistory::Use use;
    if (node.parent == Node::NEVER && ghosts_.remove(hash(node.shard, node.signature), &use)) {
        ages_.add(use_class(use.uses), use.stamp, -1);
        if (restoring_) {
            node.uses = use.uses & 0xff, node.stamp = use.stamp;
        } else {
            count_reuse(use.uses, age(use.stamp));
            node.uses = uses_after(use.uses, age(use.stamp));
        }
    }
    node.parent = descends(parent, i) ? Node::UNKNOWN : parent;
    node.depth = node.has_parent() ? std::min<std::uint32_t>(nodes_[node.parent].depth + 1u, Node::MAX_DEPTH) : 0;
    ++blocks_;
    count_waiting(node, 1);
}

// A cycle of parents could never be evicted. Only a node that already has children can be an ancestor.
bool Index::descends(std::uint32_t i, std::uint32_t ancestor) const {
    const Node& node = nodes_[ancestor];
    bool may = i == ancestor;
    for (unsigned t = 0; t < tiers_; ++t) may = may || node.children(t);
    for (; may && i < Node::NEVER; i = nodes_[i].parent) {
        if (i == ancestor) return true;
    }
    return false;
}

void Index::add_to_tier(std::uint32_t i, unsigned tier) {
    Node& node = nodes_[i];
    if (node.resident(tier)) return;
    remove_from_orders(i);
    if (node.has_parent()) count_child(node.parent, tier, 1);
    node.tiers |= 1u << tier;
    ++resident_[tier], ++by_cost_class_[cost_class(node)][tier];
    add_to_orders(i);
}

void Index::remove_from_tier(std::uint32_t i, unsigned tier) {
    Node& node = nodes_[i];
    remove_from_orders(i);
    node.tiers &= ~(1u << tier);
    --resident_[tier], --by_cost_class_[cost_class(node)][tier];
    add_to_orders(i);
    const std::uint32_t parent = node.has_parent() ? node.parent : NIL;
    if (!node.tiers) {
        node.parent = Node::GONE;
        --blocks_;
        count_waiting(node, -1);
    }
    if (parent != NIL) {
        count_child(parent, tier, -1);
        free_if_unused(parent);
    }
    free_if_unused(i);
    trim_ghosts();
}

bool Index::discard(const BlockRun& run, unsigned tier, bool unless_held) {
    std::uint32_t found = NIL;
    for_each_node(run, [&](std::size_t, std::uint32_t node) {
        found = node;
        return false;
    });
    if (found == NIL || !nodes_[found].resident(tier) || (unless_held && nodes_[found].holds)) return false;
    remove_from_tier(found, tier);
    return true;
}

void Index::refuse(const BlockRun& run) {
    if (ghosts_per_block_ <= 0) return;
    const std::uint64_t named = shard_hash(run.shard_key);
    for_each_node(run, [&](std::size_t i, std::uint32_t node) {
        if (node != NIL) return true;
        const std::uint64_t name = hash_at(named, run.signatures + i * SIGNATURE);
        GhostHistory::Use use{0, 0};
        std::uint64_t uses = 0;
        if (ghosts_.remove(name, &use)) {
            uses = uses_after(use.uses, age(use.stamp));
            ages_.add(use_class(use.uses), use.stamp, -1);
            count_reuse(use.uses, age(use.stamp));
        }
        try {
            ghosts_.add(name, {clock_, uses});
            ages_.add(use_class(uses), clock_, 1);
        } catch (const std::bad_alloc&) {  // without memory, no ghost is kept
        }
        return true;
    });
    trim_ghosts();
}

// Unless a tier has it, a request holds it or a child refers to it.
void Index::free_if_unused(std::uint32_t i) {
    const Node& node = nodes_[i];
    if (node.tiers || node.holds) return;
    for (unsigned t = 0; t < tiers_; ++t) {
        if (node.children(t)) return;
    }
    const std::uint64_t name = hash(node.shard, node.signature);
    if (node.parent == Node::GONE && ghosts_per_block_ > 0) {
        try {
            ghosts_.add(name, {node.stamp, node.uses});
            count_waiting(node, 1);
        } catch (const std::bad_alloc&) {  // without memory, no ghost is kept
        }
    }
    table_.erase(static_cast<std::uint32_t>(name), i);
    --shards_[node.shard].nodes;
    release_shard(node.shard);
    nodes_.free(i);
}

void Index::trim_ghosts() {
    ghosts_.trim(max_ghosts(), [&](GhostHistory::Use use) {
        ages_.add(use_class(use.uses), use.stamp, -1);
        ++forgotten_[use_class(use.uses) * ages_.bins() + ages_.bin(age(use.stamp))];
    });
}

void Index::touch(const BlockRun& run, std::uint64_t stamp) {
    stamp = std::min(stamp, clock_);
    for_each_node(run, [&](std::size_t, std::uint32_t i) {
        if (i == NIL) return true;
        Node& node = nodes_[i];
        const bool is_listed = node.listed != 0;
        if (is_listed) remove_from_orders(i);
        if (node.tiers) {
            count_waiting(node, -1);
            count_reuse(node.uses, stamp > node.stamp ? stamp - node.stamp : 0);
        }
        node.uses = uses_after(node.uses, stamp > node.stamp ? stamp - node.stamp : 0);
        if (stamp > node.stamp) node.stamp = stamp;
        if (node.tiers) count_waiting(node, 1);
        if (is_listed) add_to_orders(i);
        return true;
    });
}

void Index::restore_use(const BlockRun& run, std::uint64_t stamp, unsigned uses) {
    stamp = std::min(stamp, clock_);
    for_each_node(run, [&](std::size_t, std::uint32_t i) {
        if (i == NIL || !nodes_[i].tiers) return true;
        Node& node = nodes_[i];
        const bool is_listed = node.listed != 0;
        if (is_listed) remove_from_orders(i);
        count_waiting(node, -1);
        node.uses = uses, node.stamp = stamp;
        count_waiting(node, 1);
        if (is_listed) add_to_orders(i);
        return true;
    });
}

ByTier Index::hold(const BlockRun& run, ByTier room) {
    ByTier held{};
    for_each_node(run, [&](std::size_t, std::uint32_t i) {
        if (i == NIL || !nodes_[i].tiers || nodes_[i].holds == Node::MAX_HOLDS) return false;
        Node& node = nodes_[i];
        const unsigned fastest = static_cast<unsigned>(__builtin_ctz(node.tiers));
        if (room[fastest] == held[fastest]) return false;
        if (!node.holds) remove_from_orders(i);
        node.holds = node.holds + 1u;
        ++holds_, ++held[fastest];
        return true;
    });
    return held;
}

bool Index::release(const BlockRun& run) {
    bool sound = true;
    for_each_node(run, [&](std::size_t, std::uint32_t i) {
        sound = i != NIL && nodes_[i].holds > 0;
        if (!sound) return false;
        Node& node = nodes_[i];
        node.holds = node.holds - 1u;
        --holds_;
        if (!node.holds) {
            add_to_orders(i);
            free_if_unused(i);
        }
        return true;
    });
    trim_ghosts();
    return sound;
}

// orders

unsigned Index::use_class(std::uint64_t uses) const {
    const std::uint64_t count = uses & Node::MAX_USES;
    unsigned c = 0;
    while (c < bounds_.size() && bounds_[c] <= count) ++c;
    return c ? 1 + (c - 1) * static_cast<unsigned>(gaps_.size() + 1) + static_cast<unsigned>(uses >> Node::USES_BITS)
             : 0;
}

std::uint8_t Index::uses_after(std::uint64_t uses, std::uint64_t age) const {
    const std::uint64_t count = std::min<std::uint64_t>((uses & Node::MAX_USES) + 1, Node::MAX_USES);
    const auto gap = std::upper_bound(gaps_.begin(), gaps_.end(), age) - gaps_.begin();
    return static_cast<std::uint8_t>(count | static_cast<std::uint64_t>(gap) << Node::USES_BITS);
}

std::size_t Index::order_number(unsigned cost_class, unsigned tier, bool below, unsigned use_class) const {
    return (2 * (std::size_t{cost_class} * tiers_ + tier) + below) * ages_.classes() + use_class;
}

std::size_t Index::order_number(const Node& node, unsigned tier) const {
    return order_number(cost_class(node), tier, stored_below(node, tier), use_class(node.uses));
}

bool Index::is_evictable(const Node& node, unsigned tier) const {
    return node.resident(tier) && !node.holds && !node.children(tier);
}

void Index::add_to_order(std::uint32_t i, unsigned tier) {
    Node& node = nodes_[i];
    const std::size_t n = order_number(node, tier);
    oldest_[n] = roots_[n] == NIL ? node.stamp : std::min<std::uint64_t>(oldest_[n], node.stamp);
    node.listed |= 1u << tier;
    order(tier).insert(&roots_[n], i);
}

void Index::remove_from_order(std::uint32_t i, unsigned tier) {
    Node& node = nodes_[i];
    order(tier).erase(&roots_[order_number(node, tier)], i);
    node.listed &= ~(1u << tier);
    node.in(tier).children = 0;
}

void Index::remove_from_orders(std::uint32_t i) {
    for (unsigned t = 0; t < tiers_; ++t) {
        if (nodes_[i].is_listed(t)) remove_from_order(i, t);
    }
}

void Index::add_to_orders(std::uint32_t i) {
    for (unsigned t = 0; t < tiers_; ++t) {
        if (!nodes_[i].is_listed(t) && is_evictable(nodes_[i], t)) add_to_order(i, t);
    }
}

void Index::count_child(std::uint32_t parent, unsigned tier, int change) {
    Node& node = nodes_[parent];
    if (node.is_listed(tier)) remove_from_order(parent, tier);
    node.in(tier).children += static_cast<std::uint32_t>(change);
    if (!node.in(tier).children) add_to_orders(parent);
}

void Index::learn(const std::int64_t* reused, const std::int64_t* forgotten) {
    for (std::size_t i = 0; i < reused_.size(); ++i) reused_[i] += reused[i], forgotten_[i] += forgotten[i];
}

void Index::count_reuse(std::uint64_t uses, std::uint64_t age) {
    ++reused_[use_class(uses) * ages_.bins() + ages_.bin(age)];
}

}  // namespace kvcache
