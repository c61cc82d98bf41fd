"""What a codec saves, costs and loses, on the keys and values of a real model reading real text.

SmolLM2 in float32 (or --model) reads the project's own documentation: the first tokens of a passage are the prefix,
whose blocks pass the codec, as float32 and rounded to bfloat16; the rest is read with what came back.

    codec/zstd/bf16/ratio        payload bytes by stored bytes
    codec/zstd/bf16/encode       payload bytes a second of one thread's processor time; floor: copying them
    codec/zstd/bf16/decode
    codec/fp8/bf16/max_error     the largest error, in parts of the largest magnitude of its scale group
    codec/fp8/bf16/rms_error     of all elements, in parts of their own rms
    codec/fp8/bf16/perplexity    of the rest of the passages; peer: with the prefix as it was
    codec/fp8/bf16/agreement     how often the likeliest next token is the same as with the prefix as it was
    codec/raw/bf16/perplexity    what rounding to bfloat16 does by itself; codec/raw/fp32/perplexity: nothing passed

Fails where an error is beyond what the codec declares, or where a lossless one changed a byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from harness import Row, options, publish
from numpy.typing import NDArray

from examples.demo.run import text_parts
from kvcache.block.layout import KVLayout
from kvcache.codec.codec import Codec, codecs
from kvcache.codec.quantised import narrow, widen
from kvcache.engine.model import Model, load_model
from kvcache.engine.scheduler import Batch, Span
from kvcache.engine.tokenizer import Tokenizer

DTYPES = ("bf16", "fp32")
SIZES, QUICK_SIZES = (1024, 1024, 4), (384, 128, 1)  # tokens of the prefix, of the rest; passages
Blocks = NDArray[np.float32]  # (blocks, layers, 2, block_tokens, heads, dim)


class Wrong(SystemExit):
    """A codec broke its promise: no figure is better than a wrong one."""


class Reader:
    """One passage: the prefix is computed once, the rest read again behind whatever is put in its place."""

    def __init__(self, model: Model, ids: Sequence[int], prefix: int) -> None:
        self._model, self._ids, self._prefix = model, ids, prefix
        layout = model.layout
        group = layout.groups[0]
        pages = -(-len(ids) // layout.block_tokens)
        self._kv = torch.zeros(group.layers, 2, pages, layout.block_tokens, group.kv_heads, group.head_dim)
        self._run(0, prefix)
        self.blocks: Blocks = self._pages().permute(2, 0, 1, 3, 4, 5).contiguous().numpy()

    def _pages(self) -> torch.Tensor:
        return self._kv[:, :, : self._prefix // self._model.layout.block_tokens]

    def read(self, blocks: Blocks) -> torch.Tensor:
        """Logits of the rest but its last token, behind these blocks."""
        self._pages().copy_(torch.from_numpy(blocks).permute(1, 2, 0, 3, 4, 5))
        return self._run(self._prefix, len(self._ids))[:-1]

    def loss(self, logits: torch.Tensor) -> torch.Tensor:
        """Negative log likelihood of each token that comes next."""
        return torch.nn.functional.cross_entropy(logits, torch.tensor(self._ids[self._prefix + 1 :]), reduction="none")

    def _run(self, first: int, end: int) -> torch.Tensor:
        length = end - first
        span = Span(0, length, first, list(range(self._kv.shape[2])))
        ids, at = torch.tensor(self._ids[first:end]), torch.arange(first, end)
        return self._model.forward(Batch(ids, at, [span], torch.arange(length)), self._kv)


@dataclass
class Passed:
    """The blocks of all passages as one dtype, through one codec."""

    codec: Codec
    dtype: str
    layout: KVLayout
    before: list[memoryview]
    stored: list[memoryview]
    after: list[memoryview]

    @classmethod
    def through(cls, codec: Codec, blocks: Blocks, layout: KVLayout, dtype: str) -> Passed:
        layout = replace(layout, groups=(replace(layout.groups[0], dtype=dtype),))
        before = [memoryview(narrow(block, dtype).tobytes()) for block in blocks]
        passed = cls(codec, dtype, layout, before, [], [memoryview(bytearray(len(block))) for block in before])
        passed.encode()
        passed.decode()
        return passed

    @property
    def payload_bytes(self) -> int:
        return sum(map(len, self.before))

    def encode(self) -> None:
        whole = self.layout.groups[0].whole
        self.stored = [self.codec.encode(block, self.layout, 0, whole) or block for block in self.before]
        if any(stored is block for stored, block in zip(self.stored, self.before, strict=True)):
            raise Wrong(f"codec/{self.codec.name}/{self.dtype}: it left a block of the model alone")

    def decode(self) -> None:
        whole = self.layout.groups[0].whole
        for stored, block in zip(self.stored, self.after, strict=True):
            self.codec.decode(stored, block, self.layout, 0, whole)

    def copy(self) -> None:
        for before, after in zip(self.before, self.after, strict=True):
            after[:] = before

    def numbers(self, payloads: Sequence[memoryview]) -> Blocks:
        words = np.frombuffer(b"".join(payloads), f"<u{2 if self.dtype == 'bf16' else 4}")
        return widen(words, self.dtype).reshape(len(payloads), *self.layout.shape())

    def cost(self) -> Iterator[Row]:
        name = f"codec/{self.codec.name}/{self.dtype}"
        yield Row(f"{name}/ratio", self.payload_bytes / sum(map(len, self.stored)), "times")
        rate = {call: self.payload_bytes / _best_s(call) / 1e9 for call in (self.encode, self.copy, self.decode)}
        yield Row(f"{name}/encode", rate[self.encode], "GB/s", floor=rate[self.copy])
        yield Row(f"{name}/decode", rate[self.decode], "GB/s", floor=rate[self.copy])

    def error(self) -> Iterator[Row]:
        name = f"codec/{self.codec.name}/{self.dtype}"
        if not self.codec.error_bound:
            if self.before != self.after:
                raise Wrong(f"{name}: what came back is not what went in")
            return
        was, now = self.numbers(self.before), self.numbers(self.after)
        largest = np.abs(was).max(axis=(3, 5), keepdims=True)  # blocks of 16 tokens: one scale a head
        error = now - was
        worst = float((np.abs(error) / largest).max())
        if worst > self.codec.error_bound:
            raise Wrong(f"{name}: an error of {worst}, {self.codec.error_bound} is what it declares")
        yield Row(f"{name}/max_error", 100 * worst, "% error")
        yield Row(f"{name}/rms_error", 100 * float(_rms(error) / _rms(was)), "% error")


def _best_s(call: Callable[[], object], runs: int = 5) -> float:
    """Of this thread's processor time: a codec has one thread, whatever else runs on the machine."""
    times = []
    for _ in range(runs):
        begun = time.thread_time()
        call()
        times.append(time.thread_time() - begun)
    return min(times)


