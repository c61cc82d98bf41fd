// Victims by a policy's table. Of each order only the oldest bin is looked at first, with the least value of all
// younger bins beside it as a promise: that one is kept only when it is the least of all. So `lru` looks at one node a
// victim, and any table at no more than one a bin and class.
#include <algorithm>
#include <cstring>
#include <queue>

#include "index.h"

namespace kvcache {

// What could leave next: a node, or (NIL) the best of what an order has from a time on.
struct Index::Cell {
    double value;
    unsigned kind;
    bool below;
    unsigned use_class;
    std::uint32_t node;
    std::uint64_t from;
};

class Index::Victims {
  public:
    Victims(Index& index, unsigned tier, const double* values, const std::vector<double>& weights, std::uint64_t before,
            bool stored_below, double most)
        : index_(index),
          order_(index.order(tier)),
          tier_(tier),
          values_(values),
          weights_(weights),
          before_(before),
          stored_below_(stored_below),
          most_(most),
          least_(index.classes() * index.bins()) {
        for (unsigned c = 0; c < index.classes(); ++c) {
            double least = value(c, 0);
            for (std::size_t b = 0; b < index.bins(); ++b) {
                least_[c * index.bins() + b] = least = std::min(least, value(c, b));
            }
        }
        for (unsigned kind = 0; kind < index.kinds(); ++kind) {
            if (weight(kind) == STAYS) continue;
            for (unsigned c = 0; c < index.classes(); ++c) {
                for (const bool below : {true, false}) {
                    if (below || !stored_below) explore(kind, below, c, 0);
                }
            }
        }
    }

    // The least valuable, which stays where it is; NIL where there is none.
    std::uint32_t next() {
        while (!cells_.empty()) {
            const Cell cell = cells_.top();
            cells_.pop();
            if (cell.node == NIL) {
                explore(cell.kind, cell.below, cell.use_class, cell.from);
            } else if (index_.nodes_[cell.node].stands(tier_)) {  // else it left since
                return cell.node;
            }
        }
        return NIL;
    }

    // A node of this kind left, and its parent (or NIL) may have come to the front.
    void left(unsigned kind, bool below, unsigned use_class, std::uint64_t stamp, std::uint32_t parent) {
        const std::size_t bin = index_.ages_.bin(index_.age(stamp));
        const std::uint64_t oldest = bin + 1 < index_.bins() ? index_.ages_.edge(bin + 1) : NEVER;
        const std::uint64_t from = oldest <= index_.clock_ ? index_.clock_ - oldest + 1 : 0;
        const std::uint32_t next = order_.first(*index_.root(kind, tier_, below, use_class), from);
        const bool same_bin = next != NIL && index_.ages_.bin(index_.age(index_.nodes_[next].stamp)) == bin;
        if (same_bin) offer(next);
        if (parent != NIL && index_.nodes_[parent].stands(tier_) && !(same_bin && parent == next)) offer(parent);
    }

  private:
    double value(unsigned use_class, std::size_t bin) const { return values_[use_class * index_.bins() + bin]; }

    double weight(unsigned kind) const { return kind < weights_.size() ? weights_[kind] : 1; }

    bool may_leave(double worth) const { return worth < STAYS && worth <= most_; }

    void explore(unsigned kind, bool below, unsigned use_class, std::uint64_t from) {
        const std::uint32_t node = order_.first(*index_.root(kind, tier_, below, use_class), from);
        if (node == NIL || !offer(node)) return;
        const std::size_t bin = index_.ages_.bin(index_.age(index_.nodes_[node].stamp));
        if (bin == 0) return;
        const std::uint64_t younger = index_.clock_ - index_.ages_.edge(bin) + 1;
        const double promise = least_[use_class * index_.bins() + bin - 1] * weight(kind);
        if (may_leave(promise)) cells_.push({promise, kind, below, use_class, NIL, younger});
    }

    // False where neither this one nor a younger one of its order can leave.
    bool offer(std::uint32_t i) {
        const Node& node = index_.nodes_[i];
        const bool below = index_.below(node, tier_);
        if (node.stamp >= before_ || (stored_below_ && !below)) return false;
        const unsigned c = index_.use_class(node.uses);
        const unsigned kind = index_.kind(node);
        const double worth = value(c, index_.ages_.bin(index_.age(node.stamp))) * weight(kind);
        if (may_leave(worth)) cells_.push({worth, kind, below, c, i, 0});
        return true;
    }

    // Among equals those stored below first, then in order; what is not known yet before what is.
    struct Later {
        const TierOrder& order;
        bool operator()(const Cell& a, const Cell& b) const {
            if (a.value != b.value) return a.value > b.value;
            if (a.node == NIL || b.node == NIL) return a.node != NIL && b.node == NIL;
            return a.below != b.below ? b.below : order.earlier(b.node, a.node);
        }
    };

    Index& index_;
    const TierOrder order_;
    const unsigned tier_;
    const double* const values_;
    const std::vector<double>& weights_;
    const std::uint64_t before_;
    const bool stored_below_;
    const double most_;
    std::vector<double> least_;  // of (class, bin): over that bin and all younger ones
    std::priority_queue<Cell, std::vector<Cell>, Later> cells_{Later{order_}};
};

std::vector<Index::Victim> Index::evict(unsigned tier, const double* values, const std::vector<double>& weights,
                                        std::size_t count, std::uint64_t before, bool stored_below, double most) {
    std::vector<Victim> taken;
    taken.reserve(std::min<std::size_t>(count, resident_[tier]));
    Victims victims(*this, tier, values, weights, before, stored_below, most);
    while (taken.size() < count) {
        const std::uint32_t i = victims.next();
        if (i == NIL) break;
        const Node node = nodes_[i];
        const bool was_below = below(node, tier);
        const unsigned its_kind = kind(node);  // its place may go with it
        Victim victim{};
        std::memcpy(victim.signature, node.signature, SIGNATURE);
        std::memcpy(victim.place, places_[node.place].name.data(), PLACE);
        victim.parent_known = node.parent != Node::UNKNOWN;
        if (node.has_parent()) {
            std::memcpy(victim.parent, nodes_[node.parent].signature, SIGNATURE);
        } else if (victim.parent_known) {
            std::memcpy(victim.parent, victim.place, SIGNATURE);
        }
        victim.kept = (node.tiers & ~(1u << tier)) != 0;
        drop(i, tier);
        victims.left(its_kind, was_below, use_class(node.uses), node.stamp, node.has_parent() ? node.parent : NIL);
        taken.push_back(victim);
    }
    return taken;
}

}  // namespace kvcache
