// Policies from their papers, played to a trace for comparison. What each means, and its plain twin, which must do the
// same to the letter: kvcache/trace/classics.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvcache {

struct Chains {
    const std::int64_t* starts;  // where each request's blocks begin; one more than there are requests
    const std::int32_t* blocks;  // numbers of blocks
    std::size_t requests, unique;
};

// `hits`: by request, how many of its first blocks were there. False where there is no policy of that name.
bool play_classic(const std::string& policy, const Chains& chains, std::size_t capacity, std::int32_t* hits);

}  // namespace kvcache
