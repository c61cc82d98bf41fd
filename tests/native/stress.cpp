// A stress test of the host core for the sanitizers: random chains, copies and tables on several threads at once, each
// compared with the obvious way, and one index that all of them use. Built and run by scripts/sanitize;
// `stress SECONDS [SEED]`.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "../../csrc/host/block_copy.h"
#include "../../csrc/host/digest_chain.h"
#include "../../csrc/host/hash_table.h"
#include "../../csrc/host/index.h"

using namespace kvcache;

namespace {

using Random = std::mt19937_64;
using Memory = std::vector<std::uint8_t>;  // of exact size, so that a byte too far is seen

u64 pick(Random& random, u64 low, u64 high) { return std::uniform_int_distribution<u64>(low, high)(random); }

Memory noise(Random& random, u64 bytes) {
    Memory memory(bytes);
    const u64 seed = random();
    for (u64 i = 0; i < bytes; ++i) memory[i] = static_cast<std::uint8_t>((seed + i) * 0x9e3779b97f4a7c15 >> 56);
    return memory;
}

void demand(bool held, const char* what) {
    if (held) return;
    std::fprintf(stderr, "stress: %s\n", what);
    std::abort();
}

void chain_round(Random& random) {
    const u64 block_tokens = pick(random, 1, 40), blocks = pick(random, 0, 20);
    const Memory parent = noise(random, SHA_DIGEST), tokens = noise(random, 4 * block_tokens * blocks);
    std::vector<Memory> held(blocks);
    std::vector<Bytes> extras;
    for (Memory& extra : held) {
        extra = noise(random, pick(random, 0, 1) * pick(random, 0, 200));
        extras.push_back({extra.data(), extra.size()});
    }
    const Bytes* given = pick(random, 0, 1) ? extras.data() : nullptr;
    Memory fast(blocks * SHA_DIGEST), plain(blocks * SHA_DIGEST);
    digest_chain(sha256_fastest(), parent.data(), {tokens.data(), false}, block_tokens, given, blocks, fast.data());
    digest_chain(sha256_plain, parent.data(), {tokens.data(), false}, block_tokens, given, blocks, plain.data());
    demand(fast == plain, "the two SHA-256 differ");
}

// One block's bytes, one element at a time.
void copy_slowly(Direction direction, const Geometry& g, std::int64_t id, std::uint8_t* payload) {
    const u64* n = g.extents;
    for (u64 at = 0; at < n[0] * n[1] * n[2] * n[3] * n[4]; ++at) {
        const u64 index[MAX_AXES] = {at / (n[1] * n[2] * n[3] * n[4]), at / (n[2] * n[3] * n[4]) % n[1],
                                     at / (n[3] * n[4]) % n[2], at / n[4] % n[3], at % n[4]};
        u64 page = g.bases[index[0] * n[1] + index[1]] + static_cast<u64>(id * g.page_step), inside = 0;
        for (int i = 0; i < MAX_AXES; ++i) {
            if (i > 1) page += index[i] * static_cast<u64>(g.page[i]);
            inside += index[i] * static_cast<u64>(g.payload[i]);
        }
        void* there = reinterpret_cast<void*>(static_cast<std::uintptr_t>(page));
        if (direction == Direction::Gather) {
            std::memcpy(payload + inside, there, g.item_bytes);
        } else {
            std::memcpy(there, payload + inside, g.item_bytes);
        }
    }
}

void copy_round(Random& random, bool large) {
    const u64 item = large ? 16 : u64{1} << pick(random, 0, 2), pages = large ? 16 : pick(random, 1, 4);
    Geometry g{};
    g.item_bytes = item;
    const u64 small[MAX_AXES] = {pick(random, 1, 3), pick(random, 1, 2), pick(random, 1, 5), pick(random, 1, 4),
                                 pick(random, 1, 9)};
    const u64 big[MAX_AXES] = {3, 2, 16, 5, 512 / item};
    std::copy(large ? big : small, (large ? big : small) + MAX_AXES, g.extents);
    int order[MAX_AXES] = {0, 1, 2, 3, 4};
    if (!large) std::shuffle(order, order + MAX_AXES, random);
    u64 step = item;
    for (int i = MAX_AXES - 1; i >= 0; --i) g.payload[order[i]] = static_cast<i64>(step), step *= g.extents[order[i]];
    // Token and head either way round, gaps behind each; a region for each layer of each of K and V.
    const int inner = large ? 2 : static_cast<int>(pick(random, 2, 3)), outer = 5 - inner;
    auto gap = [&] { return pick(random, 0, 1) * pick(random, 0, 70); };
    g.page[4] = static_cast<i64>(item);
    step = item * g.extents[4] + gap();
    g.page[inner] = static_cast<i64>(step);
    step = step * g.extents[inner] + gap();
    g.page[outer] = static_cast<i64>(step);
    step = step * g.extents[outer] + gap();
    g.page_step = static_cast<i64>(step);
    const u64 regions = g.extents[0] * g.extents[1], region = step * pages + gap(), before = gap();
    Memory engine = noise(random, before + region * regions);
    std::vector<std::uint64_t> bases(regions);
    for (u64 i = 0; i < regions; ++i) bases[i] = reinterpret_cast<std::uintptr_t>(engine.data()) + before + i * region;
    if (pick(random, 0, 1)) std::shuffle(bases.begin(), bases.end(), random);
    g.bases = bases.data();
    std::vector<std::int64_t> ids(pages);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), random);

    std::vector<Memory> gathered(pages, Memory(g.block_bytes(), 0xa5)), expected = gathered;
    std::vector<std::uint8_t*> payloads;
    for (Memory& payload : gathered) payloads.push_back(payload.data());
    const unsigned threads = static_cast<unsigned>(pick(random, 1, 4));
    const bool plain = pick(random, 0, 1);
    copy_blocks(Direction::Gather, g, ids.data(), payloads.data(), pages, threads, plain);
    for (u64 i = 0; i < pages; ++i) copy_slowly(Direction::Gather, g, ids[i], expected[i].data());
    demand(gathered == expected, "gather differs");

    for (u64 i = 0; i < pages; ++i) gathered[i] = noise(random, g.block_bytes()), payloads[i] = gathered[i].data();
    const Memory untouched = engine;
    for (u64 i = 0; i < pages; ++i) copy_slowly(Direction::Scatter, g, ids[i], payloads[i]);
    const Memory after = engine;
    engine.assign(untouched.begin(), untouched.end());  // in place: the bases stand
    copy_blocks(Direction::Scatter, g, ids.data(), payloads.data(), pages, threads, plain);
    demand(engine == after, "scatter differs");
}

