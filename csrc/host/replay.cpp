#include "replay.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace kvcache {

void replay(Index& index, const std::uint8_t* shard_key, const Requests& requests, std::uint64_t capacity,
            const double* values, bool refuses, std::int32_t* hits) {
    constexpr std::uint64_t ALL = Index::NEVER;
    std::vector<std::uint8_t> signatures, uses;
    for (std::size_t r = requests.first; r < requests.end; ++r) {
        const std::int32_t* chain = requests.blocks + requests.starts[r];
        const std::size_t blocks = static_cast<std::size_t>(requests.starts[r + 1] - requests.starts[r]);
        signatures.resize(blocks * SIGNATURE), uses.resize(blocks);
        for (std::size_t i = 0; i < blocks; ++i) {
            const std::uint8_t* from = requests.signatures + static_cast<std::size_t>(chain[i]) * SIGNATURE;
            std::memcpy(&signatures[i * SIGNATURE], from, SIGNATURE);
        }
        const auto part = [&](std::size_t first, std::size_t end) {
            return BlockRun{shard_key, signatures.data() + first * SIGNATURE, end - first};
        };
        const std::uint64_t now = index.tick();
        const BlockRun whole = part(0, blocks);
        ByTier by_tier;
        std::size_t at = index.match(&whole, &ALL, 1, &by_tier);
        *hits++ = static_cast<std::int32_t>(at);
        index.touch(part(0, at), now);
        index.uses(part(at, blocks), uses.data() + at);
        std::size_t end = at;
        std::uint64_t room = capacity - index.resident(0);
        while (end < blocks) {
            const unsigned own = index.use_class(uses[end]);
            std::size_t alike = 1;
            while (end + alike < blocks && index.use_class(uses[end + alike]) == own) ++alike;
            if (alike > room) {
                const double most = refuses ? values[own * index.bins()] : Index::NOT_EVICTABLE;
                room += index.evict(0, values, {}, alike - room, now, false, most).size();
            }
            const std::size_t fits = std::min<std::uint64_t>(alike, room);
            end += fits, room -= fits;
            if (fits < alike) break;  // blocks after it could not be found
        }
        index.insert(part(at, end), at ? part(at - 1, at).signatures : shard_key, 0);
        index.refuse(part(end, blocks));
    }
}

}  // namespace kvcache
