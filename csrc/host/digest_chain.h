// The digest chain of a prompt: signature[i] = SHA-256(signature[i - 1], token ids of block i, extra bytes of block i).
#pragma once

#include <cstddef>
#include <cstdint>

#include "sha256.h"

namespace kvcache {

struct Bytes {
    const std::uint8_t* data;
    std::size_t length;
};

// Token ids in a caller's buffer: little-endian uint32, or int64 if `wide`.
struct TokenIds {
    const std::uint8_t* data;
    bool wide;
};

// Writes `blocks` signatures of 32 bytes to `out`, which must not overlap the inputs. `parent` is the signature before
// the first block; `block_tokens` token ids make a block; `extras` has one entry a block, or is null. Returns the
// number of blocks done, fewer if the next one has an id of more than 32 bits.
std::size_t digest_chain(Sha256 sha256, const std::uint8_t* parent, TokenIds tokens, std::size_t block_tokens,
                         const Bytes* extras, std::size_t blocks, std::uint8_t* out);

// Writes SHA-256(namespace_id, signature) of each of `count` signatures of 32 bytes to `out`, which may be their
// buffer.
void bind_signatures(Sha256 sha256, const std::uint8_t* namespace_id, const std::uint8_t* signatures, std::size_t count,
                     std::uint8_t* out);

}  // namespace kvcache
