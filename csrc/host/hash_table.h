// A hash table of 32-bit values under 32-bit hashes: open addressing, linear probing, in the order of the hashes. What
// a value stands for is the caller's: the caller compares. Hashes must be keyed by a secret where an adversary could
// choose them.
//
// A hash's place is the same part of the table as it is of all hashes, so the table is sorted, whatever its size. That
// is what lets it be three quarters to seven eighths full: a look-up ends at the first larger hash, and a successor is
// only an eighth larger. It is also why growing neither stalls a call nor takes memory twice. Every insertion moves a
// few slots over, from the smallest hash on: below the one that was reached all is in the successor, above it in what
// is being left, each is looked into alone, and what was left behind is unmapped as the successor fills. Hashes stand
// beside the values, so moving touches nothing else. Erasing closes the gap, so no tombstones gather.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcache {

// Memory of the system, zero until it is written.
class MappedMemory {
  public:
    MappedMemory() = default;
    explicit MappedMemory(std::size_t bytes);  // std::bad_alloc
    MappedMemory(MappedMemory&& other) noexcept { *this = static_cast<MappedMemory&&>(other); }
    MappedMemory& operator=(MappedMemory&& other) noexcept;
    ~MappedMemory();

    std::uint8_t* data() const { return data_; }
    std::size_t bytes() const { return bytes_ - unmapped_; }
    void unmap_before(std::size_t end);  // what lies before `end`, in whole pieces; it reads as nothing any more

  private:
    std::uint8_t* data_ = nullptr;
    std::size_t bytes_ = 0, unmapped_ = 0;
};

class HashTable {
  public:
    static constexpr std::uint32_t NONE = ~std::uint32_t{0};  // no value is as large as NONE - 1

    // The first value under this hash of which `same(value)` holds; NONE where there is none.
    template <class Same>
    std::uint32_t find(std::uint32_t hash, Same same) const {
        const Slots& slots = of(hash);
        for (const Slot* slot = &slots[slots.home(hash)]; slot->mark != 0 && slot->hash <= hash; ++slot) {
            if (slot->hash == hash && same(slot->mark - 1)) return slot->mark - 1;
        }
        return NONE;
    }

    void prefetch(std::uint32_t hash) const {
        const Slots& slots = of(hash);
        __builtin_prefetch(&slots[slots.home(hash)]);
    }

    // std::bad_alloc, with nothing changed: where there is no memory, or where hundreds have about the same hash.
    void insert(std::uint32_t hash, std::uint32_t value);
    void erase(std::uint32_t hash, std::uint32_t value);  // it is there

    std::size_t size() const { return used_; }
    std::size_t bytes() const;  // that were written to: of a table that is filling up only the part that is filled

  private:
    struct Slot {
        std::uint32_t hash;
        std::uint32_t mark;  // 0: empty; else the value + 1
    };

    // Behind the last place is a tail for those whose places are taken, so that nothing wraps around. Insertions go a
    // third of it far; what is moved then has room in the second, as it had before; the last slot stays empty.
    static constexpr std::size_t TAIL = 256;

    struct Slots {
        std::size_t size = 0;
        MappedMemory memory;

        explicit Slots(std::size_t slots = 0) : size(slots) {
            if (slots) memory = MappedMemory((slots + 3 * TAIL) * sizeof(Slot));
        }
        Slot& operator[](std::size_t at) const { return reinterpret_cast<Slot*>(memory.data())[at]; }
        std::size_t home(std::uint32_t hash) const { return std::uint64_t{hash} * size >> 32; }
        std::uint64_t first_hash(std::size_t home) const { return ((std::uint64_t{home} << 32) + size - 1) / size; }
    };

    const Slots& of(std::uint32_t hash) const { return hash < reached_ ? now_ : old_; }
    static void put(const Slots& slots, Slot slot);
    static void close(const Slots& slots, std::size_t gap, std::size_t next);
    void move();

    static constexpr std::size_t LEAST = 64;
    static constexpr std::uint64_t ALL = std::uint64_t{1} << 32;

    Slots now_{LEAST}, old_;
    std::size_t used_ = 0, moved_ = 0;  // values; places of old_ whose values are in now_
    std::uint64_t reached_ = ALL;       // the first hash that is not
};

}  // namespace kvcache
