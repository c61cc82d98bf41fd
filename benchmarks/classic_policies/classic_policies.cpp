// Eviction policies from their papers, replayed on a trace for comparison. Python twins with the same results, which
// define each policy: __init__.py beside this file, which also compiles it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "clock_ring.h"
#include "linked_queue.h"

namespace kvcache {
namespace {

constexpr double NEVER = std::numeric_limits<double>::infinity();

class Classic {
  public:
    Classic(std::size_t room, const std::vector<Block>& parent_of)
        : capacity(room), parents(parent_of), here(parent_of.size()), children(parent_of.size()), links(here.size()) {}

    bool has(Block block) const { return here[static_cast<std::size_t>(block)] != 0; }

  protected:
    bool full() const { return count >= capacity; }
    bool free(Block block) const { return children[static_cast<std::size_t>(block)] == 0; }

    void enter(Block block) { change(block, 1); }
    void leave(Block block) { change(block, -1); }

    Block free_of(const Queue& order) const {
        Block block = order.first();
        while (block != NONE && !free(block)) block = order.after(block);
        return block;
    }

    const std::size_t capacity;
    const std::vector<Block>& parents;
    std::size_t count = 0;
    std::vector<std::uint8_t> here;
    std::vector<std::int32_t> children;
    Links links;

  private:
    void change(Block block, int by) {
        here[static_cast<std::size_t>(block)] = by > 0;
        count += static_cast<std::size_t>(by);
        const Block parent = parents[static_cast<std::size_t>(block)];
        if (parent != NONE) children[static_cast<std::size_t>(parent)] += by;
    }
};

class S3FIFO : public Classic {
  public:
    using Classic::Classic;

    void touch(Block block) {
        std::uint8_t& uses = uses_[static_cast<std::size_t>(block)];
        uses = static_cast<std::uint8_t>(std::min(3, uses + 1));
        look(block);
    }

    void admit(Block block) {
        while (full()) make_room();
        const bool known = ghosts_.has(block);
        if (known) ghosts_.erase(block);
        uses_[static_cast<std::size_t>(block)] = 0;
        if (!known) small_.push(block);
        enter(block);
        if (known) to_main(block);
        look(parents[static_cast<std::size_t>(block)]);
    }

  private:
    void make_room() {
        if (small_.size() && (small_.size() >= capacity / 4 || free_in_main_ == 0)) {
            const Block small = small_.first();
            small_.erase(small);
            if (uses_[static_cast<std::size_t>(small)] || !free(small)) {
                uses_[static_cast<std::size_t>(small)] = 0;
                return to_main(small);
            }
            go(small);
            ghosts_.push(small);
            if (ghosts_.size() > capacity) ghosts_.erase(ghosts_.first());
            return;
        }
        const Block main = main_.next();  // parents without uses are passed
        std::uint8_t& uses = uses_[static_cast<std::size_t>(main)];
        if (uses) {
            uses = static_cast<std::uint8_t>(uses - 1);
            main_.renew(main);
            return look(main);
        }
        main_.erase(main);
        --free_in_main_;
        go(main);
    }

    void to_main(Block block) {
        main_.push(block);
        free_there_[static_cast<std::size_t>(block)] = 0;
        look(block);
    }

    void go(Block block) {
        leave(block);
        look(parents[static_cast<std::size_t>(block)]);
    }

    // Something changed about a block, which may stand in the main queue.
    void look(Block block) {
        if (block == NONE || !main_.has(block)) return;
        std::uint8_t& free_there = free_there_[static_cast<std::size_t>(block)];
        free_in_main_ = free_in_main_ - free_there + free(block);
        free_there = free(block);
        main_.mark(block, free(block) || uses_[static_cast<std::size_t>(block)]);
    }

    std::vector<std::uint8_t> uses_ = std::vector<std::uint8_t>(parents.size()), free_there_ = uses_;
    std::size_t free_in_main_ = 0;
    Queue small_{links}, ghosts_{links};
    Ring main_{parents.size()};
};

class Sieve : public Classic {
  public:
    using Classic::Classic;

    void touch(Block block) { visited_[static_cast<std::size_t>(block)] = 1; }

