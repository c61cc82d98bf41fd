// Checked arguments of the index's calls. They keep views of the caller's objects.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "index.h"
#include "py_buffers.h"

namespace kvcache {

// The arguments of a block run.
class BlockRunArgs {
  public:
    BlockRunArgs(const pybind11::handle& shard_key, const pybind11::handle& signatures)
        : shard_key_(shard_key, PyBUF_SIMPLE), signatures_(signatures, PyBUF_SIMPLE) {
        expect(shard_key_.bytes() == SHARD_KEY, "a shard key of " + std::to_string(shard_key_.bytes()) +
                                                    " bytes: expected " + std::to_string(SHARD_KEY) +
                                                    ", namespace, group and shard");
        expect(signatures_.bytes() % SIGNATURE == 0,
               "signatures of " + std::to_string(signatures_.bytes()) + " bytes: expected 32 a block");
    }

    std::size_t blocks() const { return signatures_.bytes() / SIGNATURE; }
    BlockRun run() const { return {shard_key_.data(), signatures_.data(), blocks()}; }

  private:
    Buffer shard_key_, signatures_;
};

// The shard keys and needs of a lookup, one of each for a group.
class LookupArgs {
  public:
    LookupArgs(const pybind11::sequence& shard_keys, std::vector<std::uint64_t> needs) : needs_(std::move(needs)) {
        expect(shard_keys.size() == needs_.size(), std::to_string(shard_keys.size()) + " shard keys and " +
                                                       std::to_string(needs_.size()) +
                                                       " needs: expected one each a group");
        for (std::size_t i = 0; i < shard_keys.size(); ++i) {
            shard_keys_.push_back(std::make_unique<Buffer>(pybind11::object(shard_keys[i]), PyBUF_SIMPLE));
            expect(shard_keys_.back()->bytes() == SHARD_KEY, "a shard key of " +
                                                                 std::to_string(shard_keys_.back()->bytes()) +
                                                                 " bytes: expected " + std::to_string(SHARD_KEY));
        }
    }

    std::size_t match(const Index& index, const std::uint8_t* signatures, std::size_t blocks, ByTier* by_tier) const {
        std::vector<BlockRun> runs;
        for (const auto& shard_key : shard_keys_) runs.push_back({shard_key->data(), signatures, blocks});
        return index.match(runs.data(), needs_.data(), runs.size(), by_tier);
    }

  private:
    std::vector<std::unique_ptr<Buffer>> shard_keys_;
    std::vector<std::uint64_t> needs_;
};

// A policy's table, and the weights that multiply it.
class ValueTableArgs {
  public:
    ValueTableArgs(const pybind11::handle& values, const std::vector<double>& weights, const Index& index)
        : values_(values, PyBUF_FORMAT) {
        expect(values_.holds("d", 8) && values_.bytes() == 8 * index.classes() * index.bins(),
               "a table of " + std::to_string(values_.bytes()) + " bytes: expected float64 of (class, age bin)");
        for (const double weight : weights) expect(weight > 0, "a weight that is not more than 0");
    }

    const double* values() const { return reinterpret_cast<const double*>(values_.data()); }

  private:
    Buffer values_;
};

// The arguments of the constructor.
inline unsigned checked_tiers(unsigned tiers, const std::vector<unsigned>& bounds,
                              const std::vector<std::uint64_t>& edges, double ghosts,
                              const std::vector<std::uint64_t>& gaps) {
    expect(tiers >= 1 && tiers <= Node::MAX_TIERS, std::to_string(tiers) + " tiers: expected 1 to 4");
    expect(!edges.empty() && edges[0] == 0, "edges of age that do not begin with 0");
    for (std::size_t i = 1; i < edges.size(); ++i) expect(edges[i - 1] <= edges[i], "edges of age out of order");
    for (std::size_t i = 0; i < bounds.size(); ++i) {
        expect((i == 0 || bounds[i - 1] < bounds[i]) && bounds[i] <= Node::MAX_USES,
               "bounds of use: expected ascending numbers up to 31");
    }
    expect(gaps.size() <= Node::MAX_GAPS, "gaps between uses: expected 7 at most");
    for (std::size_t i = 1; i < gaps.size(); ++i) expect(gaps[i - 1] < gaps[i], "gaps between uses out of order");
    expect(ghosts >= 0 && ghosts <= 100, "ghosts: expected 0 to 100 for each resident block");
    return tiers;
}

}  // namespace kvcache
