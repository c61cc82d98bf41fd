// What Python hands to the index, looked at and checked; the objects stay as they are while these live.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "index.h"
#include "objects.h"

namespace kvcache {

// A run.
class RunInput {
  public:
    RunInput(const pybind11::handle& place, const pybind11::handle& signatures)
        : place_(place, PyBUF_SIMPLE), signatures_(signatures, PyBUF_SIMPLE) {
        expect(place_.bytes() == PLACE, "a place of " + std::to_string(place_.bytes()) + " bytes: expected " +
                                            std::to_string(PLACE) + ", namespace, group and shard");
        expect(signatures_.bytes() % SIGNATURE == 0,
               "signatures of " + std::to_string(signatures_.bytes()) + " bytes: expected 32 a block");
    }

    std::size_t blocks() const { return signatures_.bytes() / SIGNATURE; }
    Run run() const { return {place_.data(), signatures_.data(), blocks()}; }

  private:
    Buffer place_, signatures_;
};

// The places and needs of a lookup: one of each a group.
class Groups {
  public:
    Groups(const pybind11::sequence& places, std::vector<std::uint64_t> needs) : needs_(std::move(needs)) {
        expect(places.size() == needs_.size(), std::to_string(places.size()) + " places and " +
                                                   std::to_string(needs_.size()) + " needs: expected one each a group");
        for (std::size_t i = 0; i < places.size(); ++i) {
            places_.push_back(std::make_unique<Buffer>(pybind11::object(places[i]), PyBUF_SIMPLE));
            expect(places_.back()->bytes() == PLACE, "a place of " + std::to_string(places_.back()->bytes()) +
                                                         " bytes: expected " + std::to_string(PLACE));
        }
    }

    std::size_t match(const Index& index, const std::uint8_t* signatures, std::size_t blocks, ByTier* by_tier) const {
        std::vector<Run> runs;
        for (const auto& place : places_) runs.push_back({place->data(), signatures, blocks});
        return index.match(runs.data(), needs_.data(), runs.size(), by_tier);
    }

  private:
    std::vector<std::unique_ptr<Buffer>> places_;
    std::vector<std::uint64_t> needs_;
};

}  // namespace kvcache