// Few hashes, so that clusters are long, and so many of the largest that some are refused; values twice under one hash,
// but not the same value twice.
void table_round(Random& random) {
    HashTable table;
    std::map<std::uint32_t, std::uint32_t> model;  // hash by value
    const u64 hashes = pick(random, 1, 30), most = pick(random, 1, 20000);
    std::uint32_t next = 0, crowd = 0;
    for (u64 step = 0; step < 2 * most; ++step) {
        if (model.size() < most && pick(random, 0, 2)) {
            const bool crowded = pick(random, 0, 9) == 0;
            const auto hash = static_cast<std::uint32_t>(crowded ? -pick(random, 1, hashes) : random());
            try {
                table.insert(hash, next);
                model.emplace(next, hash);
                crowd += crowded;
            } catch (const std::bad_alloc&) {
                demand(crowd > 100, "a value is refused where there is room");
            }
            ++next;
        } else if (!model.empty()) {
            const auto gone = model.lower_bound(static_cast<std::uint32_t>(pick(random, 0, model.rbegin()->first)));
            table.erase(gone->second, gone->first);
            model.erase(gone);
        }
    }
    demand(table.size() == model.size(), "the table counts wrong");
    for (const auto& [value, hash] : model) {
        const std::uint32_t wanted = value;
        const auto same = [&](std::uint32_t found) { return found == wanted; };
        demand(table.find(hash, same) == value, "a value is lost");
        demand(table.find(hash ^ 1, same) == HashTable::NONE, "a value stands under another hash");
    }
}

constexpr u64 EDGES[] = {0, 1, 2, 4, 8, 16, 32, 64, 128, 256};
constexpr std::size_t BINS = std::size(EDGES);

Memory signatures(u64 chain, u64 first, u64 blocks) {  // chains share what lies before their second half
    Memory memory(blocks * SIGNATURE);
    for (u64 i = 0; i < blocks; ++i) {
        const u64 block = first + i, name = block < 20 ? chain / 4 : chain;
        Random random(name * 1000 + block);
        for (u64 word = 0; word < 4; ++word) {
            const u64 noise = random();
            std::memcpy(memory.data() + i * SIGNATURE + 8 * word, &noise, 8);
        }
    }
    return memory;
}

