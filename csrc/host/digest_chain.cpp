#include "digest_chain.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "token ids are hashed as little-endian uint32 from the caller's buffer: this processor needs the plain package"
#endif

namespace kvcache {
namespace {

// Writes `count` ids from `first` on as uint32; false if one does not fit.
bool write_ids(TokenIds tokens, std::size_t first, std::size_t count, std::uint8_t* out) {
    if (!tokens.wide) {
        std::memcpy(out, tokens.data + 4 * first, 4 * count);
        return true;
    }
    std::uint64_t excess = 0;
    for (std::size_t i = 0; i < count; ++i) {
        std::uint64_t id;
        std::memcpy(&id, tokens.data + 8 * (first + i), sizeof id);
        excess |= id >> 32;
        const std::uint32_t narrow = static_cast<std::uint32_t>(id);
        std::memcpy(out + 4 * i, &narrow, sizeof narrow);
    }
    return excess == 0;
}

}  // namespace

std::size_t digest_chain(Sha256 sha256, const std::uint8_t* parent, TokenIds tokens, std::size_t block_tokens,
                         const Bytes* extras, std::size_t blocks, std::uint8_t* out) {
    const std::size_t token_bytes = 4 * block_tokens;
    std::size_t longest = 0;
    for (std::size_t i = 0; extras && i < blocks; ++i) longest = std::max(longest, extras[i].length);
    // One message buffer for all blocks: equal lengths have equal padding.
    std::vector<std::uint8_t> message(sha256_blocks(SHA_DIGEST + token_bytes + longest) * SHA_BLOCK);
    std::uint8_t* at = message.data();
    std::memcpy(at, parent, SHA_DIGEST);
    std::size_t padded = 0;
    for (std::size_t i = 0; i < blocks; ++i) {
        if (!write_ids(tokens, i * block_tokens, block_tokens, at + SHA_DIGEST)) return i;
        const std::size_t extra = extras ? extras[i].length : 0;
        const std::size_t length = SHA_DIGEST + token_bytes + extra;
        if (extra > 0) std::memcpy(at + length - extra, extras[i].data, extra);
        if (extra > 0 || padded != length) sha256_pad(at, length);
        padded = extra > 0 ? 0 : length;
        sha256(at, sha256_blocks(length), at);
        std::memcpy(out + i * SHA_DIGEST, at, SHA_DIGEST);
    }
    return blocks;
}

void bind_signatures(Sha256 sha256, const std::uint8_t* namespace_id, const std::uint8_t* signatures, std::size_t count,
                     std::uint8_t* out) {
    std::uint8_t message[2 * SHA_BLOCK];
    std::memcpy(message, namespace_id, SHA_DIGEST);
    sha256_pad(message, 2 * SHA_DIGEST);
    for (std::size_t i = 0; i < count; ++i) {
        std::memcpy(message + SHA_DIGEST, signatures + i * SHA_DIGEST, SHA_DIGEST);
        sha256(message, sha256_blocks(2 * SHA_DIGEST), out + i * SHA_DIGEST);
    }
}

}  // namespace kvcache
