"""How a model's weights are identified."""

from __future__ import annotations

from pydantic import Field

from kvcache.values import Section


class Identity(Section):
    """Which bytes of a model's weights its revision covers."""

    read_every_byte: bool = Field(
        default=False,
        description="Read all bytes of the weights instead of a sample. The sample misses a change of a few weights "
        "that lies between its pieces; reading everything takes as long as the drive and SHA-256 take. Engines that "
        "share blocks need the same value.",
    )
