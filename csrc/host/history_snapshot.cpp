// State for the next process: use count and age of each resident block and each ghost, under 48 bits of its keyed hash.
// All rows are imported as ghosts, before the first block is inserted. The insertion of a block that a tier still has
// turns its ghost back into a node, and counts as no use.
#include <algorithm>

#include "index.h"

namespace kvcache {
namespace {

// A row: hash's lower half, its upper 16 bits, uses, bin of age.
std::uint64_t row(std::uint64_t hash, std::uint64_t uses, std::uint64_t bin) {
    return (hash & 0xffffffff) | hash >> 48 << 32 | (uses & 0xff) << 48 | bin << 56;
}

std::uint64_t hash_of(std::uint64_t row) { return (row & 0xffffffff) | (row >> 32 & 0xffff) << 48; }

}  // namespace

bool Index::export_rows(GhostHistory::Span* span, std::uint32_t count, std::vector<std::uint64_t>* rows) const {
    return ghosts_.next(span, count, [&](std::uint64_t hash, GhostHistory::Use use) {
        rows->push_back(row(hash, use.uses, ages_.bin(age(use.stamp))));
    });
}

bool Index::export_rows(std::uint32_t first, std::uint32_t end, std::size_t most,
                        std::vector<std::uint64_t>* rows) const {
    for (std::uint32_t i = first; i < std::min(end, nodes_.node_count()) && rows->size() < most; ++i) {
        const Node& node = nodes_[i];
        if (node.tiers) rows->push_back(row(hash(node.shard, node.signature), node.uses, ages_.bin(age(node.stamp))));
    }
    return end < nodes_.node_count() && rows->size() < most;
}

bool Index::import_rows(const Secret& secret, std::uint64_t clock, const std::uint64_t* rows, std::size_t count) {
    if (clock_ || nodes_.node_count() || ghosts_.size() || clock >> 39) return false;
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t uses = rows[i] >> 48 & 0xff;
        if (rows[i] >> 56 >= ages_.bins() || uses >> Node::USES_BITS > gaps_.size()) return false;
    }
    secret_ = secret, clock_ = clock, restoring_ = true;
    ages_.begin(clock);
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t hash = hash_of(rows[i]), edge = ages_.edge(rows[i] >> 56);
        GhostHistory::Use use{clock - std::min(clock, edge), rows[i] >> 48 & 0xff}, other;
        if (ghosts_.find(hash, &other)) continue;
        ghosts_.add(hash, use);
        ages_.add(use_class(use.uses), use.stamp, 1);
    }
    ghosts_.spare();  // until the tiers' blocks are inserted
    return true;
}

}  // namespace kvcache
