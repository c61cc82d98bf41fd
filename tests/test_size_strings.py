"""Sizes: written by people, read back by people."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.settings.types import parse_bytes, parse_seconds, show_bytes, show_seconds


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
def test_size_strings_parse_to_bytes(text: str | int, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "2iB", "2 gigs", "-1", "1e9", "0x10", "1_000", "2GiBs", "inf", True, "٣"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
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
def test_sizes_are_formatted_with_units(size: int, text: str) -> None:
    assert show_bytes(size) == text


@given(st.integers(0, 1 << 60))
def test_a_formatted_size_parses_to_four_digits(size: int) -> None:
    assert parse_bytes(show_bytes(size)) == pytest.approx(size, rel=1e-3, abs=0)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30min", 1800), ("12 h", 43_200), ("7d", 604_800), ("1.5d", 129_600), (" 2w ", 1_209_600)],
)
def test_time_strings_parse_to_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "-1d", "7 days", "1e3s", "nan s"])
def test_an_invalid_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a time"):
        parse_seconds(text)


@given(st.floats(0, 1e9))
def test_a_formatted_time_parses_to_itself(seconds: float) -> None:
    shown = show_seconds(seconds)
    unit = {"s": 1, "min": 60, "h": 3600, "d": 86_400}[shown.split()[1]]
    assert abs(parse_seconds(shown) - seconds) <= unit / 2
