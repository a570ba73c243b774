"""The block in which an error, or options, travel; what ranks do with it is tested in multiproc."""

import pytest

from ddp_zero.core.comm.ranks import BLOCK_BYTES, decode, encode
from ddp_zero.core.local.loop_options import OptionsSummary


@pytest.mark.parametrize("text", ["", "KeyError: 'a'", "ValueError: größer", "two\nlines"])
def test_an_error_text_is_decoded_as_it_was_encoded(text: str) -> None:
    block = encode(OptionsSummary(2**48, '[[0,"lr","0.5"]]'), text)
    assert block.numel() == BLOCK_BYTES
    assert decode(block) == (OptionsSummary(2**48, "" if text else '[[0,"lr","0.5"]]'), text)


def test_a_text_that_is_too_long_is_cut_off_between_characters() -> None:
    _, told = decode(encode(OptionsSummary(), "ä€𝄞" * 1000))
    assert 490 < len(told.encode()) <= BLOCK_BYTES
    assert ("ä€𝄞" * 1000).startswith(told)


def test_a_text_that_utf_8_cannot_encode_is_sent_with_a_question_mark() -> None:
    assert decode(encode(OptionsSummary(), "bad \udc80 name"))[1] == "bad ? name"