void index_round(Random& random, Index& index) {
    const u64 chain = pick(random, 0, 40), first = pick(random, 0, 30), blocks = pick(random, 0, 40);
    const unsigned tier = static_cast<unsigned>(pick(random, 0, 2));
    const Memory run_signatures = signatures(chain, first, blocks),
                 before = signatures(chain, first ? first - 1 : 0, 1);
    Memory shard_key(SHARD_KEY, static_cast<std::uint8_t>(pick(random, 0, 3)));
    const BlockRun run{shard_key.data(), run_signatures.data(), blocks};
    const auto locked = [&](auto call) {
        const auto lock = index.fair_lock();
        return call();
    };
    const u64 now = locked([&] { return index.tick(); });
    const std::uint8_t* parent = pick(random, 0, 9) ? first ? before.data() : shard_key.data() : nullptr;
    locked([&] { index.insert(run, parent, tier); });
    const ByTier room{pick(random, 0, 30), pick(random, 0, 30), pick(random, 0, 30)};
    const ByTier held = locked([&] { return index.hold(run, room); });
    const BlockRun kept{run.shard_key, run.signatures, held[0] + held[1] + held[2]};
    locked([&] { index.touch(run, now); });
    std::vector<double> values(index.classes() * BINS);
    for (double& value : values) value = static_cast<double>(pick(random, 0, 5));
    const u64 count = pick(random, 0, 60), earlier = pick(random, 0, 1) ? Index::NEVER : now;
    const bool stored_below = pick(random, 0, 1);
    const std::vector<double> weights{1, static_cast<double>(pick(random, 1, 3)), Index::NOT_EVICTABLE};
    if (!pick(random, 0, 20)) {
        const auto cost_class = static_cast<unsigned>(pick(random, 0, 3));
        locked([&] { index.assign({std::string(shard_key.begin(), shard_key.end())}, cost_class); });
    }
    const double most = pick(random, 0, 1) ? Index::NOT_EVICTABLE : 3;
    locked([&] { return index.evict(tier, values.data(), weights, count, earlier, stored_below, most).size(); });
    Memory masks(blocks);
    locked([&] { index.tier_masks(run, masks.data()); });
    for (u64 i = 0; i < kept.blocks; ++i) demand(masks[i] != 0, "a held block left");
    const std::uint64_t needs[2] = {~std::uint64_t{0}, 3};
    const BlockRun both[2] = {run, run};
    ByTier by_tier;
    const u64 found = locked([&] { return index.match(both, needs, 2, &by_tier); });
    demand(found == by_tier[0] + by_tier[1] + by_tier[2], "matched blocks are in no tier");
    demand(locked([&] { return index.release(kept); }), "what was held was not");
    if (blocks) locked([&] { return index.discard({run.shard_key, run.signatures, 1}, tier, true); });
    if (pick(random, 0, 99)) return;
    for (const std::string& fault : locked([&] { return index.check(); })) demand(false, fault.c_str());
}

Index fresh() { return Index(3, {1, 3}, std::vector<std::uint64_t>(EDGES, EDGES + BINS), 1.5, {3, 40}); }

// What an index keeps, by parts while others change it, is told to a new one, which goes on with it.
void recall_round(Random& random, Index& index) {
    const u64 most = pick(random, 0, 1) ? 1 << 21 : pick(random, 0, 300);
    const auto part = static_cast<std::uint32_t>(pick(random, 1, 500));
    std::vector<std::uint64_t> here, told;
    const auto by_parts = [&](auto call) {
        for (bool more = true; more;) {
            const auto lock = index.fair_lock();
            more = call();
        }
    };
    std::uint32_t first = 0;
    by_parts([&] { return first += part, index.export_rows(first - part, first, most, &here); });
    GhostHistory::Span left{};
    by_parts([&] { return told = index.state_header(), left = index.newest(most - here.size()), false; });
    by_parts([&] { return index.export_rows(&left, part, &told); });
    told.insert(told.end(), here.begin(), here.end());
    demand(told.size() <= 4 + most, "more is kept than there is room for");

    Index again = fresh();
    demand(again.import_rows({told[0], told[1], told[2]}, told[3], told.data() + 4, told.size() - 4),
           "what was kept is no use");
    demand(again.ghosts() <= told.size() - 4, "more is remembered than was kept");
    const Memory shard_key(SHARD_KEY, 1), run = signatures(pick(random, 0, 40), 0, 40);
    again.insert({shard_key.data(), run.data(), 40}, shard_key.data(), 0);
    if (pick(random, 0, 1)) {
        for (std::size_t i = 0; i < told.size(); ++i) again.tick();
        demand(again.ghosts() <= 60, "more is remembered than there is room for");
    }
    for (int small = 0; small < 5; ++small) index_round(random, again);
    for (const std::string& fault : again.check()) demand(false, fault.c_str());
}

}  // namespace

int main(int count, char** words) {
    const double seconds = count > 1 ? std::atof(words[1]) : 2;
    const u64 seed = count > 2 ? std::strtoull(words[2], nullptr, 10) : 1;
    using Clock = std::chrono::steady_clock;
    const auto end = Clock::now() + std::chrono::duration<double>(seconds);
    Index index = fresh();
    Random remembered(seed);
    std::vector<std::uint64_t> rows(20000);
    for (std::uint64_t& row : rows) {
        row = pick(remembered, 0, (u64{1} << 48) - 1) | pick(remembered, 0, 2) << (48 + Node::USES_BITS) |
              pick(remembered, 0, BINS - 1) << 56;
    }
    demand(index.import_rows({1, 2, 3}, 1000, rows.data(), rows.size()), "a new index does not import rows");
    std::vector<u64> rounds(3);
    std::vector<std::thread> threads;
    for (u64 i = 0; i < rounds.size(); ++i) {
        threads.emplace_back([&, i] {
            Random random(seed + i);
            do {
                for (int small = 0; small < 20; ++small) chain_round(random), copy_round(random, false);
                for (int small = 0; small < 20; ++small) index_round(random, index);
                copy_round(random, true), table_round(random), recall_round(random, index);
                ++rounds[i];
            } while (Clock::now() < end);
        });
    }
    for (std::thread& thread : threads) thread.join();
    demand(index.check().empty() && index.held() == 0, "the index is not sound");
    std::printf("stress: %llu rounds, seed %llu\n", std::accumulate(rounds.begin(), rounds.end(), u64{0}), seed);
}
