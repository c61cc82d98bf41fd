#include "table.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

namespace kvcache {
namespace {

constexpr std::size_t PAGE = 4096;
constexpr std::size_t PIECE = 1 << 20;    // unmapping takes time by the page
constexpr std::size_t MOVES = 8;          // slots an insertion: two would do to be done before the successor is full
constexpr std::size_t TOUCH_EVERY = 8;    // insertions; sixteen would do
constexpr std::size_t SMALL = PAGE * 16;  // bytes that are touched and moved in no time

std::size_t whole_pages(std::size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

}  // namespace

Pages::Pages(std::size_t bytes) : bytes_(whole_pages(bytes)) {
    void* const found = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (found == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<std::uint8_t*>(found);
}

Pages& Pages::operator=(Pages&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(given_, other.given_);
    return *this;
}

Pages::~Pages() {
    if (given_ < bytes_) munmap(data_ + given_, bytes_ - given_);
}

void Pages::give_back(std::size_t end) {
    for (; given_ + PIECE <= end; given_ += PIECE) munmap(data_ + given_, PIECE);
}

Table::Table(std::size_t slots) : now_(slots) {}

void Table::put(const Slots& slots, Slot slot) {
    std::size_t at = slot.hash;
    while (slots[at].mark != 0) ++at;
    slots[at] = slot;
}

void Table::insert(std::uint32_t hash, std::uint32_t value) {
    if (used_ + 1 > now_.size / 16 * 11 && !old_.size) prepare();
    if (old_.size) move();
    put(now_, {hash, value + 1});
    ++used_;
}

// Ahead of need touches the successor; when the time has come takes it into use.
void Table::prepare() {
    if (!next_.size) next_ = Slots(now_.size * 2), touched_ = 0;
    const std::size_t bytes = next_.memory.bytes();
    const bool full = used_ + 1 > now_.size / 4 * 3;
    if (bytes > SMALL && touched_ < bytes && (full || used_ % TOUCH_EVERY == 0)) {
        static_cast<volatile std::uint8_t*>(next_.memory.data())[touched_] = 0;
        touched_ += PAGE;
    }
    if (!full) return;
    old_ = std::exchange(now_, std::exchange(next_, Slots()));
    moved_ = 0;
}

void Table::move() {
    const std::size_t end = old_.memory.bytes() > SMALL ? std::min(old_.size, moved_ + MOVES) : old_.size;
    for (; moved_ < end; ++moved_) {
        const Slot slot = old_[moved_];
        if (slot.mark != 0 && slot.mark != DEAD) put(now_, slot);
    }
    old_.memory.give_back(moved_ * sizeof(Slot));
    if (moved_ == old_.size) old_ = Slots();
}

void Table::erase(std::uint32_t hash, std::uint32_t value) {
    --used_;
    std::size_t hole = hash;
    while (now_[hole].mark != value + 1) {
        if (now_[hole++].mark != 0) continue;
        left_behind(hash, [&](std::uint32_t found) { return found == value; })->mark = DEAD;
        return;
    }
    // What follows in the cluster moves up where its own place lets it.
    for (std::size_t at = hole + 1; now_[at].mark != 0; ++at) {
        const std::size_t from_home = (at - now_[at].hash) & (now_.size - 1);
        if (from_home >= at - hole) now_[hole] = now_[at], hole = at;
    }
    now_[hole].mark = 0;
}

}  // namespace kvcache
