"""Memory per rank before anything is allocated: parts, modes, the fewest ranks, the command line."""

import math
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adafactor, AdamW, Muon

from ddp_zero import estimate
from ddp_zero.__main__ import main
from ddp_zero.tools.estimate import Estimates

MIB = 1 << 20
BUFFERS = 2 * 8 + 2
"""For buckets of 8 MiB, of two layers each: one being filled, one being reduced, and 2 MiB that a ring receives."""


def tower(layers: int = 8, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Layers of 4 MiB in fp32, without memory."""
    with torch.device("meta"):
        return nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(layers)]).to(dtype)


def parts(found: Estimates, mode: str) -> dict[str, float]:
    return {part: nbytes / MIB for part, nbytes in found[mode].device.items()}


def test_each_mode_has_its_parts_in_bytes() -> None:
    found = estimate(tower(), AdamW, ranks=4, partition="parameters", device="cpu", bucket_cap_mb=8)
    rest = {"parameters": 32.0, "gradient under way": 4.0}
    assert [one.mode for one in found] == [
        "DDP",
        "stage 1",
        "stage 1, inside backward",
        "stage 2, inside backward",
        "stage 2, after backward",
    ]
    assert parts(found, "DDP") == {**rest, "state": 64.0, "gradients": 32.0}
    assert parts(found, "stage 1") == {**rest, "state": 16.0, "gradients": 32.0}
    assert parts(found, "stage 2, inside backward") == {**rest, "state": 16.0, "buckets": BUFFERS}
    assert parts(found, "stage 2, after backward") == {**rest, "state": 16.0, "buckets": BUFFERS, "gradients": 8.0}


def test_without_views_and_flat_storage_buckets_and_syncs_are_counted() -> None:
    found = estimate(
        tower(), AdamW, ranks=4, device="cpu", gradient_as_bucket_view=False, parameters_as_bucket_view=False
    )
    assert parts(found, "DDP")["buckets"] == 32.0
    assert "sync" not in parts(found, "DDP")
    assert parts(found, "stage 1")["sync"] == 32.0, "two buckets"


def test_an_accelerator_counts_copies_for_gathers_of_whole_parameters() -> None:
    """Of 8 layers on two ranks 4 each, which do not lie end to end; cut ones do."""
    found = estimate(tower(), AdamW, ranks=2, bucket_cap_mb=8)
    rest = {"parameters": 32.0, "gradient under way": 4.0, "state": 32.0}
    assert parts(found, "stage 2, inside backward") == {**rest, "buckets": 16.0, "sync": 16.0}
    assert parts(found, "stage 2, inside backward, cut") == {**rest, "buckets": 16.0}


def test_offload_counts_state_and_masters_on_the_host() -> None:
    to_host = estimate(tower(), AdamW, ranks=4, stage=2, offload="cpu", partition="parameters")
    one = to_host["stage 2, inside backward, offload cpu"]
    assert "state" not in one.device
    assert {part: nbytes / MIB for part, nbytes in one.host.items()} == {
        **{"masters": 0.0, "copies": 8.0, "state": 16.0, "pinned": 3 * 2 * 8.0}
    }
    assert not to_host["stage 2, inside backward"].host
    on_the_cpu = estimate(tower(), AdamW, ranks=4, stage=2, offload="cpu", device="cpu")
    assert not on_the_cpu["stage 2, inside backward, offload cpu"].host, "it is there already"


def test_state_bytes_are_those_of_the_optimizer_class() -> None:
    momentum: dict[str, Any] = {"momentum": 0.9}
    for kind, options, nbytes in (
        (SGD, {}, 0),
        (SGD, momentum, 8 * MIB),
        (Adafactor, {}, 2 * 2 * 4096),
        (Muon, {}, 8 * MIB),
    ):
        found = estimate(tower(2), kind, ranks=1, stage=0, device="cpu", lr=0.1, **options)
        assert found[0].device.get("state", 0) == nbytes, kind


def test_modes_that_cut_are_left_out_for_classes_that_need_whole_parameters() -> None:
    assert not any("cut" in one.mode for one in estimate(tower(2), Adafactor, ranks=2, device="cpu"))
    names = [one.mode for one in estimate(tower(2), AdamW, ranks=2, device="cpu")]
    assert [name for name in names if "cut" in name] == [f"{name}, cut" for name in names if f"{name}, cut" in names]
    assert len(names) == 9


def test_the_state_of_a_cut_parameter_is_one_nth() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 1024, bias=False), nn.Linear(1024, 8, bias=False))
    found = estimate(model, AdamW, ranks=8, stage=1, device="cpu")
    assert found["stage 1"].device["state"] == 2 * 16 * MIB
    assert found["stage 1, cut"].device["state"] == pytest.approx(2 * 16 * MIB / 8, rel=0.01)


def test_frozen_parameters_have_no_state_and_buffers_of_the_model_count() -> None:
    model = tower(4)
    for param in list(model.parameters())[:2]:
        param.requires_grad_(False)
    model.register_buffer("table", torch.empty(MIB, device="meta"))
    found = estimate(model, AdamW, ranks=1, stage=0, device="cpu")
    assert parts(found, "DDP") == {
        **{"parameters": 16.0, "state": 16.0, "gradients": 8.0, "gradient under way": 4.0, "buffers of the model": 4.0}
    }


def test_fewest_ranks_is_computed_from_what_is_shared() -> None:
    found = estimate(tower(64), AdamW, ranks=2, partition="elements", device="cpu", bucket_cap_mb=4)
    fewest = found.fewest_ranks(401 * MIB)
    assert fewest["DDP"] is None
    assert fewest["stage 1, cut"] is None
    needed = 256 + 2 * 4 + 2 + 4  # parameters, buckets, received around a ring, a gradient under way
    assert fewest["stage 2, inside backward, cut"] == math.ceil(512 / (401 - needed))
    assert fewest["stage 2, after backward, cut"] == math.ceil(768 / (401 - needed))


def test_64_ranks_share_two_parameters_and_no_parameters_need_nothing() -> None:
    assert estimate(tower(2), AdamW, ranks=64, device="cpu")["stage 1"].device["state"] == 8 * MIB
    empty = estimate(nn.Identity(), AdamW, ranks=2)
    assert [one.total for one in empty] == [0] * len(empty)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"ranks": 0}, ValueError, "at least 1 rank, got 0"),
        ({"ranks": 2.0}, TypeError, r"ranks to be an int, got 2\.0"),
        ({"stage": 3}, ValueError, "stage 0, 1, 2 or None, got 3"),
        ({"partition": "rows"}, ValueError, "'parameters' or 'elements', got 'rows'"),
        ({"offload": "disk"}, ValueError, "'cpu' or None, got 'disk'"),
        ({"model": [1]}, TypeError, "Expected a module, got list"),
        ({"optimizer_class": torch.optim.LBFGS}, NotImplementedError, "LBFGS"),
        ({"momentum": 1.0}, TypeError, "momentum"),
    ],
)
def test_wrong_arguments_are_refused(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"model": tower(1), "optimizer_class": AdamW, "ranks": 2}
    with pytest.raises(kind, match=message):
        estimate(**given | change)


def test_an_unknown_name_of_a_mode_is_refused() -> None:
    found = estimate(tower(1), AdamW, ranks=2, stage=1)
    with pytest.raises(KeyError, match=r"Expected one of the modes.*got 'stage 3'"):
        found["stage 3"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_table_marks_the_mode_that_needs_least_and_explains_its_columns(device: str) -> None:
    model = tower(dtype=torch.bfloat16)
    model.register_buffer("table", torch.empty(MIB, device="meta"))
    found = estimate(
        model,
        AdamW,
        ranks=4,
        device=device,
        offload="cpu",
        master_weights=True,
        gradient_as_bucket_view=False,
        parameters_as_bucket_view=False,
    )
    table, _, below = str(found).partition("\n\n")
    head, _, *rows = table.splitlines()
    assert found.recommended is min((one for one in found if "offload" not in one.mode), key=lambda one: one.total)
    (marked,) = (row for row in rows if "(recommended)" in row)
    assert marked.startswith(f"| {found.recommended.mode} (recommended) |")
    parts = {part.removesuffix(" (host)") for part in head.strip("| ").split(" | ")[1:]} - {"total"}
    assert {line.partition(":")[0] for line in below.splitlines()} > parts
    assert estimate(tower(64), AdamW, ranks=4).recommended.mode == "stage 2, inside backward"


def test_the_command_prints_the_table_and_the_fewest_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    options = ["--ranks", "4", "--memory", "0.1GiB", "--dtype", "bfloat16", "--device", "cpu"]
    assert main(["estimate", "tests.unit.tools.test_estimate:tower", *options]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert "| MiB per rank, 4 ranks | parameters | state | gradients |" in printed.out
    assert "| DDP | 16.0 | 32.0 | 16.0 |" in printed.out
    assert "fewest ranks at which 0.1GiB suffice:\nDDP: 1\nstage 1: 1\n" in printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tests"], "Expected MODULE:FUNCTION, got 'tests'"),
        (["json:dumps"], "dumps"),
        (["builtins:dict"], "Expected builtins:dict to return a module, got dict"),
        (["torch.nn:Identity", "--optimizer", "Adamm"], "a class in torch.optim, got 'Adamm'"),
        (["torch.nn:Identity", "--memory", "80"], "an amount of memory such as 80GiB"),
    ],
)
def test_the_command_fails_with_the_message_for_wrong_arguments(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["estimate", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_state_of_two_optimizer_classes_is_estimated_for_each() -> None:
    def by_class(name: str, param: Any) -> dict[str, Any] | None:
        return {"optimizer_class": torch.optim.Muon, "lr": 0.02} if param.ndim == 2 and name.startswith("1") else None

    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(1024, 256), nn.Linear(256, 1024, bias=False))
    whole = estimate(model, AdamW, ranks=1, stage=0, device="cpu", params=by_class, lr=1e-3)
    assert whole["DDP"].device["state"] == 2 * MIB + MIB  # both moments; a momentum
    found = estimate(model, AdamW, ranks=2, stage=1, device="cpu", params=by_class, cost="bytes")
    assert [one.mode for one in found if "cut" in one.mode]
    assert found["stage 1"].device["state"] == 2 * MIB
