// Lookups: shards by key, nodes by shard and signature, and the longest usable prefix.
#include <algorithm>
#include <cstring>

#include "index.h"

namespace kvcache {
namespace {

std::uint64_t load(const std::uint8_t* bytes) {
    std::uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    return word;
}

std::uint64_t fold(std::uint64_t a, std::uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return static_cast<std::uint64_t>(product) ^ static_cast<std::uint64_t>(product >> 64);
}

}  // namespace

// shards

int Index::ShardOrder::operator()(std::uint32_t a, std::uint32_t b) const {
    return std::memcmp(shards[a].name.data(), shards[b].name.data(), SHARD_KEY);
}

std::uint64_t Index::shard_hash(const std::uint8_t* name) const {
    const std::uint64_t space = fold(load(name) ^ secret_[0], load(name + 8) ^ secret_[1]);
    return fold(load(name + SHARD_KEY - 8) ^ secret_[2], load(name + SHARD_KEY - 16) ^ space);
}

std::uint32_t Index::find_shard(const std::uint8_t* name) const {
    return shard_table_.find(static_cast<std::uint32_t>(shard_hash(name)), [&](std::uint32_t shard) {
        return std::memcmp(shards_[shard].name.data(), name, SHARD_KEY) == 0;
    });
}

std::uint32_t Index::acquire_shard(const std::uint8_t* name) {
    std::uint32_t shard = find_shard(name);
    if (shard != NIL) return shard;
    if (free_shards_.empty()) {
        free_shards_.reserve(shards_.size() + 1);  // so that `release_shard` never allocates
        free_shards_.push_back(static_cast<std::uint32_t>(shards_.size()));
        shards_.emplace_back();
    }
    shard = free_shards_.back();
    const auto assigned = assigned_.find(std::string(reinterpret_cast<const char*>(name), SHARD_KEY));
    const std::uint64_t hash = shard_hash(name);
    shard_table_.insert(static_cast<std::uint32_t>(hash), shard);
    free_shards_.pop_back();
    std::copy_n(name, SHARD_KEY, shards_[shard].name.begin());
    shards_[shard].hash = hash;
    shards_[shard].cost_class = assigned == assigned_.end() ? 0 : assigned->second;
    return shard;
}

void Index::release_shard(std::uint32_t shard) {
    if (shards_[shard].nodes > 0) return;
    shard_table_.erase(static_cast<std::uint32_t>(shards_[shard].hash), shard);
    free_shards_.push_back(shard);
}

// lookups

std::uint64_t Index::hash_at(std::uint64_t shard_hash, const std::uint8_t* signature) const {
    return fold(load(signature) ^ secret_[0], load(signature + 8) ^ shard_hash);
}

std::uint64_t Index::hash(std::uint32_t shard, const std::uint8_t* signature) const {
    return hash_at(shards_[shard].hash, signature);
}

std::uint32_t Index::find(std::uint32_t shard, const std::uint8_t* signature) const {
    return table_.find(static_cast<std::uint32_t>(hash(shard, signature)), [&](std::uint32_t i) {
        return nodes_[i].shard == shard && std::memcmp(nodes_[i].signature, signature, SIGNATURE) == 0;
    });
}

// Prefetches all slots, then all nodes, then compares, so that the cache misses overlap.
void Index::find(std::uint32_t shard, const std::uint8_t* signatures, std::size_t blocks, std::uint32_t* found) const {
    std::uint32_t hashes[BATCH];
    for (std::size_t i = 0; i < blocks; ++i) {
        hashes[i] = static_cast<std::uint32_t>(hash(shard, signatures + i * SIGNATURE));
        table_.prefetch(hashes[i]);
    }
    for (std::size_t i = 0; i < blocks; ++i) {
        found[i] = table_.find(hashes[i], [](std::uint32_t) { return true; });
        if (found[i] == NIL) continue;
        const std::uint8_t* node = nodes_[found[i]].signature;
        __builtin_prefetch(node), __builtin_prefetch(node + sizeof(Node));  // a node can span two cache lines
    }
    for (std::size_t i = 0; i < blocks; ++i) {
        if (found[i] == NIL) continue;
        const Node& node = nodes_[found[i]];
        const std::uint8_t* signature = signatures + i * SIGNATURE;
        const bool same = node.shard == shard && std::memcmp(node.signature, signature, SIGNATURE) == 0;
        if (!same) found[i] = find(shard, signature);
    }
}

std::size_t Index::match(const BlockRun* runs, const std::uint64_t* needs, std::size_t count, ByTier* by_tier) const {
    std::size_t limit = count ? runs[0].blocks : 0;
    for (std::size_t g = 0; g < count; ++g) limit = std::min(limit, runs[g].blocks);
    const std::size_t asked = limit;
    std::vector<std::vector<std::uint8_t>> masks(count);
    for (const bool all : {true, false}) {  // runs that need every block first: they bound the others
        for (std::size_t g = 0; g < count; ++g) {
            if ((needs[g] >= asked) != all) continue;
            masks[g].resize(limit);
            for_each_node({runs[g].shard_key, runs[g].signatures, limit}, [&](std::size_t i, std::uint32_t node) {
                masks[g][i] = node == NIL ? 0 : nodes_[node].tiers;
                if (all && masks[g][i] == 0) limit = i;
                return masks[g][i] != 0 || !all;
            });
        }
    }
    std::vector<std::size_t> unbroken(count);  // by run, the contiguous blocks up to here
    std::size_t usable = 0;
    for (std::size_t end = 1; end <= limit; ++end) {
        bool fits = true;
        for (std::size_t g = 0; g < count; ++g) {
            unbroken[g] = masks[g][end - 1] ? unbroken[g] + 1 : 0;
            fits = fits && unbroken[g] >= std::min<std::uint64_t>(needs[g], end);
        }
        if (fits) usable = end;
    }
    by_tier->fill(0);
    for (std::size_t i = 0; i < usable; ++i) {
        unsigned slowest = 0;
        for (std::size_t g = 0; g < count; ++g) {
            if (usable - i > needs[g]) continue;
            slowest = std::max(slowest, static_cast<unsigned>(__builtin_ctz(masks[g][i])));
        }
        ++(*by_tier)[slowest];
    }
    return usable;
}

void Index::tier_masks(const BlockRun& run, std::uint8_t* masks) const {
    for_each_node(run, [&](std::size_t i, std::uint32_t node) {
        masks[i] = node == NIL ? 0 : nodes_[node].tiers;
        return true;
    });
}

std::uint64_t Index::stamp(const BlockRun& run) const {
    std::uint64_t stamp = clock_;
    for_each_node(run, [&](std::size_t, std::uint32_t node) {
        if (node != NIL) stamp = nodes_[node].stamp;
        return false;
    });
    return stamp;
}

void Index::uses(const BlockRun& run, std::uint8_t* uses) const {
    const std::uint64_t named = shard_hash(run.shard_key);
    for_each_node(run, [&](std::size_t i, std::uint32_t node) {
        uses[i] = node == NIL ? 0 : static_cast<std::uint8_t>(nodes_[node].uses);
        GhostHistory::Use use;
        const bool known = node != NIL && nodes_[node].parent != Node::NEVER;
        if (!known && ghosts_.find(hash_at(named, run.signatures + i * SIGNATURE), &use)) {
            uses[i] = uses_after(use.uses, age(use.stamp));
        }
        return true;
    });
}

std::size_t Index::bytes() const {
    return nodes_.bytes() + table_.bytes() + shard_table_.bytes() + shards_.size() * sizeof(Shard) +
           free_shards_.capacity() * sizeof(std::uint32_t);
}

}  // namespace kvcache
