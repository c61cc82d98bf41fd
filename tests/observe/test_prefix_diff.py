"""What breaks a prefix is named by its form, where it differs, and not beside it."""

from __future__ import annotations

import pytest

from kvcache.observe.recent_requests import VaryingText, find_varying_text, first_difference

BEFORE, AFTER = "You are a helpful assistant. ", " Answer in one line. " * 5


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("a timestamp", "2026-11-29T12:03:22Z", "2026-11-29T12:03:41Z"),
        ("a timestamp", "2026-11-29 12:03", "2026-11-30 09:00"),
        ("a timestamp", "Monday, November 30, 2026 at 9:15 AM", "Monday, November 30, 2026 at 9:16 AM"),
        ("a date", "2026-11-29", "2026-12-01"),
        ("a date", "29 Nov 2026", "30 Nov 2026"),
        ("a time of day", "12:03:22.5", "12:04:01.0"),
        ("a UUID", "6b1f6f0e-8a53-4f3b-9a0e-0f6f5a2f9b11", "6b1f6f0e-8a53-4f3b-9a0e-0f6f5a2f9b12"),
        ("a Unix time", "1764417802", "1764417999"),
        ("an id", "user_id: u-4711", "user_id: u-4712"),
        ("an id", "Session 8f3ab", "Session 8f3ac"),
        ("a hexadecimal id", "deadbeef01", "deadbeef02"),
        ("a number", "41", "42"),
    ],
)
def test_a_form_is_named(name: str, one: str, other: str) -> None:
    ours, theirs = (f"{BEFORE}{text}{AFTER}" for text in (one, other))
    assert find_varying_text(ours, theirs, first_difference(ours, theirs)) == VaryingText(name, one, other)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("It is 12:03. Tell me about cats", "It is 12:03. Tell me about dogs"),
        ("Paris is lovely", "Rome is lovely"),
        ("the year 1999 was", "the years were"),
        ("same", "same"),
    ],
)
def test_plain_words_are_not(ours: str, theirs: str) -> None:
    assert find_varying_text(ours, theirs, first_difference(ours, theirs)) is None
