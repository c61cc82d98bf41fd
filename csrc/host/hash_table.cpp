#include "hash_table.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

namespace kvcache {
namespace {

constexpr std::size_t PAGE = 4096;
constexpr std::size_t PIECE = 1 << 16;  // bytes per unmapping, whose cost is by page
constexpr std::size_t MOVES = 12;  // homes moved per insertion; ten suffice to finish before the new slots are full
constexpr std::size_t SMALL = 1 << 13;  // slots that are moved at once

std::size_t whole_pages(std::size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

}  // namespace

MappedMemory::MappedMemory(std::size_t bytes) : bytes_(whole_pages(bytes)) {
    void* const found = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<std::uint8_t*>(found);
}

MappedMemory& MappedMemory::operator=(MappedMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(unmapped_, other.unmapped_);
    return *this;
}

MappedMemory::~MappedMemory() {
    if (unmapped_ < bytes_) munmap(data_ + unmapped_, bytes_ - unmapped_);
}

void MappedMemory::unmap_before(std::size_t end) {
    for (; unmapped_ + PIECE <= end; unmapped_ += PIECE) munmap(data_ + unmapped_, PIECE);
}

std::size_t HashTable::bytes() const {
    const std::size_t filled = reached_ == ALL ? now_.size : now_.home(static_cast<std::uint32_t>(reached_));
    const std::size_t written = whole_pages((filled + 3 * TAIL) * sizeof(Slot));
    return std::min(written, now_.memory.bytes()) + old_.memory.bytes();
}

void HashTable::insert(std::uint32_t hash, std::uint32_t value) {
    if (!old_.size && used_ + 1 > now_.size / 16 * 13) {
        if (now_.size > ALL / 9 * 8) throw std::bad_alloc();
        old_ = std::exchange(now_, Slots(now_.size + now_.size / 8));
        moved_ = 0, reached_ = 0;
    }
    if (old_.size) move();
    put(of(hash), {hash, value + 1});
    ++used_;
}

void HashTable::put(const Slots& slots, Slot slot) {
    std::size_t at = slots.home(slot.hash);
    while (slots[at].mark != 0 && slots[at].hash <= slot.hash) ++at;
    std::size_t end = at;
    while (slots[end].mark != 0) ++end;
    if (end >= slots.size + TAIL) throw std::bad_alloc();
    std::memmove(&slots[at + 1], &slots[at], (end - at) * sizeof(Slot));
    slots[at] = slot;
}

// Closes a gap: moves the entries after it down, each at most to its home, until one stays.
void HashTable::close(const Slots& slots, std::size_t gap, std::size_t next) {
    for (; slots[next].mark != 0; ++next) {
        gap = std::max(gap, slots.home(slots[next].hash));
        if (gap == next) return;
        slots[gap++] = std::exchange(slots[next], {0, 0});
    }
}

// Appends a moved entry after all earlier ones: at its home, or at the first free slot after it.
void HashTable::move() {
    const std::size_t end = old_.size > SMALL ? std::min(old_.size, moved_ + MOVES) : old_.size;
    std::size_t from = moved_, to = 0;
    for (; from < end || (old_[from].mark != 0 && old_.home(old_[from].hash) < end); ++from) {
        if (old_[from].mark == 0) continue;
        to = std::max(to, now_.home(old_[from].hash));
        while (now_[to].mark != 0) ++to;
        now_[to++] = std::exchange(old_[from], {0, 0});
    }
    close(old_, end, from);
    moved_ = end, reached_ = end < old_.size ? old_.first_hash(end) : ALL;
    old_.memory.unmap_before(moved_ * sizeof(Slot));
    if (moved_ == old_.size) old_ = Slots();
}

void HashTable::erase(std::uint32_t hash, std::uint32_t value) {
    const Slots& slots = of(hash);
    std::size_t at = slots.home(hash);
    while (slots[at].mark != value + 1) ++at;
    slots[at].mark = 0;
    close(slots, at, at + 1);
    --used_;
}

}  // namespace kvcache
