// The audit: compares the index's counts, orders and tables with a walk over a copy of all nodes.
#include <algorithm>
#include <cstring>
#include <utility>

#include "index.h"

namespace kvcache {
namespace {

std::string label(const Node& node) {
    std::string text = "index: ";
    for (int i = 0; i < 8; ++i) {
        constexpr char digits[] = "0123456789abcdef";
        text += digits[node.signature[i] >> 4], text += digits[node.signature[i] & 15];
    }
    return text;
}

}  // namespace

Index::Index(const Index& other, NodePool copied)
    : tiers_(other.tiers_),
      bounds_(other.bounds_),
      gaps_(other.gaps_),
      ghosts_per_block_(other.ghosts_per_block_),
      secret_(other.secret_),
      clock_(other.clock_),
      blocks_(other.blocks_),
      holds_(other.holds_),
      resident_(other.resident_),
      by_cost_class_(other.by_cost_class_),
      nodes_(std::move(copied)),
      table_size_(other.table_.size()),
      ghost_count_(other.ghosts_.size()),
      shards_(other.shards_),
      roots_(other.roots_),
      oldest_(other.oldest_),
      ages_(other.ages_) {
    nodes_.copy(other.nodes_);
}

std::unique_ptr<const Index> Index::snapshot(NodePool pool) const {
    return std::unique_ptr<const Index>(new Index(*this, std::move(pool)));
}

bool Index::check_table(std::uint32_t first, std::uint32_t end, std::vector<std::string>* faults) const {
    for (std::uint32_t i = first; i < std::min(end, nodes_.node_count()); ++i) {
        const Node& node = nodes_[i];
        if ((node.tiers || node.holds) && find(node.shard, node.signature) != i) {
            faults->push_back(label(node) + " is not in the table");
        }
    }
    return end < nodes_.node_count();
}

std::vector<std::string> Index::check() const {
    std::vector<std::string> faults = snapshot(new_pool())->audit();
    check_table(0, node_count(), &faults);
    return faults;
}

std::vector<std::string> Index::audit() const {
    std::vector<std::string> faults;
    const std::vector<bool> used = nodes_.used();
    const auto compare = [&](std::string what, std::uint64_t counted, std::uint64_t found) {
        if (counted == found) return;
        faults.push_back("index: counts " + std::to_string(counted) + " " + what + ", " + std::to_string(found) +
                         " are there");
    };
    std::vector<ByTier> children(nodes_.node_count(), ByTier{});
    ByTier resident{}, listed{};
    std::vector<ByTier> by_cost_class(cost_classes(), ByTier{});
    std::vector<std::uint64_t> of_shard(shards_.size());
    std::uint64_t nodes = 0, blocks = 0, holds = 0;
    for (std::uint32_t i = 0; i < nodes_.node_count(); ++i) {
        const Node& node = nodes_[i];
        if (!used[i]) continue;
        if (node.shard >= shards_.size()) {
            faults.push_back(label(node) + " is nowhere");
            return faults;
        }
        ++nodes, blocks += node.tiers != 0, holds += node.holds, ++of_shard[node.shard];
        for (unsigned t = 0; t < tiers_; ++t) {
            resident[t] += node.resident(t), listed[t] += node.is_listed(t);
            by_cost_class[cost_class(node)][t] += node.resident(t);
            if (node.resident(t) && node.has_parent()) ++children[node.parent][t];
        }
    }
    compare("nodes", table_size_, nodes);
    compare("blocks", blocks_, blocks);
    compare("holds", holds_, holds);
    for (std::size_t p = 0; p < shards_.size(); ++p) compare("nodes of a shard", shards_[p].nodes, of_shard[p]);
    for (unsigned t = 0; t < tiers_; ++t) compare("residents of a tier", resident_[t], resident[t]);
    if (by_cost_class != by_cost_class_) faults.push_back("index: counts residents of a kind wrong");

    for (std::uint32_t i = 0; i < nodes_.node_count(); ++i) {
        const Node& node = nodes_[i];
        if (!used[i]) continue;
        bool wanted = node.tiers || node.holds;
        for (unsigned t = 0; t < tiers_; ++t) {
            wanted = wanted || children[i][t];
            if (node.children(t) != children[i][t]) faults.push_back(label(node) + " counts its children wrong");
            if (node.is_listed(t) != is_evictable(node, t)) {
                faults.push_back(label(node) + (node.is_listed(t) ? " stands in" : " is missing in") + " an order");
            }
        }
        if (!wanted) faults.push_back(label(node) + " is remembered for nothing");
    }
    for (unsigned t = 0; t < tiers_; ++t) {
        std::uint64_t listed_nodes = 0;
        for (std::size_t list = 0; list < 2 * classes() * cost_classes(); ++list) {
            const std::size_t within = list % (2 * classes()), its_cost_class = list / (2 * classes());
            const std::size_t n = 2 * (its_cost_class * tiers_ + t) * classes() + within;
            const std::uint32_t top = roots_[n];
            std::vector<std::uint32_t> in_order, path;
            for (std::uint32_t at = top; at != NIL || !path.empty();) {
                for (; at != NIL; at = nodes_[at].in(t).before) path.push_back(at);
                at = path.back(), path.pop_back();
                in_order.push_back(at);
                for (const std::uint32_t below : {nodes_[at].in(t).before, nodes_[at].in(t).after}) {
                    const bool sound = below == NIL || order(t).weight(at) >= order(t).weight(below);
                    if (!sound) faults.push_back(label(nodes_[at]) + " stands too high in its order");
                }
                at = nodes_[at].in(t).after;
            }
            listed_nodes += in_order.size();
            if (top != NIL && nodes_[in_order[0]].stamp < oldest_[n]) {
                faults.push_back(label(nodes_[in_order[0]]) + " is older than its order");
            }
            for (std::size_t i = 0; i < in_order.size(); ++i) {
                const Node& node = nodes_[in_order[i]];
                const bool at_home = its_cost_class == cost_class(node) &&
                                     within == stored_below(node, t) * classes() + use_class(node.uses);
                if (!at_home) faults.push_back(label(node) + " stands in the wrong order");
                if (i > 0 && !order(t).earlier(in_order[i - 1], in_order[i])) {
                    faults.push_back(label(node) + " is at a wrong position in its order");
                }
            }
        }
        compare("nodes in a tier's orders", listed_nodes, listed[t]);
    }
    std::vector<std::int64_t> counts(classes() * bins());
    waiting(counts.data());
    std::int64_t waiting = 0;
    for (const std::int64_t count : counts) {
        waiting += count;
        if (count < 0) faults.push_back("index: counts fewer than no blocks of an age");
    }
    compare("blocks and ghosts by age", static_cast<std::uint64_t>(waiting), blocks_ + ghost_count_);
    return faults;
}

}  // namespace kvcache
