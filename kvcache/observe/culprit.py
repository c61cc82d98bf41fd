"""What kind of text breaks a prefix: a timestamp, an id, a counter, by its form.

Two prompts agree up to a character and part there. Where the text around it has one of a few forms in both of them,
and is not the same in both, that is what keeps the rest from being found.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_DATE = (
    rf"(?:\d{{4}}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{{2,4}}|\d\d? {_MONTH},? \d{{4}}|"
    rf"{_MONTH} \d\d?(?:st|nd|rd|th)?,? \d{{4}})"
)
_TIME = r"\d\d?:\d\d(?::\d\d(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b)?(?:Z|\s?(?:UTC|GMT)|[+-]\d\d:?\d\d)?"

FORMS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "a timestamp": rf"(?:{_DAY},? )?{_DATE}(?:[T ,]+(?:at )?)?{_TIME}",
        "a date": rf"(?:{_DAY},? )?{_DATE}|{_DAY}\b",
        "a time of day": _TIME,
        "a UUID": r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b",
        "a Unix time": r"(?<![\d.])1\d{9}(?:\d{3}|\.\d+)?(?![\d.])",
        "an id": r"(?i:\b(?:user|session|request|req|trace|span|conversation|chat|thread|message|msg|tenant|run|job|id)"
        r"[ _-]?(?:id|no|number|#)?\s*[:=#_ -]\s*[\"']?(?=[\w-]*\d)[\w-]{2,}\b)",
        "a hexadecimal id": r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,64}\b",
        "a number": r"(?<!\w)\d[\d,._]*",
    }.items()
}
"""By name, the most telling first."""


@dataclass(frozen=True, slots=True)
class Culprit:
    """`name`: one of the forms. What stands there in the one text, and in the other."""

    name: str
    ours: str
    theirs: str


def culprit(ours: str, theirs: str, at: int) -> Culprit | None:
    """`ours` and `theirs` agree up to the character `at`; None where nothing there has a form that is known."""
    for name, form in FORMS.items():
        mine, other = (_around(form, text, at) for text in (ours, theirs))
        if mine is not None and other is not None and mine.group() != other.group():
            return Culprit(name, mine.group(), other.group())
    return None


def _around(form: re.Pattern[str], text: str, at: int) -> re.Match[str] | None:
    """The longest match that begins at or before the place, and ends behind it."""
    found = [match for match in form.finditer(text) if match.start() <= at <= match.end()]
    return max(found, key=lambda match: len(match.group()), default=None)


def parting(ours: str, theirs: str) -> int:
    """The first character at which two texts differ."""
    shorter = min(len(ours), len(theirs))
    return next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
