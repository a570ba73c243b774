"""The block in which an error travels; what ranks do with it is tested in multiproc/test_failures.py."""

import pytest

from ddp_zero.core.comm.ranks import BLOCK_BYTES, decode_error, encode_error


@pytest.mark.parametrize("text", ["", "KeyError: 'a'", "ValueError: größer", "two\nlines"])
def test_a_text_comes_back(text: str) -> None:
    block = encode_error(text)
    assert block.numel() == BLOCK_BYTES
    assert decode_error(block) == text


def test_a_text_that_is_too_long_is_cut_off_between_characters() -> None:
    told = decode_error(encode_error("ä€𝄞" * 1000))
    assert 500 < len(told.encode()) <= BLOCK_BYTES
    assert ("ä€𝄞" * 1000).startswith(told)


def test_a_text_that_utf_8_does_not_know_travels_all_the_same() -> None:
    assert decode_error(encode_error("bad \udc80 name")) == "bad ? name"
