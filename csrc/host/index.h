// Which records are in which tier, how they hang together, and who leaves next. Plain twin, with what each call means:
// kvcache/index/reference/index.py.
//
// A node is one block of one shard (namespace, group, shard). 52 bytes and 8 a tier, and 8 for each slot of a table
// that is three quarters to seven eighths full: 78 to 80 bytes with two tiers at 10^6, 94 to 96 with four. Ghosts take
// 12 bytes and a slot. Who may leave a tier stands in an order for each kind and class of use, and for whether a tier
// below has it too; orders are kept within the nodes. Nothing here is ever copied or walked whole, but for audits,
// which copy the nodes and walk the copy, and where a shard that has nodes is given another kind.
//
// Not thread-safe: callers lock `mutex`. Strong only against memory running out: then std::bad_alloc, the index sound.
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
    static constexpr double NOT_EVICTABLE = std::numeric_limits<double>::infinity();  // of what does not leave
    static constexpr unsigned MAX_COST_CLASSES = 1 << 12;

    struct Victim {
        std::uint8_t signature[SIGNATURE], parent[SIGNATURE], shard_key[SHARD_KEY];
        bool parent_known, kept;
    };

    // Classes of use: the number of `bounds` that are at most the uses; all but the first of them apart by the number
    // of `gaps` that are at most the age at which the last use came. `edges`: the least age of each bin. `ghosts`: how
    // many departures are remembered for each resident block.
    Index(unsigned tiers, std::vector<unsigned> bounds, std::vector<std::uint64_t> edges, double ghosts,
          std::vector<std::uint64_t> gaps);

    std::uint64_t tick();
    std::uint64_t clock() const { return clock_; }

    // What is at these shards is of this kind from now on, what comes later too. Takes as long as a walk over all nodes
    // where nodes are there.
    void assign(const std::vector<std::string>& shards, unsigned cost_class);
    unsigned cost_classes() const { return static_cast<unsigned>(by_cost_class_.size()); }
    std::uint64_t resident(unsigned cost_class, unsigned tier) const { return by_cost_class_[cost_class][tier]; }

    // The longest prefix for which each run has its last `needs[i]` blocks; by tier, how many have all of theirs there
    // or nearer.
    std::size_t match(const BlockRun* runs, const std::uint64_t* needs, std::size_t count, ByTier* by_tier) const;
    void tier_masks(const BlockRun& run, std::uint8_t* masks) const;
    std::uint64_t stamp(const BlockRun& run) const;
    void uses(const BlockRun& run, std::uint8_t* uses) const;

    void insert(const BlockRun& run, const std::uint8_t* parent, unsigned tier);  // `parent` null where it is unknown
    void refuse(const BlockRun& run);
    bool discard(const BlockRun& run, unsigned tier, bool unless_held);
    void touch(const BlockRun& run, std::uint64_t stamp);
    void restore_use(const BlockRun& run, std::uint64_t stamp, unsigned uses);  // as it was in another life
    ByTier hold(const BlockRun& run, ByTier room);
    bool release(const BlockRun& run);  // false at the first one that is not held

    // Takes at most `count`. `values`: of (class, bin), multiplied by the weight of a block's kind (1 for kinds beyond
    // the vector); the least valuable leaves first; infinity: none of it leaves, nor what is worth more than `most`.
    std::vector<Victim> evict(unsigned tier, const double* values, const std::vector<double>& weights,
                              std::size_t count, std::uint64_t before, bool stored_below, double most);

    // What records are worth to a tier, `SHARD_KEY` and `SIGNATURE` bytes each: the sum by `values` and `weights`, as
    // above. STAYS where one of them may not leave: the tier has it not, or it is held, or it is worth that.
    double worth(unsigned tier, const double* values, const std::vector<double>& weights, const std::uint8_t* records,
                 std::size_t count) const;

    std::size_t size() const { return table_.size(); }
    std::size_t ghosts() const { return ghosts_.size(); }
    std::uint64_t resident(unsigned tier) const { return resident_[tier]; }
    std::uint64_t held() const { return holds_; }
    void waiting(std::int64_t* out) const { ages_.count(clock_, out); }
    const std::vector<std::int64_t>& reused() const { return reused_; }
    const std::vector<std::int64_t>& forgotten() const { return forgotten_; }
    void learn(const std::int64_t* reused, const std::int64_t* forgotten);  // (class, bin), of another life

    // What outlives a process (recall.cpp): a row each of those of the nodes `first` to `end` that some tier has, while
    // there are less than `most`; of the next `count` of some ghosts, the first to leave first. False behind the last.
    // Before the rows stand the secret and the clock.
    bool export_rows(std::uint32_t first, std::uint32_t end, std::size_t most, std::vector<std::uint64_t>* rows) const;
    std::vector<std::uint64_t> state_header() const { return {secret_[0], secret_[1], secret_[2], clock_}; }
    GhostHistory::Span newest(std::size_t most) const { return ghosts_.newest(most); }
    bool export_rows(GhostHistory::Span* span, std::uint32_t count, std::vector<std::uint64_t>* rows) const;
    // Of an index that is new; what is inserted before the first tick goes on as it was, and each tick forgets a few of
    // those for which there is no room. False where the rows are none.
    bool import_rows(const Secret& secret, std::uint64_t clock, const std::uint64_t* rows, std::size_t count);

    unsigned use_class(std::uint64_t uses) const;
    std::size_t classes() const { return ages_.classes(); }
    std::size_t bins() const { return ages_.bins(); }
    std::size_t bytes() const;
    std::size_t ghost_bytes() const { return ghosts_.bytes(); }

    // Those of the nodes `first` to `end` that the tier has: take(shard, signature) for each. False behind the last
    // node.
    template <class Take>
    bool for_each_resident(unsigned tier, std::uint32_t first, std::uint32_t end, Take take) const {
        for (std::uint32_t i = first; i < std::min(end, nodes_.node_count()); ++i) {
            const Node& node = nodes_[i];
            if (node.resident(tier)) take(shards_[node.shard].name.data(), node.signature);
        }
        return end < nodes_.node_count();
    }

    // An audit in three parts, so that no caller waits long: `picture` copies what is to be looked at, into room that
    // was made before; `audit` looks at a copy; `lost` asks the table for nodes `first` to `end`, false behind the
    // last.
    std::uint32_t node_count() const { return nodes_.node_count(); }
    NodePool new_pool() const { return NodePool(tiers_); }
    std::unique_ptr<const Index> snapshot(NodePool pool) const;
    std::vector<std::string> audit() const;
    bool check_table(std::uint32_t first, std::uint32_t end, std::vector<std::string>* faults) const;
    std::vector<std::string> check() const;  // all of it

    mutable std::mutex mutex;

    // The lock, in turn: a thread that unlocks a mutex and locks it again gets it before those that wait are awake,
    // however often.
    std::unique_lock<std::mutex> fair_lock() const {
        const std::lock_guard<std::mutex> next(next_);
        return std::unique_lock<std::mutex>(mutex);
    }

  private:
    Index(const Index& other, NodePool copied);

    mutable std::mutex next_;  // whose turn is next has it

    static constexpr std::size_t TRIMMED_PER_TICK =
        64;                                   // of the remembered for which there is no room, so many does one forget
    static constexpr std::size_t BATCH = 32;  // lookups whose memory is asked for before the first is answered

    struct Shard {
        std::array<std::uint8_t, SHARD_KEY> name;
        std::uint16_t cost_class;
        std::uint32_t nodes;
        std::uint64_t hash;  // of the name: numbers are given out again, while ghosts remember
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
    template <class Each>  // each(i, node number or NIL), until it says false
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
    std::uint64_t clock_ = 0, blocks_ = 0, holds_ = 0;  // blocks: nodes that some tier has
    ByTier resident_{};
    std::vector<ByTier> by_cost_class_ = std::vector<ByTier>(1);  // residents
    NodePool nodes_;
    HashTable table_;
    std::size_t table_size_ = 0;  // of a picture: what the table and the ghosts counted
    std::size_t ghost_count_ = 0;
    std::deque<Shard> shards_;
    std::vector<std::uint32_t> free_shards_;
    HashTable shard_table_;
    std::unordered_map<std::string, std::uint16_t> assigned_;  // kinds by shard; those that have no blocks as well
    std::vector<std::uint32_t> roots_;                         // (kind, tier, below, class)
    std::vector<std::uint64_t> oldest_;                        // by root, no later than the stamp of its first
    std::vector<double> values_, least_;  // (class, bin): the last policy's; over that bin and all younger ones
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
