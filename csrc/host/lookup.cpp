// Finding: places by name, nodes by place and signature, and what follows from it for a request.
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

// places

int Index::PlaceOrder::operator()(std::uint32_t a, std::uint32_t b) const {
    return std::memcmp(places[a].name.data(), places[b].name.data(), PLACE);
}

std::uint64_t Index::place_hash(const std::uint8_t* name) const {
    const std::uint64_t space = fold(load(name) ^ secret_[0], load(name + 8) ^ secret_[1]);
    return fold(load(name + PLACE - 8) ^ secret_[2], load(name + PLACE - 16) ^ space);
}

std::uint32_t Index::find_place(const std::uint8_t* name) const {
    return place_table_.find(static_cast<std::uint32_t>(place_hash(name)), [&](std::uint32_t place) {
        return std::memcmp(places_[place].name.data(), name, PLACE) == 0;
    });
}

std::uint32_t Index::acquire_place(const std::uint8_t* name) {
    std::uint32_t place = find_place(name);
    if (place != NIL) return place;
    if (free_places_.empty()) {
        free_places_.reserve(places_.size() + 1);  // so that giving one back needs no memory
        free_places_.push_back(static_cast<std::uint32_t>(places_.size()));
        places_.emplace_back();
    }
    place = free_places_.back();
    const auto assigned = assigned_.find(std::string(reinterpret_cast<const char*>(name), PLACE));
    const std::uint64_t hash = place_hash(name);
    place_table_.insert(static_cast<std::uint32_t>(hash), place);
    free_places_.pop_back();
    std::copy_n(name, PLACE, places_[place].name.begin());
    places_[place].hash = hash;
    places_[place].cost_class = assigned == assigned_.end() ? 0 : assigned->second;
    return place;
}

void Index::release_place(std::uint32_t place) {
    if (places_[place].nodes > 0) return;
    place_table_.erase(static_cast<std::uint32_t>(places_[place].hash), place);
    free_places_.push_back(place);
}

// looking

std::uint64_t Index::hash_at(std::uint64_t place_hash, const std::uint8_t* signature) const {
    return fold(load(signature) ^ secret_[0], load(signature + 8) ^ place_hash);
}

std::uint64_t Index::hash(std::uint32_t place, const std::uint8_t* signature) const {
    return hash_at(places_[place].hash, signature);
}

std::uint32_t Index::find(std::uint32_t place, const std::uint8_t* signature) const {
    return table_.find(static_cast<std::uint32_t>(hash(place, signature)), [&](std::uint32_t i) {
        return nodes_[i].place == place && std::memcmp(nodes_[i].signature, signature, SIGNATURE) == 0;
    });
}

// All slots are asked for, then all nodes, then they are compared: the waits for memory overlap.
void Index::find(std::uint32_t place, const std::uint8_t* signatures, std::size_t blocks, std::uint32_t* found) const {
    std::uint32_t hashes[BATCH];
    for (std::size_t i = 0; i < blocks; ++i) {
        hashes[i] = static_cast<std::uint32_t>(hash(place, signatures + i * SIGNATURE));
        table_.prefetch(hashes[i]);
    }
    for (std::size_t i = 0; i < blocks; ++i) {
        found[i] = table_.find(hashes[i], [](std::uint32_t) { return true; });
        if (found[i] == NIL) continue;
        const std::uint8_t* node = nodes_[found[i]].signature;
        __builtin_prefetch(node), __builtin_prefetch(node + sizeof(Node));  // two lines where it lies across
    }
    for (std::size_t i = 0; i < blocks; ++i) {
        if (found[i] == NIL) continue;
        const Node& node = nodes_[found[i]];
        const std::uint8_t* signature = signatures + i * SIGNATURE;
        const bool same = node.place == place && std::memcmp(node.signature, signature, SIGNATURE) == 0;
        if (!same) found[i] = find(place, signature);
    }
}

std::size_t Index::match(const BlockRun* runs, const std::uint64_t* needs, std::size_t count, ByTier* by_tier) const {
    std::size_t limit = count ? runs[0].blocks : 0;
    for (std::size_t g = 0; g < count; ++g) limit = std::min(limit, runs[g].blocks);
    const std::size_t asked = limit;
    std::vector<std::vector<std::uint8_t>> masks(count);
    for (const bool all : {true, false}) {  // what needs every block goes first: it bounds the others
        for (std::size_t g = 0; g < count; ++g) {
            if ((needs[g] >= asked) != all) continue;
            masks[g].resize(limit);
            for_each_node({runs[g].place, runs[g].signatures, limit}, [&](std::size_t i, std::uint32_t node) {
                masks[g][i] = node == NIL ? 0 : nodes_[node].tiers;
                if (all && masks[g][i] == 0) limit = i;
                return masks[g][i] != 0 || !all;
            });
        }
    }
    std::vector<std::size_t> unbroken(count);  // by run, the blocks up to here
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
    const std::uint64_t named = place_hash(run.place);
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
    return nodes_.bytes() + table_.bytes() + place_table_.bytes() + places_.size() * sizeof(PlaceName) +
           free_places_.capacity() * sizeof(std::uint32_t);
}

}  // namespace kvcache
