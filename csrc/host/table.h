// A hash table of 32-bit values under 32-bit hashes: open addressing, linear probing. What a value stands for is the
// caller's: whoever looks compares. Hashes must be keyed by a secret where an adversary could choose them.
//
// No call stalls while it grows. A table nearly three quarters full gets a successor of twice its size, whose memory is
// touched a page every few insertions. Once it is needed, every insertion moves a few slots over, in order, and what
// was left behind is unmapped piece by piece; meanwhile both are looked into. As hashes stand beside the values, moving
// touches nothing else. Erasing closes the gap in the cluster, so no tombstones gather.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcache {

// Memory of the system, zero until it is written.
class Pages {
  public:
    Pages() = default;
    explicit Pages(std::size_t bytes);  // std::bad_alloc
    Pages(Pages&& other) noexcept { *this = static_cast<Pages&&>(other); }
    Pages& operator=(Pages&& other) noexcept;
    ~Pages();

    std::uint8_t* data() const { return data_; }
    std::size_t bytes() const { return bytes_; }
    void give_back(std::size_t end);  // what lies before `end`, in whole pieces; it reads as nothing any more

  private:
    std::uint8_t* data_ = nullptr;
    std::size_t bytes_ = 0, given_ = 0;
};

class Table {
  public:
    static constexpr std::uint32_t NONE = ~std::uint32_t{0};  // no value is as large as NONE - 1

    explicit Table(std::size_t slots = 64);  // a power of two

    // The first value under this hash of which `same(value)` holds; NONE where there is none.
    template <class Same>
    std::uint32_t find(std::uint32_t hash, Same same) const {
        for (std::size_t at = hash; now_[at].mark != 0; ++at) {
            if (now_[at].hash == hash && same(now_[at].mark - 1)) return now_[at].mark - 1;
        }
        const Slot* const slot = old_.size ? left_behind(hash, same) : nullptr;
        return slot ? slot->mark - 1 : NONE;
    }

    void prefetch(std::uint32_t hash) const { __builtin_prefetch(&now_[hash]); }
    void insert(std::uint32_t hash, std::uint32_t value);  // std::bad_alloc, with nothing changed
    void erase(std::uint32_t hash, std::uint32_t value);   // it is there

    std::size_t size() const { return used_; }
    std::size_t bytes() const { return now_.memory.bytes() + next_.memory.bytes() + old_.memory.bytes(); }

  private:
    struct Slot {
        std::uint32_t hash;
        std::uint32_t mark;  // 0: empty; else the value + 1
    };
    static constexpr std::uint32_t DEAD = NONE;  // erased from a table that is being left

    struct Slots {
        std::size_t size = 0;  // a power of two
        Pages memory;

        explicit Slots(std::size_t slots = 0) : size(slots) {
            if (slots) memory = Pages(slots * sizeof(Slot));
        }
        Slot& operator[](std::size_t at) const { return reinterpret_cast<Slot*>(memory.data())[at & (size - 1)]; }
    };

    // The slot among those that are still to be moved: what was moved may be unmapped already.
    template <class Same>
    Slot* left_behind(std::uint32_t hash, Same same) const {
        std::size_t at = hash & (old_.size - 1);
        for (std::size_t steps = moved_; steps < old_.size; ++steps, ++at) {
            if (at == old_.size) at = 0;
            if (at < moved_) at = moved_;
            Slot& slot = old_[at];
            if (slot.mark == 0) break;
            if (slot.hash == hash && slot.mark != DEAD && same(slot.mark - 1)) return &slot;
        }
        return nullptr;
    }

    static void put(const Slots& slots, Slot slot);
    void prepare();
    void move();

    Slots now_, next_, old_;
    std::size_t used_ = 0, touched_ = 0, moved_ = 0;  // values; bytes of next_ touched; slots of old_ moved
};

}  // namespace kvcache
