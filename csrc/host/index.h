// The block index: which tier has which record, how blocks form chains, and which record to evict next. The reference
// twin kvcache/index/reference/index.py defines each call.
//
// A node is one block of one shard (namespace, group, shard). It takes 52 bytes, 8 for each tier, and 8 for each slot
// of a hash table that is three quarters to seven eighths full. With 10^6 nodes that is 78 to 80 bytes a node for two
// tiers, and 94 to 96 for four. A ghost takes 12 bytes and a slot. Each tier keeps its evictable nodes in one eviction
// order per cost class, class of use, and presence in a lower tier. The links of an order are within the nodes. Only
// two calls walk all nodes: an audit, over a copy, and `assign` of a shard that already has nodes.
//
// Not thread-safe: callers lock `mutex`. When memory runs out, a call throws std::bad_alloc and the index stays valid.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "age_histogram.h"
#include "eviction_order.h"
#include "ghost_history.h"
#include "hash_table.h"
#include "node_pool.h"

namespace kvcache {

constexpr std::size_t SHARD_KEY = 42;  // namespace, group, shard

// Consecutive blocks of one chain and shard.
struct BlockRun {
    const std::uint8_t* shard_key;
    const std::uint8_t* signatures;
    std::size_t blocks;
};

using Secret = std::array<std::uint64_t, 3>;
using ByTier = std::array<std::uint64_t, Node::MAX_TIERS>;

class Index {
  public:
    static constexpr std::uint64_t NEVER = std::numeric_limits<std::uint64_t>::max();
    static constexpr double NOT_EVICTABLE = std::numeric_limits<double>::infinity();
    static constexpr unsigned MAX_COST_CLASSES = 1 << 12;

    struct Victim {
        std::uint8_t signature[SIGNATURE], parent[SIGNATURE], shard_key[SHARD_KEY];
        bool parent_known, kept;
    };

    // A class of use is the number of `bounds` that the use count reaches. All classes but the first are split further
    // by the number of `gaps` that the age at the last reuse reaches. `edges`: the least age of each bin. `ghosts`: the
    // number of evicted blocks to remember for each resident block.
    Index(unsigned tiers, std::vector<unsigned> bounds, std::vector<std::uint64_t> edges, double ghosts,
          std::vector<std::uint64_t> gaps);

    std::uint64_t tick();
    std::uint64_t clock() const { return clock_; }

    // Assigns current and future nodes of these shards to a cost class. Walks all nodes if one of the shards has any.
    void assign(const std::vector<std::string>& shards, unsigned cost_class);
    unsigned cost_classes() const { return static_cast<unsigned>(by_cost_class_.size()); }
    std::uint64_t resident(unsigned cost_class, unsigned tier) const { return by_cost_class_[cost_class][tier]; }

    // The longest prefix for which each run has its last `needs[i]` blocks. `by_tier` counts each block of it at the
    // slowest tier that one of its records needs.
    std::size_t match(const BlockRun* runs, const std::uint64_t* needs, std::size_t count, ByTier* by_tier) const;
    void tier_masks(const BlockRun& run, std::uint8_t* masks) const;
    std::uint64_t stamp(const BlockRun& run) const;
    void uses(const BlockRun& run, std::uint8_t* uses) const;

    void insert(const BlockRun& run, const std::uint8_t* parent, unsigned tier);  // `parent`: null if unknown
    void refuse(const BlockRun& run);
    bool discard(const BlockRun& run, unsigned tier, bool unless_held);
    void touch(const BlockRun& run, std::uint64_t stamp);
    void restore_use(const BlockRun& run, std::uint64_t stamp, unsigned uses);  // of an earlier process
    ByTier hold(const BlockRun& run, ByTier room);
    bool release(const BlockRun& run);  // false at the first one that is not held

    // Evicts at most `count` records, the least valuable first. A record's value is `values[class of use][age bin]`
    // times the weight of its cost class (1 for classes beyond the vector). Records of infinite value, or of more than
    // `most`, are not evicted.
    std::vector<Victim> evict(unsigned tier, const double* values, const std::vector<double>& weights,
                              std::size_t count, std::uint64_t before, bool stored_below, double most);

    // The sum of the records' values in a tier. `records`: `SHARD_KEY` and `SIGNATURE` bytes each. NOT_EVICTABLE if one
    // of them is not in the tier, is held, or has that value.
    double worth(unsigned tier, const double* values, const std::vector<double>& weights, const std::uint8_t* records,
                 std::size_t count) const;

