from __future__ import annotations

import enum
from typing import Any


class ImageReadMode(enum.Enum):
    UNCHANGED, GRAY, GRAY_ALPHA, RGB, RGB_ALPHA = range(5)


def decode_jpeg(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("no images here")


decode_image = decode_jpeg
