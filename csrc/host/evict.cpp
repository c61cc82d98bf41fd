// Victims by a policy's table. Of each order no more is known at first than how old its oldest can be, which is kept
// beside its root, and so the least value that anything in it can have: a promise. Only when that is the least of all
// is the order looked into, its oldest bin first, with a promise for all younger ones. So `lru` looks at one node a
// victim, any table at no more than one a bin and class, and a single victim costs little more than one of many.
#include <algorithm>
#include <cstring>
#include <queue>
#include <utility>
#include <vector>

#include "index.h"

namespace kvcache {

// What could leave next: a node, or (NIL) the best of what an order has from a time on, as good as it may be.
struct Index::Cell {
    double value;
    unsigned kind;
    bool below;
    unsigned use_class;
    std::uint32_t node;
    std::uint64_t stamp;  // the node's, or that time
};

class Index::Victims {
  public:
    Victims(Index& index, unsigned tier, const std::vector<double>& weights, std::uint64_t before, bool stored_below,
            double most)
        : index_(index),
          order_(index.order(tier)),
          tier_(tier),
          weights_(weights),
          before_(before),
          stored_below_(stored_below),
          most_(most) {
        std::vector<Cell> cells;
        cells.reserve(2 * index.classes() * index.kinds());
        for (unsigned kind = 0; kind < index.kinds(); ++kind) {
            if (weight(kind) == STAYS) continue;
            for (const bool below : {true, false}) {
                if (stored_below && !below) continue;
                for (unsigned c = 0; c < index.classes(); ++c) {
                    const std::size_t n = index.number(kind, tier, below, c);
                    if (index.roots_[n] == NIL || index.oldest_[n] >= before) continue;
                    const double promise = least(c, index.ages_.bin(index.age(index.oldest_[n]))) * weight(kind);
                    if (may_leave(promise)) cells.push_back({promise, kind, below, c, NIL, index.oldest_[n]});
                }
            }
        }
        cells_ = Cells(Later{&order_}, std::move(cells));
    }

    // The least valuable, which stays where it is; NIL where there is none.
    std::uint32_t next() {
        while (!cells_.empty()) {
            const Cell cell = cells_.top();
            cells_.pop();
            if (cell.node == NIL) {
                explore(cell.kind, cell.below, cell.use_class, cell.stamp);
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
        const std::uint32_t next = order_.first(index_.roots_[index_.number(kind, tier_, below, use_class)], from);
        const bool same_bin = next != NIL && index_.ages_.bin(index_.age(index_.nodes_[next].stamp)) == bin;
        if (same_bin) offer(next);
        if (parent != NIL && index_.nodes_[parent].stands(tier_) && !(same_bin && parent == next)) offer(parent);
    }

  private:
    double value(unsigned use_class, std::size_t bin) const { return index_.values_[use_class * index_.bins() + bin]; }
    double least(unsigned use_class, std::size_t bin) const { return index_.least_[use_class * index_.bins() + bin]; }

    double weight(unsigned kind) const { return kind < weights_.size() ? weights_[kind] : 1; }

    bool may_leave(double worth) const { return worth < STAYS && worth <= most_; }

    void explore(unsigned kind, bool below, unsigned use_class, std::uint64_t from) {
        const std::size_t n = index_.number(kind, tier_, below, use_class);
        const std::uint32_t node = order_.first(index_.roots_[n], from);
        if (node == NIL) return;
        if (from <= index_.oldest_[n]) index_.oldest_[n] = index_.nodes_[node].stamp;
        if (!offer(node)) return;
        const std::size_t bin = index_.ages_.bin(index_.age(index_.nodes_[node].stamp));
        if (bin == 0) return;
        const std::uint64_t younger = index_.clock_ - index_.ages_.edge(bin) + 1;
        const double promise = least(use_class, bin - 1) * weight(kind);
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
        if (may_leave(worth)) cells_.push({worth, kind, below, c, i, node.stamp});
        return true;
    }

    // Among equals those stored below first, then in order; what is not known yet before what is.
    struct Later {
        const TierOrder* order;
        bool operator()(const Cell& a, const Cell& b) const {
            if (a.value != b.value) return a.value > b.value;
            if (a.below != b.below) return b.below;
            if (a.stamp != b.stamp) return a.stamp > b.stamp;
            if (a.node == NIL || b.node == NIL) return a.node != NIL && b.node == NIL;
            return order->earlier(b.node, a.node);
        }
    };

    using Cells = std::priority_queue<Cell, std::vector<Cell>, Later>;

    Index& index_;
    const TierOrder order_;
    const unsigned tier_;
    const std::vector<double>& weights_;
    const std::uint64_t before_;
    const bool stored_below_;
    const double most_;
    Cells cells_{Later{&order_}};
};

void Index::rank(const double* values) {
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
    rank(values);
    Victims victims(*this, tier, weights, before, stored_below, most);
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
        taken.push_back(victim);
        if (taken.size() == count) break;
        victims.left(its_kind, was_below, use_class(node.uses), node.stamp, node.has_parent() ? node.parent : NIL);
    }
    return taken;
}

double Index::worth(unsigned tier, const double* values, const std::vector<double>& weights,
                    const std::uint8_t* records, std::size_t count) const {
    double sum = 0;
    std::uint32_t place = NIL;
    for (std::size_t i = 0; i < count; ++i, records += PLACE + SIGNATURE) {
        const bool known = place != NIL && std::memcmp(places_[place].name.data(), records, PLACE) == 0;
        if (!known) place = find_place(records);
        const std::uint32_t found = place == NIL ? NIL : find(place, records + PLACE);
        if (found == NIL || !nodes_[found].resident(tier) || nodes_[found].holds) return STAYS;
        const Node& node = nodes_[found];
        const double weight = kind(node) < weights.size() ? weights[kind(node)] : 1;
        if (weight == STAYS) return STAYS;
        sum += values[use_class(node.uses) * bins() + ages_.bin(age(node.stamp))] * weight;
    }
    return sum;
}

}  // namespace kvcache
