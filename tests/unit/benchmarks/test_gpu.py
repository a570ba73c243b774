"""The parts of benchmarks.gpu that need no device: modes, verdicts, the page."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from benchmarks.gpu import compare, contestants
from benchmarks.gpu.contestants import CLIPPED, MASTERS, OURS, REFERENCE
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.rank import OUT_OF_MEMORY

_GOOD = {"difference": 0.0, "same_when_late": True, "still": 0, "races": []}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_mode_must_equal_competes_too_and_before_it(dtype: torch.dtype) -> None:
    modes = contestants.modes(dtype, None)
    names = list(modes)
    assert all(names.index(mode.base) <= names.index(name) for name, mode in modes.items())
    assert contestants.select(modes, []) == names
    clipped_or_masters = {torch.float32: CLIPPED, torch.bfloat16: MASTERS}[dtype]
    part = clipped_or_masters.split(", ")[1]
    chosen = contestants.select(modes, [f"stage 2, interleaved, {part}"])
    assert chosen == [REFERENCE, clipped_or_masters, f"{OURS}stage 2, interleaved, {part}"]
    with pytest.raises(ValueError, match="got 'stage 3'"):
        contestants.select(modes, ["stage 3"])


@pytest.mark.parametrize(
    ("shown", "ranks", "found"),
    [
        ({}, 2, 0),
        ({"difference": 1e-9}, 2, 1),
        ({"difference": 1e-9}, 4, 0),
        ({"difference": 1e-2}, 4, 1),
        ({"difference": float("nan")}, 4, 1),
        ({"same_when_late": False}, 4, 1),
        ({"still": 3, "races": ["here"]}, 1, 2),
    ],
)
def test_what_is_wrong_with_a_mode_is_told(shown: dict[str, Any], ranks: int, found: int) -> None:
    assert len(compare.faults(f"{OURS}stage 2", {**_GOOD, **shown}, ranks, "fp32")) == found


def test_other_libraries_may_round_otherwise() -> None:
    assert not compare.faults("FSDP2", {**_GOOD, "difference": 1e-9}, 2, "fp32")


def test_sizes_are_what_their_names_say() -> None:
    for name, size in (("125m", 125e6), ("1b", 1e9), ("7b", 7e9)):
        with torch.device("meta"):
            model = MODELS[name].build()
        assert abs(sum(param.numel() for param in model.parameters()) / size - 1) < 0.03
        width = model.get_parameter("norm.weight").numel()
        assert width % int(model.get_submodule("blocks.0").heads) == 0  # type: ignore[arg-type]


def test_a_mode_without_memory_is_a_row_and_ratios_are_of_the_same_round() -> None:
    def one(seconds: float) -> dict[str, Any]:
        return {"seconds": seconds, "peak_bytes": 2**20, "state_bytes": 2**21, "parameters": 5, "syncs": ["a:1", "a:1"]}

    options = Namespace(batch_size=2, ranks=2, model="tiny", dtype="fp32", modes=[])
    measured: Any = {REFERENCE: [one(1.0), one(2.0)], "large": [one(1.0), None], "fast": [one(0.5), one(1.0)]}
    rows = compare.speed(options, measured).splitlines()
    assert rows[2] == f"| {REFERENCE} | 43 | 1.00 (1.00 to 1.00) | 1 | 2 | 2 x a:1 |"
    assert rows[3] == "| large | out of memory | - | - | - | - |"
    assert rows[4].startswith("| fast | 85 | 0.50 (0.50 to 0.50) |")
    measured[REFERENCE] = [None, None]
    assert "| fast | 85 | - |" in compare.speed(options, measured)


def test_only_a_lack_of_memory_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Namespace(batch_size=2, ranks=2, model="tiny", dtype="fp32", modes=[], steps=1, timeline=False)
    options.results, options.device = compare.RESULTS, "cuda"

    def fails(code: int) -> Any:
        def launch(*_: object) -> None:
            raise RuntimeError(f"Expected rank 1 to end well, got exit code {code}.")

        return launch

    monkeypatch.setattr(compare, "launch", fails(OUT_OF_MEMORY))
    assert compare.measure_one(options, REFERENCE, is_first=True) is None
    monkeypatch.setattr(compare, "launch", fails(1))
    with pytest.raises(RuntimeError, match="exit code 1"):
        compare.measure_one(options, REFERENCE, is_first=True)
