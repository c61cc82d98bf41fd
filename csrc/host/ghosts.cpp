#include "ghosts.h"

namespace kvcache {

void Ghosts::add(std::uint64_t hash, Use use) {
    Departure departure{};
    departure.tag = static_cast<std::uint32_t>(hash);
    departure.stamp = use.stamp, departure.uses = use.uses & 0xff, departure.print = hash >> 48;
    table_.insert(departure.tag, (first_ + static_cast<std::uint32_t>(left_.size())) & POSITIONS);
    left_.push_back(departure);
}

bool Ghosts::take(std::uint64_t hash, Use* use) {
    const auto at = [&](std::uint32_t position) -> Departure& { return left_[(position - first_) & POSITIONS]; };
    const std::uint32_t tag = static_cast<std::uint32_t>(hash);
    const std::uint32_t found =
        table_.find(tag, [&](std::uint32_t position) { return at(position).print == hash >> 48; });
    if (found == Table::NONE) return false;
    *use = {at(found).stamp, at(found).uses};
    at(found).stamp = BACK;
    table_.erase(tag, found);
    return true;
}

}  // namespace kvcache