    void admit(Block block) {
        while (full()) {
            if (hand_ == NONE) hand_ = queue_.first();
            const Block at = hand_;
            hand_ = queue_.after(at);
            if (visited_[static_cast<std::size_t>(at)]) {
                visited_[static_cast<std::size_t>(at)] = 0;
            } else if (free(at)) {
                queue_.erase(at);
                leave(at);
                ended_ = hand_ == NONE;
            }
        }
        queue_.push(block);
        if (ended_) hand_ = block, ended_ = false;  // the hand stood behind the newest
        enter(block);
    }

  private:
    std::vector<std::uint8_t> visited_ = std::vector<std::uint8_t>(parents.size());
    Queue queue_{links};
    Block hand_ = NONE;
    bool ended_ = false;
};

class ARC : public Classic {
  public:
    using Classic::Classic;

    void touch(Block block) {
        (once_.has(block) ? once_ : again_).erase(block);
        again_.push(block);
    }

    void admit(Block block) {
        const double once = static_cast<double>(gone_once_.size()), again = static_cast<double>(gone_again_.size());
        if (gone_once_.has(block)) {
            border_ = std::min(static_cast<double>(capacity), border_ + std::max(1.0, again / once));
            make_room(false);
            gone_once_.erase(block);
            again_.push(block);
        } else if (gone_again_.has(block)) {
            border_ = std::max(0.0, border_ - std::max(1.0, once / again));
            make_room(true);
            gone_again_.erase(block);
            again_.push(block);
        } else {
            if (once_.size() + gone_once_.size() >= capacity && gone_once_.size()) {
                gone_once_.erase(gone_once_.first());
            } else if (count + gone_once_.size() + gone_again_.size() >= 2 * capacity && gone_again_.size()) {
                gone_again_.erase(gone_again_.first());
            }
            make_room(false);
            once_.push(block);
        }
        enter(block);
    }

  private:
    void make_room(bool from_again) {
        while (full()) {
            const double size = static_cast<double>(once_.size());
            const bool take_once = size > 0 && (size > border_ || (from_again && size == border_));
            for (const bool of_once : {take_once, !take_once}) {
                Queue& order = of_once ? once_ : again_;
                const Block victim = free_of(order);
                if (victim == NONE) continue;
                order.erase(victim);
                (of_once ? gone_once_ : gone_again_).push(victim);
                leave(victim);
                break;
            }
        }
    }

    Queue once_{links}, again_{links}, gone_once_{links}, gone_again_{links};
    double border_ = 0;
};

class WTinyLFU : public Classic {
  public:
    using Classic::Classic;

    void touch(Block block) {
        count_use(block);
        if (window_.has(block)) return window_.renew(block);
        (tried_.has(block) ? tried_ : kept_).erase(block);
        kept_.push(block);
        if (kept_.size() > kept_room_) {
            const Block oldest = kept_.first();
            kept_.erase(oldest);
            tried_.push(oldest);
        }
    }

    void admit(Block block) {
        count_use(block);
        if (window_.size() >= window_room_ || full()) move_on();
        window_.push(block);
        enter(block);
    }

  private:
    void move_on() {
        const Block oldest = window_.first();
        if (full()) {
            for (std::size_t n = tried_.size(); n > 0 && !free(tried_.first()); --n) tried_.renew(tried_.first());
            const bool tried = tried_.size() && free(tried_.first());
            const Block main = tried ? tried_.first() : free_of(kept_);
            const bool stays = main == NONE || (uses(oldest) < uses(main) && free(oldest));
            if (stays) {
                const Block leaver = free_of(window_);
                window_.erase(leaver);
                return leave(leaver);
            }
            (tried_.has(main) ? tried_ : kept_).erase(main);
            leave(main);
        }
        window_.erase(oldest);
        tried_.push(oldest);
    }

    std::uint32_t& uses(Block block) { return uses_[static_cast<std::size_t>(block)]; }

    void count_use(Block block) {
        ++uses(block);
        if (++counted_ < 10 * capacity) return;
        for (std::uint32_t& uses : uses_) uses /= 2;
        counted_ = 0;
    }

    std::vector<std::uint32_t> uses_ = std::vector<std::uint32_t>(parents.size());
    std::size_t counted_ = 0;
    const std::size_t window_room_ = std::max<std::size_t>(1, capacity / 2);
    const std::size_t kept_room_ = (capacity - window_room_) * 4 / 5;
    Queue window_{links}, tried_{links}, kept_{links};
};

// Evicts the smallest key first, among equals the least recently used. `Keys`: key(block, resident, time), left(key).
template <class Keys>
class Ranked : public Classic {
  public:
    Ranked(std::size_t room, const std::vector<Block>& parent_of) : Classic(room, parent_of), keys_(parent_of.size()) {}