    std::size_t size() const { return table_.size(); }
    std::size_t ghosts() const { return ghosts_.size(); }
    std::uint64_t resident(unsigned tier) const { return resident_[tier]; }
    std::uint64_t held() const { return holds_; }
    void waiting(std::int64_t* out) const { ages_.count(clock_, out); }
    const std::vector<std::int64_t>& reused() const { return reused_; }
    const std::vector<std::int64_t>& forgotten() const { return forgotten_; }
    void learn(const std::int64_t* reused, const std::int64_t* forgotten);  // (class, bin), of an earlier process

    // State for the next process (history_snapshot.cpp): `state_header`, then one row for each ghost and each resident
    // node. The first overload appends rows of resident nodes from `first` to `end`, up to `most` rows in all. The
    // second appends rows of the next `count` ghosts of the span, the oldest first. Both return false after the last.
    bool export_rows(std::uint32_t first, std::uint32_t end, std::size_t most, std::vector<std::uint64_t>* rows) const;
    std::vector<std::uint64_t> state_header() const { return {secret_[0], secret_[1], secret_[2], clock_}; }
    GhostHistory::Span newest(std::size_t most) const { return ghosts_.newest(most); }
    bool export_rows(GhostHistory::Span* span, std::uint32_t count, std::vector<std::uint64_t>* rows) const;
    // Imports the rows into a new index, as ghosts. A block that is inserted before the first tick gets its use count
    // back. Each tick removes a few of the ghosts beyond the limit. Returns false for invalid rows.
    bool import_rows(const Secret& secret, std::uint64_t clock, const std::uint64_t* rows, std::size_t count);

    unsigned use_class(std::uint64_t uses) const;
    std::size_t classes() const { return ages_.classes(); }
    std::size_t bins() const { return ages_.bins(); }
    std::size_t bytes() const;
    std::size_t ghost_bytes() const { return ghosts_.bytes(); }

    // Calls take(shard key, signature) for each node from `first` to `end` that the tier has. Returns false after the
    // last node.
    template <class Take>
    bool for_each_resident(unsigned tier, std::uint32_t first, std::uint32_t end, Take take) const {
        for (std::uint32_t i = first; i < std::min(end, nodes_.node_count()); ++i) {
            const Node& node = nodes_[i];
            if (node.resident(tier)) take(shards_[node.shard].name.data(), node.signature);
        }
        return end < nodes_.node_count();
    }

    // An audit in three parts, so that no other call waits long for `mutex`: `snapshot` copies the nodes into a pool
    // that was allocated before, `audit` checks the copy, and `check_table` looks up nodes `first` to `end` in the hash
    // table. `check_table` returns false after the last node.
    std::uint32_t node_count() const { return nodes_.node_count(); }
    NodePool new_pool() const { return NodePool(tiers_); }
    std::unique_ptr<const Index> snapshot(NodePool pool) const;
    std::vector<std::string> audit() const;
    bool check_table(std::uint32_t first, std::uint32_t end, std::vector<std::string>* faults) const;
    std::vector<std::string> check() const;  // all three parts

    mutable std::mutex mutex;

    // Locks `mutex` in order of arrival. Otherwise a thread that unlocks and locks again always wins against waiting
    // threads, which have to wake up first.
    std::unique_lock<std::mutex> fair_lock() const {
        const std::lock_guard<std::mutex> next(next_);
        return std::unique_lock<std::mutex>(mutex);
    }

  private:
    Index(const Index& other, NodePool copied);

    mutable std::mutex next_;  // held by the thread that locks `mutex` next

    static constexpr std::size_t TRIMMED_PER_TICK = 64;  // ghosts beyond the limit that one tick removes
    static constexpr std::size_t BATCH = 32;             // lookups whose memory is prefetched together

    struct Shard {
        std::array<std::uint8_t, SHARD_KEY> name;
        std::uint16_t cost_class;
        std::uint32_t nodes;
        std::uint64_t hash;  // of the key: ghosts outlive the shard's number
    };
    struct ShardOrder {
        const std::deque<Shard>& shards;
        int operator()(std::uint32_t a, std::uint32_t b) const;
    };
    using TierOrder = EvictionOrder<ShardOrder>;
    struct Candidate;
    class VictimQueue;

