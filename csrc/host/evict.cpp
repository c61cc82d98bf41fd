// Chooses victims by a policy's table of values. Beside its root, each eviction order has a bound on the age of its
// oldest node, which gives a lower bound on the value of its nodes. The search reads an order only when its lower bound
// is the least of all. It reads the oldest bin first and keeps a lower bound for the younger ones. `lru` thus reads one
// node for each victim, and any table at most one for each bin and class of use.
#include <algorithm>
#include <cstring>
#include <queue>
#include <utility>
#include <vector>

#include "index.h"

namespace kvcache {

// A candidate: a node, or (NIL) a lower bound for the nodes of an order from a time on.
struct Index::Candidate {
    double value;
    unsigned cost_class;
    bool below;
    unsigned use_class;
    std::uint32_t node;
    std::uint64_t stamp;  // of the node, or that time
};

class Index::VictimQueue {
  public:
    VictimQueue(Index& index, unsigned tier, const std::vector<double>& weights, std::uint64_t before,
                bool stored_below, double most)
        : index_(index),
          order_(index.order(tier)),
          tier_(tier),
          weights_(weights),
          before_(before),
          stored_below_(stored_below),
          most_(most) {
        std::vector<Candidate> cells;
        cells.reserve(2 * index.classes() * index.cost_classes());
        for (unsigned cost_class = 0; cost_class < index.cost_classes(); ++cost_class) {
            if (weight(cost_class) == NOT_EVICTABLE) continue;
            for (const bool below : {true, false}) {
                if (stored_below && !below) continue;
                for (unsigned c = 0; c < index.classes(); ++c) {
                    const std::size_t n = index.order_number(cost_class, tier, below, c);
                    if (index.roots_[n] == NIL || index.oldest_[n] >= before) continue;
                    const double lower_bound_value =
                        least(c, index.ages_.bin(index.age(index.oldest_[n]))) * weight(cost_class);
                    if (is_evictable(lower_bound_value))
                        cells.push_back({lower_bound_value, cost_class, below, c, NIL, index.oldest_[n]});
                }
            }
        }
        candidates_ = Candidates(Later{&order_}, std::move(cells));
    }

    // The least valuable node, not yet removed, or NIL.
    std::uint32_t next() {
        while (!candidates_.empty()) {
            const Candidate cell = candidates_.top();
            candidates_.pop();
            if (cell.node == NIL) {
                explore(cell.cost_class, cell.below, cell.use_class, cell.stamp);
            } else if (index_.nodes_[cell.node].is_listed(tier_)) {  // otherwise it was removed since
                return cell.node;
            }
        }
        return NIL;
    }

    // Call after the removal of a node of this cost class; its parent (or NIL) may be the new first.
    void evicted(unsigned cost_class, bool below, unsigned use_class, std::uint64_t stamp, std::uint32_t parent) {
        const std::size_t bin = index_.ages_.bin(index_.age(stamp));
        const std::uint64_t oldest = bin + 1 < index_.bins() ? index_.ages_.edge(bin + 1) : NEVER;
        const std::uint64_t from = oldest <= index_.clock_ ? index_.clock_ - oldest + 1 : 0;
        const std::uint32_t next =
            order_.first(index_.roots_[index_.order_number(cost_class, tier_, below, use_class)], from);
        const bool same_bin = next != NIL && index_.ages_.bin(index_.age(index_.nodes_[next].stamp)) == bin;
        if (same_bin) offer(next);
        if (parent != NIL && index_.nodes_[parent].is_listed(tier_) && !(same_bin && parent == next)) offer(parent);
    }

  private:
    double value(unsigned use_class, std::size_t bin) const { return index_.values_[use_class * index_.bins() + bin]; }
    double least(unsigned use_class, std::size_t bin) const { return index_.least_[use_class * index_.bins() + bin]; }

    double weight(unsigned cost_class) const { return cost_class < weights_.size() ? weights_[cost_class] : 1; }

    bool is_evictable(double worth) const { return worth < NOT_EVICTABLE && worth <= most_; }

    void explore(unsigned cost_class, bool below, unsigned use_class, std::uint64_t from) {
        const std::size_t n = index_.order_number(cost_class, tier_, below, use_class);
        const std::uint32_t node = order_.first(index_.roots_[n], from);
        if (node == NIL) return;
        if (from <= index_.oldest_[n]) index_.oldest_[n] = index_.nodes_[node].stamp;
        if (!offer(node)) return;
        const std::size_t bin = index_.ages_.bin(index_.age(index_.nodes_[node].stamp));
        if (bin == 0) return;
        const std::uint64_t younger = index_.clock_ - index_.ages_.edge(bin) + 1;
        const double lower_bound_value = least(use_class, bin - 1) * weight(cost_class);
        if (is_evictable(lower_bound_value))
            candidates_.push({lower_bound_value, cost_class, below, use_class, NIL, younger});
    }

