"""From token ids to signatures: the SHA-256 chain of `docs/spec/key.md`.

    signature of a block = SHA-256(parent's 32 bytes, token ids as little-endian uint32, extras)

The parent of the first block is the namespace id; the key of a block is the first 16 bytes of its signature."""

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
"""(tag, data) pairs that are part of one block's identity beside its tokens, in the order in which they are hashed."""

Digest = Callable[[bytes, NDArray[Any], int, "list[bytes] | None"], bytes]
"""What hashes full blocks: `digest_chain`, or what does that and something more in the same call."""


class Signatures(Sequence[bytes]):
    """Packed signatures as a sequence: each is made when it is asked for."""

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

    __hash__ = None  # type: ignore[assignment]  # equal to lists, which have none


class Chain:
    """The signatures of a growing sequence of tokens. Hashes a block once, when it is full; keeps the tail's tokens.

    `parents` and signatures are raw bytes, 32 long; `packed` has all signatures one behind the other. `head` is the
    parent of the first: the namespace id, but for a chain that begins within a prefix. Not for use by several threads
    at once; what `packed` was stays as it was.
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
        """What a daemon's client calls its blocks, where the daemon binds that to the namespace."""
        self._tail = np.empty(0, np.uint32)
        self._tail_extras = b""
        self._from_digests = False

    @classmethod
    def from_digests(
        cls, namespace_id: bytes, digests: Sequence[bytes], block_tokens: int, *, after: bytes | None = None
    ) -> Chain:
        """Bind an engine's own digests, one a full block, to the namespace; no token ids can follow them.

        `after`: the digest of the block before the first of these where they begin within a prefix, empty where that
        is not known. Each digest must be at least 16 bytes of a cryptographic hash over the whole prefix, and the
        namespace's `facts` must name where it comes from: an engine's digest and our token ids must never share a
        namespace.
        """
        chain = cls(namespace_id, block_tokens)
        chain._from_digests = True
        chain.extend_digests([after] if after else [])
        chain.head, chain.packed = chain.packed if after is not None else chain.head, b""
        chain.extend_digests(digests)
        return chain

    def extend_digests(self, digests: Sequence[bytes]) -> None:
        """More of an engine's digests behind those of `from_digests`. TokenError leaves the chain as it was."""
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
        """A chain that another process hashed, with its `head` where that is not the namespace id. It grows by
        `append`: its tokens are not known here."""
        chain = cls(namespace_id, block_tokens)
        chain._from_digests = True
        chain.head = chain.head if head is None else head
        chain.append(packed)
        return chain

    def append(self, packed: bytes) -> None:
        """More signatures behind those that are there, of blocks that were hashed elsewhere."""
        if len(packed) % SIGNATURE_BYTES:
            raise TokenError(f"signatures of {len(packed)} bytes: expected a multiple of {SIGNATURE_BYTES}")
        self.packed += packed

    @property
    def signatures(self) -> Sequence[bytes]:
        """One for each full block, so far."""
        return Signatures(self.packed)

    @property
    def tokens(self) -> int:
        """Tokens so far, those of the tail included."""
        return len(self.packed) // SIGNATURE_BYTES * self.block_tokens + len(self._tail)

    def parents(self, block: int) -> bytes:
        """The signature of the block before; for block 0 the head."""
        return Signatures(self.packed)[block - 1] if block else self.head

    def extend(
        self, token_ids: Any, extras: Sequence[BlockExtras] | None = None, *, digest: Digest | None = None
    ) -> int:
        """Append tokens; the number of blocks that became full. TokenError leaves the chain as it was.

        `extras[i]` belongs to the i-th block that receives tokens in this call, counted from the one that takes the
        first of them; what is not given is empty. A block filled by several calls has the extras of all of them, in
        the order of the calls.
        """
        if self._from_digests:
            raise TokenError("a chain of digests cannot be extended by token ids; extend it by digests")
        ids = _integers(token_ids)
        if ids.dtype != np.int64 or not ids.flags.c_contiguous or len(self._tail):
            ids = _narrow(ids)  # else they are hashed from where they lie
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
                _narrow(ids)  # names the one that is no token id
                raise
        tail = _narrow(ids, hashed).copy()  # the caller may reuse its buffer
        self.packed += packed
        self._tail = tail
        self._tail_extras = encoded[full] if encoded and len(encoded) > full else b""
        return full


def tokens(token_ids: Any) -> NDArray[np.uint32]:
    """Token ids as a one-dimensional, contiguous uint32 array; no copy where they are one already.

    Takes sequences of integers and integer buffers: numpy arrays, torch tensors on the CPU, `array.array`,
    memoryviews. TokenError for anything else, with the position and the value of the first id that is none.
    """
    return _narrow(_integers(token_ids))


