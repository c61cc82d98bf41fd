"""The revision of a model in memory, for an engine whose model object does not record its files.

`from_pretrained` takes `subfolder`, `variant`, `gguf_file`, `revision`, `cache_dir`, a quantisation and a type, and the
model records none of them. Its tensors are their result, so the digest covers the tensors: of each its name, type and
shape, and all bytes up to 64 KiB, or 16 pieces of 4 KiB, evenly from the first byte to the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from struct import pack
from typing import Any

import torch

from kvcache.errors import ModelError

PREFIX = b"kvcache tensors 1\n"
PREFIX_WHOLE = b"kvcache tensors 1 whole\n"
SAMPLES = 16
SAMPLE_BYTES = 4 << 10
READ_BYTES = 64 << 20  # of a tensor on a device, at once


def tensors_revision(tensors: Mapping[str, Any], *, read_every_byte: bool = False) -> str:
    """Return the digest of a state dictionary.

    Args:
        tensors: by name, on any device. Views of the same memory count under each name.
        read_every_byte: read all of each tensor instead of a sample.

    Raises:
        ModelError: a value is no tensor, or its bytes are not in memory.
    """
    digest = sha256(PREFIX_WHOLE if read_every_byte else PREFIX)
    for name in sorted(tensors):
        tensor = tensors[name]
        try:
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            _add(digest, name, tensor.detach(), read_every_byte)
        except (AttributeError, RuntimeError, NotImplementedError, TypeError) as error:
            raise ModelError(
                f"tensor {name!r} ({type(tensor).__name__}) cannot be read: {error}; give revision=, a name that "
                "changes with the weights"
            ) from None
    return f"{'tensors-whole' if read_every_byte else 'tensors'}:{digest.hexdigest()}"


def _add(digest: Any, name: str, tensor: torch.Tensor, read_every_byte: bool) -> None:
    if tensor.is_meta:
        raise RuntimeError("its values are on the meta device")
    for text in (name, str(tensor.dtype), str(tuple(tensor.shape))):
        digest.update(pack("<Q", len(text.encode())) + text.encode())
    if not tensor.numel():
        return
    content = tensor.reshape(-1).view(torch.uint8)
    size = content.numel()
    digest.update(pack("<Q", size))
    if read_every_byte or size <= SAMPLES * SAMPLE_BYTES:
        for at in range(0, size, READ_BYTES):
            digest.update(content[at : at + READ_BYTES].cpu().numpy())
        return
    places = [i * (size - SAMPLE_BYTES) // (SAMPLES - 1) for i in range(SAMPLES)]
    digest.update(torch.cat([content[at : at + SAMPLE_BYTES] for at in places]).cpu().numpy())