    TierOrder order(unsigned tier) const { return {nodes_, tier, static_cast<std::uint32_t>(secret_[0]), {shards_}}; }
    std::uint64_t age(std::uint64_t stamp) const { return stamp < clock_ ? clock_ - stamp : 0; }
    std::size_t order_number(const Node& node, unsigned tier) const;
    std::size_t order_number(unsigned cost_class, unsigned tier, bool below, unsigned use_class) const;
    void add_to_order(std::uint32_t node, unsigned tier);
    void remove_from_order(std::uint32_t node, unsigned tier);
    void set_values(const double* values);
    unsigned cost_class(const Node& node) const { return shards_[node.shard].cost_class; }
    bool stored_below(const Node& node, unsigned tier) const { return node.tiers >> (tier + 1) != 0; }
    bool is_evictable(const Node& node, unsigned tier) const;

    std::uint64_t shard_hash(const std::uint8_t* name) const;
    std::uint32_t find_shard(const std::uint8_t* name) const;
    std::uint32_t acquire_shard(const std::uint8_t* name);
    void release_shard(std::uint32_t shard);

    std::uint64_t hash_at(std::uint64_t shard_hash, const std::uint8_t* signature) const;
    std::uint64_t hash(std::uint32_t shard, const std::uint8_t* signature) const;
    std::uint32_t find(std::uint32_t shard, const std::uint8_t* signature) const;
    void find(std::uint32_t shard, const std::uint8_t* signatures, std::size_t blocks, std::uint32_t* found) const;
    template <class Each>  // each(i, node number or NIL), until it returns false
    void for_each_node(const BlockRun& run, Each each) const;

    std::uint32_t create(std::uint32_t shard, const std::uint8_t* signature);
    void attach(std::uint32_t node, std::uint32_t parent);
    bool descends(std::uint32_t node, std::uint32_t ancestor) const;
    void add_to_tier(std::uint32_t node, unsigned tier);
    void remove_from_tier(std::uint32_t node, unsigned tier);
    void free_if_unused(std::uint32_t node);
    void remove_from_orders(std::uint32_t node);
    void add_to_orders(std::uint32_t node);
    void count_child(std::uint32_t parent, unsigned tier, int change);
    void count_waiting(const Node& node, int change) { ages_.add(use_class(node.uses), node.stamp, change); }
    std::uint8_t uses_after(std::uint64_t uses, std::uint64_t age) const;
    void count_reuse(std::uint64_t uses, std::uint64_t age);
    std::size_t max_ghosts() const {
        return static_cast<std::size_t>(ghosts_per_block_ * static_cast<double>(blocks_));
    }
    void trim_ghosts();

    const unsigned tiers_;
    const std::vector<unsigned> bounds_;
    const std::vector<std::uint64_t> gaps_;
    const double ghosts_per_block_;
    Secret secret_;
    bool restoring_ = false;
    std::uint64_t clock_ = 0, blocks_ = 0, holds_ = 0;  // blocks: nodes in any tier
    ByTier resident_{};
    std::vector<ByTier> by_cost_class_ = std::vector<ByTier>(1);  // resident nodes
    NodePool nodes_;
    HashTable table_;
    std::size_t table_size_ = 0;  // of a snapshot: sizes of the hash table and of the ghosts
    std::size_t ghost_count_ = 0;
    std::deque<Shard> shards_;
    std::vector<std::uint32_t> free_shards_;
    HashTable shard_table_;
    std::unordered_map<std::string, std::uint16_t>
        assigned_;                        // cost classes by shard key, also of shards without nodes
    std::vector<std::uint32_t> roots_;    // (cost class, tier, stored below, class of use)
    std::vector<std::uint64_t> oldest_;   // by root, at most the stamp of its first node
    std::vector<double> values_, least_;  // (class, bin): of the last policy; least over that bin and all younger ones
    AgeHistogram ages_;
    std::vector<std::int64_t> reused_, forgotten_;  // (class, bin)
    GhostHistory ghosts_;
};

template <class Each>
void Index::for_each_node(const BlockRun& run, Each each) const {
    const std::uint32_t shard = find_shard(run.shard_key);
    std::uint32_t found[BATCH];
    for (std::size_t first = 0; first < run.blocks; first += BATCH) {
        const std::size_t blocks = std::min(BATCH, run.blocks - first);
        if (shard == NIL) {
            std::fill_n(found, blocks, NIL);
        } else {
            find(shard, run.signatures + first * SIGNATURE, blocks, found);
        }
        for (std::size_t i = 0; i < blocks; ++i) {
            if (!each(first + i, found[i])) return;
        }
    }
}

}  // namespace kvcache
