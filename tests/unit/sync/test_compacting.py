"""State dicts whose tensors bring only their own bytes along."""

import copy
import io
from collections import OrderedDict, namedtuple
from typing import Any

import torch
from torch import nn

from ddp_zero import compact

Pair = namedtuple("Pair", "one other")  # such as users have


def written(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return file.tell()


def test_only_windows_are_copied_with_strides_and_aliases() -> None:
    storage = torch.arange(100000.0)
    own = torch.arange(3.0)
    window = storage[10:16].view(2, 3)
    turned, spread = storage[20:26].view(2, 3).t(), storage[30:32].expand(4, 2)
    tree: dict[Any, Any] = {
        "window": window,
        "again": [window, storage[10:16].view(2, 3)],
        "turned": (turned, {"spread": spread}),
        "pair": Pair(own, storage[5]),
        "empty": storage[:0],
        "own": own,
        "number": 3,
        7: "text",
    }
    before = copy.deepcopy(tree)
    found = compact(tree)
    assert list(found) == list(tree)
    assert found["own"] is own
    assert found["pair"].one is own
    assert tree["window"] is window
    assert found["window"] is found["again"][0] is found["again"][1]
    for name, ours in {"window": window, "pair": storage[5], "empty": storage[:0]}.items():
        one = found[name].other if name == "pair" else found[name]
        assert torch.equal(one, ours), name
        assert one.stride() == ours.stride(), name
        assert one.untyped_storage().nbytes() == ours.numel() * 4, name
    assert torch.equal(found["turned"][0], turned)
    assert found["turned"][0].stride() == turned.stride()
    assert torch.equal(found["turned"][1]["spread"], spread)
    assert found["turned"][1]["spread"].untyped_storage().nbytes() == 8
    assert written(found) < 6000 < written(tree)
    storage.zero_()
    assert torch.equal(found["window"], before["window"]), "a copy"


def test_attributes_and_kinds_are_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    state = model.state_dict()
    found = compact(state)
    assert type(found) is OrderedDict
    assert found is not state
    assert found._metadata == state._metadata  # type: ignore[attr-defined]
    assert all(found[name] is state[name] for name in state), "nothing is a window here"
    model.load_state_dict(found)
    whole = nn.Parameter(torch.arange(10.0))
    part = nn.Parameter(whole.detach()[2:4], requires_grad=False)
    given = {"part": part, "sparse": torch.eye(3).to_sparse(), "meta": torch.empty(4, device="meta")[1:]}
    same = compact(given)
    assert type(same["part"]) is nn.Parameter
    assert not same["part"].requires_grad
    assert same["part"].untyped_storage().nbytes() == 8
    assert same["sparse"] is given["sparse"]
    assert same["meta"] is given["meta"]
    twisted = torch.randn(8, dtype=torch.complex64)[2:5].conj()
    assert torch.equal(compact([twisted])[0], twisted)
    bits = torch.randn(8, dtype=torch.complex64)[2:5].conj().imag
    assert torch.equal(compact([bits])[0], bits)
    for value in (None, "text", 3):
        assert compact(value) is value
