"""Sizes: written by people, read back by people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.units import parse_bytes, show_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("10B", 10),
        ("64k", 64 << 10),
        ("64 KiB", 64 << 10),
        ("64kB", 64_000),
        ("2GiB", 2 << 30),
        ("2G", 2 << 30),
        (" 2 gib ", 2 << 30),
        ("1.5TB", 1_500_000_000_000),
        ("0.5MiB", 512 << 10),
        (7, 7),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2iB", "2 gigs", "-1", "1e9", "0x10", "1_000", "2GiBs", "inf", True, "٣"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="no size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1 << 10, "1 KiB"),
        (327_680, "320 KiB"),
        (2_621_440, "2.5 MiB"),
        (10 << 30, "10 GiB"),
    ],
)
def test_shown(size: int, text: str) -> None:
    assert show_bytes(size) == text


@given(st.integers(0, 1 << 60))
def test_what_is_shown_reads_back_to_four_digits(size: int) -> None:
    assert parse_bytes(show_bytes(size)) == pytest.approx(size, rel=1e-3, abs=0)
