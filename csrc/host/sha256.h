// SHA-256 (FIPS 180-4) of messages that were padded in place, with the processor's instructions where it has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcache {

constexpr std::size_t SHA_BLOCK = 64;
constexpr std::size_t SHA_DIGEST = 32;

// Hashes `blocks` times 64 bytes, padding included, into `digest`, which may lie inside the message.
using Sha256 = void (*)(const std::uint8_t* padded, std::size_t blocks, std::uint8_t* digest);

void sha256_plain(const std::uint8_t* padded, std::size_t blocks, std::uint8_t* digest);

// The fastest that this processor can run.
Sha256 sha256_fastest();

// 64-byte blocks of a message of `length` bytes once padded.
constexpr std::size_t sha256_blocks(std::size_t length) { return (length + 1 + 8 + SHA_BLOCK - 1) / SHA_BLOCK; }

// Writes the padding behind `length` bytes; `message` has room for `sha256_blocks(length)` blocks.
void sha256_pad(std::uint8_t* message, std::size_t length);

}  // namespace kvcache
