"""Sound bytes, damaged in ways that find more than chance would."""

from __future__ import annotations

import random
from collections.abc import Sequence

NUMBERS = [0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, (1 << 64) - 1]


def corrupt(rng: random.Random, sound: Sequence[bytes]) -> bytes:
    """One of these, after one to four faults."""
    data = bytearray(rng.choice(sound))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 2, 4, 8, 16, 64))
        match rng.randrange(8):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << rng.randrange(8)
            case 1:
                del data[at:]
            case 2:
                del data[at : at + size]
            case 3:
                data[at:at] = data[at : at + size]
            case 4:
                data[at:at] = rng.randbytes(size)
            case 5:
                width = rng.choice((1, 2, 4, 8))
                number = rng.choice(NUMBERS) & ((1 << 8 * width) - 1)
                data[at : at + width] = number.to_bytes(width, rng.choice(("little", "big")))
            case 6:
                other = rng.choice(sound)
                there = rng.randrange(len(other) + 1)
                data[at : at + size] = other[there : there + size]
            case _:
                there = rng.randrange(len(data) + 1)
                data[at : at + size], data[there : there + size] = data[there : there + size], data[at : at + size]
    return bytes(data)
