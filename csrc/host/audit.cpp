// The index against what a walk over all of its nodes finds. Slow, for tests and for whoever asks.
#include <cstring>

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

std::vector<std::string> Index::check() const {
    std::vector<std::string> faults;
    const auto compare = [&](std::string what, std::uint64_t counted, std::uint64_t found) {
        if (counted == found) return;
        faults.push_back("index: counts " + std::to_string(counted) + " " + what + ", " + std::to_string(found) +
                         " are there");
    };
    std::vector<ByTier> children(nodes_.made(), ByTier{});
    ByTier resident{}, listed{};
    std::vector<std::uint64_t> at_place(places_.size());
    std::uint64_t nodes = 0, blocks = 0, holds = 0;
    for (std::uint32_t i = 0; i < nodes_.made(); ++i) {
        const Node& node = nodes_[i];
        if (node.place >= places_.size() || find(node.place, node.signature) != i) continue;  // freed
        ++nodes, blocks += node.tiers != 0, holds += node.holds, ++at_place[node.place];
        for (unsigned t = 0; t < tiers_; ++t) {
            resident[t] += node.resident(t), listed[t] += node.stands(t);
            if (node.resident(t) && node.has_parent()) ++children[node.parent][t];
        }
    }
    compare("nodes", table_.size(), nodes);
    compare("blocks", blocks_, blocks);
    compare("holds", holds_, holds);
    for (std::size_t p = 0; p < places_.size(); ++p) compare("nodes at a place", places_[p].nodes, at_place[p]);
    for (unsigned t = 0; t < tiers_; ++t) compare("residents of a tier", resident_[t], resident[t]);

    for (std::uint32_t i = 0; i < nodes_.made(); ++i) {
        const Node& node = nodes_[i];
        if (node.place >= places_.size() || find(node.place, node.signature) != i) continue;
        bool wanted = node.tiers || node.holds;
        for (unsigned t = 0; t < tiers_; ++t) {
            wanted = wanted || children[i][t];
            if (node.children(t) != children[i][t]) faults.push_back(label(node) + " counts its children wrong");
            if (node.stands(t) != may_leave(node, t)) {
                faults.push_back(label(node) + (node.stands(t) ? " stands in" : " is missing in") + " an order");
            }
        }
        if (!wanted) faults.push_back(label(node) + " is remembered for nothing");
    }
    for (unsigned t = 0; t < tiers_; ++t) {
        std::uint64_t standing = 0;
        for (std::size_t list = 0; list < 2 * classes(); ++list) {
            const std::uint32_t top = roots_[2 * t * classes() + list];
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
            standing += in_order.size();
            for (std::size_t i = 0; i < in_order.size(); ++i) {
                const Node& node = nodes_[in_order[i]];
                const bool at_home = list == below(node, t) * classes() + use_class(node.uses);
                if (!at_home) faults.push_back(label(node) + " stands in the wrong order");
                if (i > 0 && !order(t).earlier(in_order[i - 1], in_order[i])) {
                    faults.push_back(label(node) + " stands in the wrong place of its order");
                }
            }
        }
        compare("nodes in a tier's orders", standing, listed[t]);
    }
    std::vector<std::int64_t> counts(classes() * bins());
    waiting(counts.data());
    std::int64_t waiting = 0;
    for (const std::int64_t count : counts) {
        waiting += count;
        if (count < 0) faults.push_back("index: counts fewer than no blocks of an age");
    }
    compare("blocks and ghosts by age", static_cast<std::uint64_t>(waiting), blocks_ + ghosts_.size());
    return faults;
}

}  // namespace kvcache