    void touch(Block block) {
        order_.erase({at_[static_cast<std::size_t>(block)].first, at_[static_cast<std::size_t>(block)].second, block});
        place(block);
    }

    void admit(Block block) {
        while (full()) {
            auto victim = order_.begin();
            while (!free(std::get<2>(*victim))) ++victim;
            const double key = std::get<0>(*victim);
            const Block who = std::get<2>(*victim);
            order_.erase(victim);
            leave(who);
            keys_.left(key);
        }
        place(block);
        enter(block);
    }

  private:
    void place(Block block) {
        ++time_;
        const double key = keys_.key(block, has(block), static_cast<double>(time_));
        at_[static_cast<std::size_t>(block)] = {key, time_};
        order_.insert({key, time_, block});
    }

    Keys keys_;
    std::set<std::tuple<double, std::uint64_t, Block>> order_;
    std::vector<std::pair<double, std::uint64_t>> at_ = std::vector<std::pair<double, std::uint64_t>>(parents.size());
    std::uint64_t time_ = 0;
};

struct UseBeforeLast {
    explicit UseBeforeLast(std::size_t unique) : last(unique, -NEVER) {}
    double key(Block block, bool, double time) { return std::exchange(last[static_cast<std::size_t>(block)], time); }
    void left(double) {}
    std::vector<double> last;
};

struct UsesAndAge {
    explicit UsesAndAge(std::size_t unique) : uses(unique) {}
    double key(Block block, bool is_here, double) {
        double& count = uses[static_cast<std::size_t>(block)];
        count = is_here ? count + 1 : 1;
        return age + count;
    }
    void left(double key) { age = key; }
    std::vector<double> uses;
    double age = 0;
};

struct Chains {
    const std::int64_t* starts;  // where each request's blocks begin; one more than there are requests
    const std::int32_t* blocks;
    std::size_t requests, unique;
};

std::vector<Block> parents_of(const Chains& chains) {
    std::vector<Block> parents(chains.unique, NONE);
    for (std::size_t r = 0; r < chains.requests; ++r) {
        for (std::int64_t i = chains.starts[r] + 1; i < chains.starts[r + 1]; ++i) {
            parents[static_cast<std::size_t>(chains.blocks[i])] = chains.blocks[i - 1];
        }
    }
    return parents;
}

template <class Policy>
void replay(const Chains& chains, std::size_t capacity, std::int32_t* hits) {
    const std::vector<Block> parents = parents_of(chains);
    Policy policy(capacity, parents);
    for (std::size_t r = 0; r < chains.requests; ++r) {
        const std::int64_t first = chains.starts[r], end = chains.starts[r + 1];
        std::int64_t i = first;
        while (i < end && policy.has(chains.blocks[i])) ++i;
        hits[r] = static_cast<std::int32_t>(i - first);
        for (i = end; i-- > first;) {
            const Block block = chains.blocks[i];
            policy.has(block) ? policy.touch(block) : policy.admit(block);
        }
    }
}

}  // namespace
}  // namespace kvcache

// Writes to `hits`, by request, how many of its leading blocks were resident. 0 if there is no such policy.
extern "C" int replay_classic(const char* name, const std::int64_t* starts, const std::int32_t* blocks,
                              std::size_t requests, std::size_t unique, std::size_t capacity, std::int32_t* hits) {
    using namespace kvcache;
    const std::string policy = name;
    const Chains chains{starts, blocks, requests, unique};
    if (policy == "s3fifo") return replay<S3FIFO>(chains, capacity, hits), 1;
    if (policy == "sieve") return replay<Sieve>(chains, capacity, hits), 1;
    if (policy == "arc") return replay<ARC>(chains, capacity, hits), 1;
    if (policy == "lru2") return replay<Ranked<UseBeforeLast>>(chains, capacity, hits), 1;
    if (policy == "lfuda") return replay<Ranked<UsesAndAge>>(chains, capacity, hits), 1;
    if (policy == "wtinylfu") return replay<WTinyLFU>(chains, capacity, hits), 1;
    return 0;
}
