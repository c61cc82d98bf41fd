// A hash table from 32-bit hashes to 32-bit values: open addressing, linear probing, sorted by hash. The caller
// compares the objects that values stand for. It must key its hashes by a secret if an adversary could choose them.
//
// The home slot of a hash is its fraction of the hash range times the size, so slots of any size are sorted. A lookup
// therefore ends at the first larger hash, and the table can be three quarters to seven eighths full.
//
// Growth neither stalls a call nor doubles the memory. New slots are only an eighth more. Each insertion moves a few
// entries over, from the smallest hash on. Hashes below `reached_` are in the new slots and all others in the old ones,
// so a lookup reads one of the two. Old slots are unmapped as they empty. Hashes are stored beside the values, so a
// move reads nothing else. An erase closes the gap, so there are no tombstones.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcache {

// Anonymous mapped memory, initially zero.
class MappedMemory {
  public:
    MappedMemory() = default;
    explicit MappedMemory(std::size_t bytes);  // std::bad_alloc
    MappedMemory(MappedMemory&& other) noexcept { *this = static_cast<MappedMemory&&>(other); }
    MappedMemory& operator=(MappedMemory&& other) noexcept;
    ~MappedMemory();

    std::uint8_t* data() const { return data_; }
    std::size_t bytes() const { return bytes_ - unmapped_; }
    void unmap_before(std::size_t end);  // in whole pieces; they must not be read any more

  private:
    std::uint8_t* data_ = nullptr;
    std::size_t bytes_ = 0, unmapped_ = 0;
};

class HashTable {
  public:
    static constexpr std::uint32_t NONE = ~std::uint32_t{0};  // no value is as large as NONE - 1

    // The first value with this hash for which `same(value)` is true, or NONE.
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

    // Throws std::bad_alloc, with nothing changed, without memory or if hundreds of hashes are nearly equal.
    void insert(std::uint32_t hash, std::uint32_t value);
    void erase(std::uint32_t hash, std::uint32_t value);  // must be present

    std::size_t size() const { return used_; }
    std::size_t bytes() const;  // written memory only: of new slots the part that is filled

  private:
    struct Slot {
        std::uint32_t hash;
        std::uint32_t mark;  // 0: empty, otherwise the value + 1
    };

    // Slots after the last home, so that probing never wraps around. An insertion uses the first third of the tail,
    // moved entries also the second. The last slot stays empty.
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
    std::size_t used_ = 0, moved_ = 0;  // values; homes of old_ whose values are in now_
    std::uint64_t reached_ = ALL;       // the first hash that is still in old_
};

}  // namespace kvcache
