"""What travels between ranks, and what happens when a peer stops talking; and counts of changes."""

import tracemalloc

import pytest
import torch

from ddp_zero.core.state.frames import decode_frame, encode_frame, receive_frame, receive_tree, send_frame, send_tree
from ddp_zero.core.step.state_changes import StateChanges
from ddp_zero.values import flatten
from tests.unit.threads import meanwhile, pair

CPU = torch.device("cpu")


def test_a_frame_is_decoded_as_it_was_encoded() -> None:
    frame = {"piece": 3, "birth": [1, 2], "text": "é"}
    encoded = encode_frame(frame)
    assert decode_frame(encoded[8:]) == frame
    assert int.from_bytes(encoded[:8], "big") == len(encoded) - 8


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff\xff", b"null"])
def test_decode_frame_refuses_other_bytes(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expected a frame|Expecting|decode"):
        decode_frame(body)


def test_a_sent_tree_equals_the_received_one_with_its_strides() -> None:
    big = torch.randn(300, 1000)
    tree = {
        "step": torch.tensor(3.0),
        "big": big,
        "transposed": big[:20, :30].t().contiguous().t(),
        "slice": big[::2, ::3],
        "channels": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "bytes": {"codes": torch.arange(7, dtype=torch.int8), "shape": (7,)},
        "half": torch.randn(5).bfloat16(),
        "complex": torch.randn(5, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3),
        "number": float("nan"),
    }
    with pair() as (one, other):
        done = meanwhile(lambda: send_tree(one, {"piece": 1}, flatten(tree)))
        frame = receive_frame(other)
        found = receive_tree(other, frame, CPU)
        assert done() is None
        send_frame(one, {"end": 1})
        assert receive_frame(other) == {"end": 1}, "nothing is left on the connection"
    assert frame["piece"] == 1
    for key in ("big", "transposed", "channels"):
        assert found[key].stride() == tree[key].stride(), key  # type: ignore[attr-defined]
    for key in ("step", "big", "transposed", "slice", "channels", "half", "complex", "empty"):
        assert torch.equal(found[key], tree[key]), key  # type: ignore[arg-type]
    assert torch.equal(found["bytes"]["codes"], torch.arange(7, dtype=torch.int8))
    assert found["bytes"]["shape"] == (7,)


@pytest.mark.parametrize("sent", [b"", b"\0\0\0", (5).to_bytes(8, "big") + b"{}"])
def test_a_truncated_message_ends_in_an_error(sent: bytes) -> None:
    with pair() as (one, other):
        one.sendall(sent)
        one.close()
        with pytest.raises(EOFError, match="the end of the connection"):
            receive_frame(other)


def test_a_frame_of_absurd_length_is_refused_before_it_is_allocated() -> None:
    with pair() as (one, other):
        one.sendall((1 << 60).to_bytes(8, "big"))
        with pytest.raises(ValueError, match="Expected a frame of at most"):
            receive_frame(other)


def test_a_frame_takes_memory_only_as_its_bytes_arrive() -> None:
    with pair() as (one, other):
        one.sendall((1 << 30).to_bytes(8, "big") + b"{}")
        one.close()
        tracemalloc.start()
        with pytest.raises(EOFError):
            receive_frame(other)
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
        tracemalloc.stop()


def test_a_truncated_tensor_ends_in_an_error() -> None:
    with pair() as (one, other):
        text_and_elements = meanwhile(lambda: send_tree(one, {}, flatten([torch.ones(4)])))
        frame = receive_frame(other)
        text_and_elements()
        frame["tree"] = frame["tree"].replace("[4]", "[5]")
        one.close()
        with pytest.raises(EOFError):
            receive_tree(other, frame, CPU)


# Changes


def test_changes_are_counted_once_and_parts_belong_to_the_whole() -> None:
    changes = StateChanges(torch.optim.SGD([torch.zeros(1)]))
    changes.begin()
    changes.begin()
    with changes.changing([]):
        assert changes.begun == 1
    assert changes.is_under_way
    changes.end()
    assert not changes.is_under_way
    with pytest.raises(KeyError), changes.changing([]):
        raise KeyError(changes.is_under_way)
    assert (changes.begun, changes.is_under_way) == (2, False)
    changes.end()
    assert changes.begun == 2
    changes.wait_for_work()
