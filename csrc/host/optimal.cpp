#include "optimal.h"

#include <limits>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace kvcache {
namespace {

constexpr double NEVER = std::numeric_limits<double>::infinity();
constexpr std::int32_t NONE = -1;

std::vector<std::int32_t> parents_of(const Chains& chains) {
    std::vector<std::int32_t> parents(chains.unique, NONE);
    for (std::size_t r = 0; r < chains.requests; ++r) {
        for (std::int64_t i = chains.starts[r] + 1; i < chains.starts[r + 1]; ++i) {
            parents[static_cast<std::size_t>(chains.blocks[i])] = chains.blocks[i - 1];
        }
    }
    return parents;
}

// By access, the request that uses the block next.
std::vector<double> next_uses(const Chains& chains) {
    std::vector<double> next(static_cast<std::size_t>(chains.starts[chains.requests])), again(chains.unique, NEVER);
    for (std::size_t r = chains.requests; r-- > 0;) {
        for (std::int64_t i = chains.starts[r]; i < chains.starts[r + 1]; ++i) {
            double& use = again[static_cast<std::size_t>(chains.blocks[i])];
            next[static_cast<std::size_t>(i)] = std::exchange(use, static_cast<double>(r));
        }
    }
    return next;
}

// The resident blocks, the latest next use first, among equals the least recently touched.
class Optimal {
  public:
    Optimal(std::size_t capacity, std::vector<std::int32_t> parents)
        : capacity_(capacity), parents_(std::move(parents)), place_(parents_.size()), children_(parents_.size()) {}

    bool resident(std::int32_t block) const { return place_[index(block)].time != 0; }

    void touch(std::int32_t block, double next_use) {
        order_.erase({place_[index(block)].key, place_[index(block)].time, block});
        insert(block, next_use);
    }

    // Keeps the block unless every evictable one is used sooner.
    void admit(std::int32_t block, double next_use) {
        if (order_.size() >= capacity_) {
            auto victim = order_.begin();
            while (children_[index(std::get<2>(*victim))] != 0) ++victim;
            if (std::get<0>(*victim) > -next_use) return;
            const std::int32_t evicted = std::get<2>(*victim);
            order_.erase(victim);
            place_[index(evicted)].time = 0;
            count_child(evicted, -1);
        }
        insert(block, next_use);
        count_child(block, 1);
    }

  private:
    struct Place {
        double key;
        std::uint64_t time;  // 0: not resident
    };

    static std::size_t index(std::int32_t block) { return static_cast<std::size_t>(block); }

    void insert(std::int32_t block, double next_use) {
        place_[index(block)] = {-next_use, ++time_};
        order_.insert({-next_use, time_, block});
    }

    void count_child(std::int32_t block, std::int32_t change) {
        if (parents_[index(block)] != NONE) children_[index(parents_[index(block)])] += change;
    }

    const std::size_t capacity_;
    const std::vector<std::int32_t> parents_;
    std::vector<Place> place_;
    std::vector<std::int32_t> children_;
    std::set<std::tuple<double, std::uint64_t, std::int32_t>> order_;
    std::uint64_t time_ = 0;
};

}  // namespace

void replay_optimal(const Chains& chains, std::size_t capacity, std::int32_t* hits) {
    const std::vector<double> next = next_uses(chains);
    Optimal policy(capacity, parents_of(chains));
    for (std::size_t r = 0; r < chains.requests; ++r) {
        const std::int64_t first = chains.starts[r], end = chains.starts[r + 1];
        std::int64_t i = first;
        while (i < end && policy.resident(chains.blocks[i])) ++i;
        hits[r] = static_cast<std::int32_t>(i - first);
        for (i = end; i-- > first;) {  // tail first, so that the head is the most recently touched
            const std::int32_t block = chains.blocks[i];
            const double next_use = next[static_cast<std::size_t>(i)];
            policy.resident(block) ? policy.touch(block, next_use) : policy.admit(block, next_use);
        }
    }
}

}  // namespace kvcache