    // False if neither this candidate nor a younger one of its order can be evicted.
    bool offer(std::uint32_t i) {
        const Node& node = index_.nodes_[i];
        const bool below = index_.stored_below(node, tier_);
        if (node.stamp >= before_ || (stored_below_ && !below)) return false;
        const unsigned c = index_.use_class(node.uses);
        const unsigned cost_class = index_.cost_class(node);
        const double worth = value(c, index_.ages_.bin(index_.age(node.stamp))) * weight(cost_class);
        if (is_evictable(worth)) candidates_.push({worth, cost_class, below, c, i, node.stamp});
        return true;
    }

    // Equal values: records stored below first, then in eviction order; bounds before nodes.
    struct Later {
        const TierOrder* order;
        bool operator()(const Candidate& a, const Candidate& b) const {
            if (a.value != b.value) return a.value > b.value;
            if (a.below != b.below) return b.below;
            if (a.stamp != b.stamp) return a.stamp > b.stamp;
            if (a.node == NIL || b.node == NIL) return a.node != NIL && b.node == NIL;
            return order->earlier(b.node, a.node);
        }
    };

    using Candidates = std::priority_queue<Candidate, std::vector<Candidate>, Later>;

    Index& index_;
    const TierOrder order_;
    const unsigned tier_;
    const std::vector<double>& weights_;
    const std::uint64_t before_;
    const bool stored_below_;
    const double most_;
    Candidates candidates_{Later{&order_}};
};

void Index::set_values(const double* values) {
    const std::size_t cells = classes() * bins();
    if (values_.size() == cells && std::memcmp(values_.data(), values, cells * sizeof *values) == 0) return;
    values_.assign(values, values + cells);
    least_ = values_;
    for (std::size_t i = 0; i < cells; ++i) {
        if (i % bins()) least_[i] = std::min(least_[i], least_[i - 1]);
    }
}

std::vector<Index::Victim> Index::evict(unsigned tier, const double* values, const std::vector<double>& weights,
                                        std::size_t count, std::uint64_t before, bool stored_below, double most) {
    std::vector<Victim> taken;
    taken.reserve(std::min<std::size_t>(count, resident_[tier]));
    set_values(values);
    VictimQueue victims(*this, tier, weights, before, stored_below, most);
    while (taken.size() < count) {
        const std::uint32_t i = victims.next();
        if (i == NIL) break;
        const Node node = nodes_[i];
        const bool was_below = this->stored_below(node, tier);
        const unsigned its_cost_class = cost_class(node);  // read before its shard may be freed
        Victim victim{};
        std::memcpy(victim.signature, node.signature, SIGNATURE);
        std::memcpy(victim.shard_key, shards_[node.shard].name.data(), SHARD_KEY);
        victim.parent_known = node.parent != Node::UNKNOWN;
        if (node.has_parent()) {
            std::memcpy(victim.parent, nodes_[node.parent].signature, SIGNATURE);
        } else if (victim.parent_known) {
            std::memcpy(victim.parent, victim.shard_key, SIGNATURE);
        }
        victim.kept = (node.tiers & ~(1u << tier)) != 0;
        remove_from_tier(i, tier);
        taken.push_back(victim);
        if (taken.size() == count) break;
        victims.evicted(its_cost_class, was_below, use_class(node.uses), node.stamp,
                        node.has_parent() ? node.parent : NIL);
    }
    return taken;
}

double Index::worth(unsigned tier, const double* values, const std::vector<double>& weights,
                    const std::uint8_t* records, std::size_t count) const {
    double sum = 0;
    std::uint32_t shard = NIL;
    for (std::size_t i = 0; i < count; ++i, records += SHARD_KEY + SIGNATURE) {
        const bool known = shard != NIL && std::memcmp(shards_[shard].name.data(), records, SHARD_KEY) == 0;
        if (!known) shard = find_shard(records);
        const std::uint32_t found = shard == NIL ? NIL : find(shard, records + SHARD_KEY);
        if (found == NIL || !nodes_[found].resident(tier) || nodes_[found].holds) return NOT_EVICTABLE;
        const Node& node = nodes_[found];
        const double weight = cost_class(node) < weights.size() ? weights[cost_class(node)] : 1;
        if (weight == NOT_EVICTABLE) return NOT_EVICTABLE;
        sum += values[use_class(node.uses) * bins() + ages_.bin(age(node.stamp))] * weight;
    }
    return sum;
}

}  // namespace kvcache
