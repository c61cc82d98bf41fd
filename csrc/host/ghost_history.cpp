#include "ghost_history.h"

namespace kvcache {

void GhostHistory::add(std::uint64_t hash, Use use) {
    Departure departure{};
    departure.tag = static_cast<std::uint32_t>(hash);
    departure.stamp = use.stamp, departure.uses = use.uses & 0xff, departure.print = hash >> 48;
    table_.insert(departure.tag, (first_ + static_cast<std::uint32_t>(left_.size())) & POSITIONS);
    left_.push_back(departure);
}

std::uint32_t GhostHistory::position(std::uint64_t hash) const {
    return table_.find(static_cast<std::uint32_t>(hash), [&](std::uint32_t i) { return at(i).print == hash >> 48; });
}

bool GhostHistory::find(std::uint64_t hash, Use* use) const {
    const std::uint32_t found = position(hash);
    if (found != HashTable::NONE) *use = {at(found).stamp, at(found).uses};
    return found != HashTable::NONE;
}

bool GhostHistory::remove(std::uint64_t hash, Use* use) {
    const std::uint32_t found = position(hash);
    if (found == HashTable::NONE) return false;
    *use = {at(found).stamp, at(found).uses};
    left_[(found - first_) & POSITIONS].stamp = BACK;
    table_.erase(static_cast<std::uint32_t>(hash), found);
    return true;
}

}  // namespace kvcache
