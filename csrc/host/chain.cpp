#include "chain.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "token ids are hashed as little-endian uint32 from the caller's buffer: this processor needs the plain package"
#endif

namespace kvcache {

void digest_chain(Sha256 sha256, const std::uint8_t* parent, const std::uint8_t* tokens, std::size_t block_tokens,
                  const Bytes* extras, std::size_t blocks, std::uint8_t* out) {
    const std::size_t token_bytes = 4 * block_tokens;
    std::size_t longest = 0;
    for (std::size_t i = 0; extras && i < blocks; ++i) longest = std::max(longest, extras[i].length);
    // One message for all blocks: where the length stays the same, so does the padding.
    std::vector<std::uint8_t> message(sha256_blocks(SHA_DIGEST + token_bytes + longest) * SHA_BLOCK);
    std::uint8_t* at = message.data();
    std::memcpy(at, parent, SHA_DIGEST);
    std::size_t padded = 0;
    for (std::size_t i = 0; i < blocks; ++i) {
        std::memcpy(at + SHA_DIGEST, tokens + i * token_bytes, token_bytes);
        const std::size_t extra = extras ? extras[i].length : 0;
        const std::size_t length = SHA_DIGEST + token_bytes + extra;
        if (extra > 0) std::memcpy(at + length - extra, extras[i].data, extra);
        if (extra > 0 || padded != length) sha256_pad(at, length);
        padded = extra > 0 ? 0 : length;
        sha256(at, sha256_blocks(length), at);
        std::memcpy(out + i * SHA_DIGEST, at, SHA_DIGEST);
    }
}

}  // namespace kvcache
