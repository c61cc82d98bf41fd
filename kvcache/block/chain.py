"""Computes block signatures from token ids: the SHA-256 chain of `docs/spec/key.md`.

    signature of a block = SHA-256(parent's 32 bytes, token ids as little-endian uint32, extras)

The parent of the first block is the namespace id; the key of a block is the first 16 bytes of its signature.
`page_digests` computes SGLang's names of pages, for namespaces that engines share.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import sha256
from operator import index
from struct import pack
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from kvcache import native
from kvcache.errors import TokenError

SIGNATURE_BYTES = 32
MIN_DIGEST_BYTES = 16
_MAX_ID = 0xFFFF_FFFF
_BOOL_TYPES = frozenset({bool, np.bool_})  # integers to Python and to older numpy, but no token ids

BlockExtras = Sequence[tuple[bytes, bytes]]
"""(tag, data) pairs that are part of a block's identity besides its tokens, in the order in which they are hashed."""

Digest = Callable[[bytes, NDArray[Any], int, "list[bytes] | None"], bytes]
"""Hashes full blocks: `digest_chain`, or a function that does so and more in the same call."""


class Signatures(Sequence[bytes]):
    """Packed signatures as a sequence; each item is created on access."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed

    def __len__(self) -> int:
        return len(self._packed) // SIGNATURE_BYTES

    @overload
    def __getitem__(self, i: int) -> bytes: ...
    @overload
    def __getitem__(self, i: slice) -> list[bytes]: ...
    def __getitem__(self, i: int | slice) -> bytes | list[bytes]:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        at = range(0, len(self._packed), SIGNATURE_BYTES)[i]
        return self._packed[at : at + SIGNATURE_BYTES]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have no hash


class Chain:
    """The signatures of a growing sequence of tokens.

    A block is hashed once, when it is full; the tokens of the partial last block are kept. `packed` has all signatures,
    concatenated, 32 raw bytes each. `head` is the parent of the first block: the namespace id, unless the chain begins
    within a prefix.

    Thread safety: none. A value read from `packed` never changes.
    """

    def __init__(self, namespace_id: bytes, block_tokens: int) -> None:
        if len(namespace_id) != SIGNATURE_BYTES:
            raise TokenError(f"a namespace id of {len(namespace_id)} bytes: expected {SIGNATURE_BYTES}")
        if block_tokens < 1:
            raise TokenError(f"block_tokens = {block_tokens}: expected at least 1")
        self.namespace_id = bytes(namespace_id)
        self.block_tokens = block_tokens
        self.head = self.namespace_id
        self.packed = b""
        self.client_signatures = b""
        """The signatures that a daemon's client uses, where the daemon binds them to the namespace."""
        self._tail = np.empty(0, np.uint32)
        self._tail_extras = b""
        self._from_digests = False

    @classmethod
    def from_digests(
        cls, namespace_id: bytes, digests: Sequence[bytes], block_tokens: int, *, after: bytes | None = None
    ) -> Chain:
        """Create a chain from an engine's own digests, bound to the namespace. Token ids cannot extend it.

        Args:
            digests: one a full block, each at least 16 bytes of a cryptographic hash over the whole prefix. The
                namespace's `facts` must name their origin: an engine's digests and hashed token ids must never
                share a namespace.
            after: where the digests begin within a prefix, the digest of the block before them; empty where that is
                unknown.
        """
        chain = cls(namespace_id, block_tokens)
        chain._from_digests = True
        chain.extend_digests([after] if after else [])
        chain.head, chain.packed = chain.packed if after is not None else chain.head, b""
        chain.extend_digests(digests)
        return chain

    def extend_digests(self, digests: Sequence[bytes]) -> None:
        """Append an engine's digests to a chain of `from_digests`. A TokenError leaves the chain unchanged."""
        if not self._from_digests:
            raise TokenError("a chain of token ids cannot be extended by digests; extend it by token ids")
        for i, digest in enumerate(digests):
            if not isinstance(digest, bytes) or len(digest) < MIN_DIGEST_BYTES:
                found = f"{len(digest)} bytes" if isinstance(digest, bytes) else f"a {type(digest).__name__}"
                raise TokenError(f"digest {i} is {found}: expected at least {MIN_DIGEST_BYTES} raw bytes")
        self.packed += b"".join(sha256(self.namespace_id + digest).digest() for digest in digests)

    @classmethod
    def from_signatures(
        cls, namespace_id: bytes, packed: bytes, block_tokens: int, *, head: bytes | None = None
    ) -> Chain:
        """Create a chain from the signatures of another process; `append` extends it, and its tokens are unknown.

        Args:
            head: the parent of the first block, where it is not the namespace id.
        """
        chain = cls(namespace_id, block_tokens)
        chain._from_digests = True
        chain.head = chain.head if head is None else head
        chain.append(packed)
        return chain

    def append(self, packed: bytes) -> None:
        """Append signatures of blocks that were hashed elsewhere."""
        if len(packed) % SIGNATURE_BYTES:
            raise TokenError(f"signatures of {len(packed)} bytes: expected a multiple of {SIGNATURE_BYTES}")
        self.packed += packed

    @property
    def signatures(self) -> Sequence[bytes]:
        """The signatures of the full blocks."""
        return Signatures(self.packed)

    @property
    def tokens(self) -> int:
        """The number of tokens, those of the partial last block included."""
        return len(self.packed) // SIGNATURE_BYTES * self.block_tokens + len(self._tail)

    def parents(self, block: int) -> bytes:
        """Return the signature of the previous block; for block 0 the head."""
        return Signatures(self.packed)[block - 1] if block else self.head

    def extend(
        self, token_ids: Any, extras: Sequence[BlockExtras] | None = None, *, digest: Digest | None = None
    ) -> int:
        """Append tokens; return the number of blocks that became full.

        Args:
            extras: `extras[i]` belongs to the i-th block that receives tokens in this call; missing ones are empty. A
                block that several calls fill has the extras of all of them, in the order of the calls.

        Raises:
            TokenError: the chain is unchanged.
        """
        if self._from_digests:
            raise TokenError("a chain of digests cannot be extended by token ids; extend it by digests")
        ids = _integers(token_ids)
        if ids.dtype != np.int64 or not ids.flags.c_contiguous or len(self._tail):
            ids = _narrow(ids)  # otherwise the caller's buffer is hashed in place
        touched = -(-(len(self._tail) + len(ids)) // self.block_tokens) if len(ids) else 0
        encoded = None
        if extras is not None:
            if len(extras) > touched:
                raise TokenError(f"extras for {len(extras)} blocks: these {len(ids)} tokens reach {touched}")
            encoded = [encode_extras(pairs) for pairs in extras]
        if not touched:
            return 0
        if encoded or self._tail_extras:
            encoded = (encoded or []) + [b""] * (touched - len(encoded or []))
            encoded[0] = self._tail_extras + encoded[0]
        if len(self._tail):
            ids = np.concatenate((self._tail, ids))
        full = len(ids) // self.block_tokens
        hashed = full * self.block_tokens
        packed = b""
        if full:
            parent = self.parents(len(self.packed) // SIGNATURE_BYTES)
            try:
                packed = (digest or digest_chain)(
                    parent, ids[:hashed], self.block_tokens, encoded[:full] if encoded else None
                )
            except OverflowError:
                _narrow(ids)  # raises an error that names the wrong id
                raise
        tail = _narrow(ids, hashed).copy()  # the caller may reuse its buffer
        self.packed += packed
        self._tail = tail
        self._tail_extras = encoded[full] if encoded and len(encoded) > full else b""
        return full


def tokens(token_ids: Any) -> NDArray[np.uint32]:
    """Return token ids as a one-dimensional, contiguous uint32 array; without a copy where they are one already.

    Args:
        token_ids: a sequence or buffer of integers: numpy array, torch tensor on the CPU, `array.array`, memoryview.

    Raises:
        TokenError: anything else, with position and value of the first wrong id.
    """
    return _narrow(_integers(token_ids))


def _integers(token_ids: Any) -> NDArray[Any]:
    """Return token ids as an array of some integer type; their values are not checked."""
    if isinstance(token_ids, (str, bytes, bytearray)):
        raise TokenError(f"token ids given as {type(token_ids).__name__}: expected integers; decode them first")
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, (memoryview, array)):
        return _from_sequence(token_ids)
    try:
        ids = np.asarray(token_ids)
    # for example a tensor on a device, of a type that numpy lacks
    except (TypeError, ValueError, RuntimeError) as error:
        raise TokenError(f"token ids that cannot be read as an array ({error}); copy them to the CPU first") from None
    if ids.ndim != 1:
        raise TokenError(f"token ids of {ids.ndim} dimensions ({type(token_ids).__name__}): expected one sequence")
    if ids.dtype.kind not in "iu":
        first = f"; position 0 holds {ids[0]!r}" if len(ids) else ""
        raise TokenError(f"token ids of type {ids.dtype}: expected integers{first}")
    return ids


def _narrow(ids: NDArray[Any], first: int = 0) -> NDArray[np.uint32]:
    """Return the ids from `first` on as contiguous uint32; TokenError where one does not fit."""
    rest = ids[first:]
    if len(rest) and (ids.dtype.kind == "i" or ids.dtype.itemsize > 4):
        wrong = (rest < 0) | (rest > _MAX_ID)
        if wrong.any():
            raise _token_error(first + int(wrong.argmax()), rest[int(wrong.argmax())])
    return np.ascontiguousarray(rest, dtype="<u4")


def encode_extras(extras: BlockExtras) -> bytes:
    """Return the extras of one block as they are hashed; empty for none."""
    parts = []
    for tag, data in extras:
        if not (isinstance(tag, bytes) and 1 <= len(tag) <= 0xFF):
            raise TokenError(f"extra with the tag {tag!r}: expected 1 to 255 bytes")
        if not (isinstance(data, bytes) and len(data) <= _MAX_ID):
            raise TokenError(f"extra {tag!r} with data of type {type(data).__name__}: expected bytes, below 4 GiB")
        parts += [bytes((len(tag),)), tag, pack("<I", len(data)), data]
    return b"".join(parts)


def digest_chain(parent: bytes, tokens: NDArray[Any], block_tokens: int, extras: list[bytes] | None) -> bytes:
    """Return the signatures of `len(tokens) / block_tokens` blocks, concatenated, 32 bytes each.

    Releases the interpreter lock.

    Args:
        tokens: contiguous uint32 or int64.
        extras: the encoded extras of each block; None where no block has any.

    Raises:
        OverflowError: a token id is negative or has more than 32 bits.
    """
    if native.available():
        return native.core.digest_chain(parent, tokens, block_tokens, extras)
    return digest_chain_reference(parent, tokens, block_tokens, extras)


def digest_chain_reference(parent: bytes, tokens: NDArray[Any], block_tokens: int, extras: list[bytes] | None) -> bytes:
    """The Python twin of the native function."""
    if tokens.dtype == np.int64 and len(tokens) and (tokens.min() < 0 or tokens.max() > _MAX_ID):
        raise OverflowError("a token id that does not fit into 32 bits without a sign")
    view = memoryview(tokens.astype("<u4").tobytes())
    size = 4 * block_tokens
    signatures = []
    for i in range(len(view) // size):
        block = sha256(parent)
        block.update(view[i * size : (i + 1) * size])
        if extras is not None:
            block.update(extras[i])
        parent = block.digest()
        signatures.append(parent)
    return b"".join(signatures)


def bind_signatures(namespace_id: bytes, packed: bytes) -> bytes:
    """Return SHA-256(namespace id, signature) of each signature.

    A daemon that isolates tenants looks these up, so a client's signatures can name nothing outside its namespace.

    Raises:
        TokenError: the length is not a multiple of 32 bytes.
    """
    if len(packed) % SIGNATURE_BYTES:
        raise TokenError(f"signatures of {len(packed)} bytes: expected a multiple of {SIGNATURE_BYTES}")
    if native.available():
        return native.core.bind_signatures(namespace_id, packed)
    return bind_signatures_reference(namespace_id, packed)


def bind_signatures_reference(namespace_id: bytes, packed: bytes) -> bytes:
    """The Python twin of the native function."""
    return b"".join(sha256(namespace_id + signature).digest() for signature in Signatures(packed))


def _from_sequence(ids: Sequence[Any]) -> NDArray[np.uint32]:
    packed = native.core.token_ids(ids) if native.available() else None
    if packed is not None:
        return np.frombuffer(packed, "<u4")
    if type(ids) is range or _BOOL_TYPES.isdisjoint(map(type, ids)):
        try:
            return np.asarray(array("I", ids)).astype("<u4", copy=False)
        except (TypeError, ValueError, OverflowError):
            pass  # the loop finds and names it
    for i, value in enumerate(ids):
        if type(value) in _BOOL_TYPES or not _is_id(value):
            raise _token_error(i, value)
    raise TokenError(f"token ids in a {type(ids).__name__} that cannot be read; give a list")


def _is_id(value: Any) -> bool:
    try:
        return 0 <= index(value) <= _MAX_ID
    except (TypeError, ValueError):
        return False


def _token_error(position: int, value: Any) -> TokenError:
    return TokenError(f"position {position} holds {value!r}: expected an integer from 0 to {_MAX_ID}")


# SGLang's names of pages, for engines that share blocks with it: the page chain of `docs/spec/key.md`.

PAGE_CHAIN_ID = "sglang page chain: sha256(previous digest, token ids), seeded by adapter and salt"
"""The origin of these digests, as a namespace's facts name it."""


def page_digests(token_ids: Any, page_tokens: int, seed: bytes = b"") -> list[bytes]:
    """Return one digest a full page.

    Args:
        seed: empty, or SGLang's seed for an adapter and a salt.

    Raises:
        TokenError: `token_ids` are no token ids.
    """
    ids = memoryview(tokens(token_ids).tobytes())
    size, digests, before = 4 * page_tokens, [], seed
    for page in range(len(ids) // size):
        before = sha256(before + ids[page * size : (page + 1) * size]).digest()
        digests.append(before)
    return digests