def _rms(values: Blocks) -> Any:
    return np.sqrt(np.mean(np.square(values), dtype=np.float64))


class Quality:
    """Perplexity and agreement over all passages, against the prefix as it was."""

    def __init__(self, readers: Sequence[Reader]) -> None:
        self._readers = readers
        plain = [(reader, reader.read(reader.blocks)) for reader in readers]
        self._likeliest = torch.cat([logits.argmax(-1) for _, logits in plain])
        self.plain = _perplexity([reader.loss(logits) for reader, logits in plain])

    def rows(self, name: str, blocks: Blocks) -> Iterator[Row]:
        pieces = np.split(blocks, len(self._readers))
        logits = [reader.read(piece) for reader, piece in zip(self._readers, pieces, strict=True)]
        losses = [reader.loss(each) for reader, each in zip(self._readers, logits, strict=True)]
        same = torch.cat([each.argmax(-1) for each in logits]) == self._likeliest
        yield Row(f"{name}/perplexity", _perplexity(losses), "perplexity", peer=self.plain)
        yield Row(f"{name}/agreement", 100 * float(same.double().mean()), "%")


def _perplexity(losses: Sequence[torch.Tensor]) -> float:
    return float(torch.cat(list(losses)).double().mean().exp())


def passages(tokenizer: Tokenizer, length: int, count: int) -> list[list[int]]:
    """Pieces of the documentation, spread over it."""
    ids = tokenizer.encode("\n".join(text_parts().values()))
    return [ids[start : start + length] for start in range(0, len(ids) - length, len(ids) // count)][:count]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--model", default="smollm2", help="a directory of safetensors, a GGUF file, or smollm2")
    arguments = parser.parse_args()
    prefix, rest, count = QUICK_SIZES if arguments.quick else SIZES
    model = load_model(arguments.model)
    prefix, rest = (min(tokens, model.max_tokens // 32 * 16) for tokens in (prefix, rest))
    readers = [Reader(model, ids, prefix) for ids in passages(Tokenizer(model.directory), prefix + rest, count)]
    blocks = np.concatenate([reader.blocks for reader in readers])
    quality = Quality(readers)
    rows = [Row("codec/raw/fp32/perplexity", quality.plain, "perplexity")]
    for name, made in codecs().items():
        for dtype in DTYPES:
            passed = Passed.through(made, blocks, model.layout, dtype) if name != "raw" else None
            if passed is not None:
                rows += [*passed.cost(), *passed.error()]
                if made.error_bound:
                    rows += quality.rows(f"codec/{name}/{dtype}", passed.numbers(passed.after))
            elif dtype == "bf16":
                rows += quality.rows("codec/raw/bf16", widen(narrow(blocks, dtype), dtype))
    size = model.layout.block_tokens
    note = f"{len(blocks)} blocks of {size} tokens; {count} passages, {rest} tokens read behind {prefix} each"
    publish("codec", rows, arguments.json, notes=[note])


if __name__ == "__main__":
    main()
