// SHA-256 (FIPS 180-4) of messages padded in place, with the processor's SHA instructions if it has them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvcache {

constexpr std::size_t SHA_BLOCK = 64;
constexpr std::size_t SHA_DIGEST = 32;

// Hashes `blocks` times 64 bytes, padding included, into `digest`, which may lie inside the message.
using Sha256 = void (*)(const std::uint8_t* padded, std::size_t blocks, std::uint8_t* digest);

void sha256_plain(const std::uint8_t* padded, std::size_t blocks, std::uint8_t* digest);

// The fastest implementation for this processor.
Sha256 sha256_fastest();

// Number of 64-byte blocks of a padded message of `length` bytes.
constexpr std::size_t sha256_blocks(std::size_t length) { return (length + 1 + 8 + SHA_BLOCK - 1) / SHA_BLOCK; }

// Writes the padding after `length` bytes; `message` has space for `sha256_blocks(length)` blocks.
void sha256_pad(std::uint8_t* message, std::size_t length);

}  // namespace kvcache
