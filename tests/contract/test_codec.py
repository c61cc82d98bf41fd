"""The contract of a codec, for every one there is."""

from __future__ import annotations

import pytest

import kvcache
from kvcache.codec.codec import CODECS, Codec, codec
from kvcache.testing import CodecContract


class TestCodec(CodecContract):
    @pytest.fixture(params=CODECS)
    def codec(self, request: pytest.FixtureRequest) -> Codec:
        return codec(request.param)


def test_each_codec_is_found_by_name() -> None:
    assert all(codec(name).name == name for name in CODECS)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(kvcache.ConfigError, match="'kivi': expected one of raw"):
        codec("kivi")