def _integers(token_ids: Any) -> NDArray[Any]:
    """The same as an array of some type of integers, whose values were not looked at."""
    if isinstance(token_ids, (str, bytes, bytearray)):
        raise TokenError(f"token ids given as {type(token_ids).__name__}: expected integers; decode them first")
    if isinstance(token_ids, Sequence) and not isinstance(token_ids, (memoryview, array)):
        return _from_sequence(token_ids)
    try:
        ids = np.asarray(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:  # a tensor on a device, of a type that numpy has not
        raise TokenError(f"token ids that cannot be read as an array ({error}); copy them to the CPU first") from None
    if ids.ndim != 1:
        raise TokenError(f"token ids of {ids.ndim} dimensions ({type(token_ids).__name__}): expected one sequence")
    if ids.dtype.kind not in "iu":
        first = f"; position 0 holds {ids[0]!r}" if len(ids) else ""
        raise TokenError(f"token ids of type {ids.dtype}: expected integers{first}")
    return ids


def _narrow(ids: NDArray[Any], first: int = 0) -> NDArray[np.uint32]:
    """From the `first` on as contiguous uint32; TokenError where one of these is none."""
    rest = ids[first:]
    if len(rest) and (ids.dtype.kind == "i" or ids.dtype.itemsize > 4):
        wrong = (rest < 0) | (rest > _MAX_ID)
        if wrong.any():
            raise _token_error(first + int(wrong.argmax()), rest[int(wrong.argmax())])
    return np.ascontiguousarray(rest, dtype="<u4")


def encode_extras(extras: BlockExtras) -> bytes:
    """The extras of one block as they are hashed; nothing for none."""
    parts = []
    for tag, data in extras:
        if not (isinstance(tag, bytes) and 1 <= len(tag) <= 0xFF):
            raise TokenError(f"extra with the tag {tag!r}: expected 1 to 255 bytes")
        if not (isinstance(data, bytes) and len(data) <= _MAX_ID):
            raise TokenError(f"extra {tag!r} with data of type {type(data).__name__}: expected bytes, below 4 GiB")
        parts += [bytes((len(tag),)), tag, pack("<I", len(data)), data]
    return b"".join(parts)


def digest_chain(parent: bytes, tokens: NDArray[Any], block_tokens: int, extras: list[bytes] | None) -> bytes:
    """The signatures of `len(tokens) / block_tokens` blocks, one behind the other, 32 bytes each.

    `tokens` are uint32 or int64, contiguous; OverflowError where one is of more than 32 bits or negative. `extras`
    holds the encoded extras of each block; None where no block has any. Releases the interpreter lock.
    """
    if native.available():
        return native.core.digest_chain(parent, tokens, block_tokens, extras)
    return digest_chain_reference(parent, tokens, block_tokens, extras)


def digest_chain_reference(parent: bytes, tokens: NDArray[Any], block_tokens: int, extras: list[bytes] | None) -> bytes:
    """The twin of the native function."""
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
    """SHA-256(namespace id, signature) of each of these: what a daemon that keeps tenants apart looks up, so that
    whatever a client says can name nothing outside the namespace. TokenError for another length."""
    if len(packed) % SIGNATURE_BYTES:
        raise TokenError(f"signatures of {len(packed)} bytes: expected a multiple of {SIGNATURE_BYTES}")
    if native.available():
        return native.core.bind_signatures(namespace_id, packed)
    return bind_signatures_reference(namespace_id, packed)


def bind_signatures_reference(namespace_id: bytes, packed: bytes) -> bytes:
    """The twin of the native function."""
    return b"".join(sha256(namespace_id + signature).digest() for signature in Signatures(packed))


def _from_sequence(ids: Sequence[Any]) -> NDArray[np.uint32]:
    packed = native.core.token_ids(ids) if native.available() else None
    if packed is not None:
        return np.frombuffer(packed, "<u4")
    if type(ids) is range or _BOOL_TYPES.isdisjoint(map(type, ids)):
        try:
            return np.asarray(array("I", ids)).astype("<u4", copy=False)
        except (TypeError, ValueError, OverflowError):
            pass  # found and named below
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


# The names that SGLang gives pages, for engines that share blocks with it: `docs/spec/key.md`, its page chain.

PAGE_CHAIN_ID = "sglang page chain: sha256(previous digest, token ids), seeded by adapter and salt"
"""The origin of these digests, as a namespace's facts name it."""


def page_digests(token_ids: Any, page_tokens: int, seed: bytes = b"") -> list[bytes]:
    """One digest a full page. `seed`: nothing, or what SGLang makes of an adapter and a salt; TokenError for no ids."""
    ids = memoryview(tokens(token_ids).tobytes())
    size, digests, before = 4 * page_tokens, [], seed
    for page in range(len(ids) // size):
        before = sha256(before + ids[page * size : (page + 1) * size]).digest()
        digests.append(before)
    return digests
