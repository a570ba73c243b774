"""The parts of benchmarks.race that need no ranks: modes, formula, table, what a link runs and removes."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import front
from benchmarks.race import compare, contestants, launch, link, plots, report
from benchmarks.race.contestants import CLIPPED, MODES, REFERENCE, TORCHS, Sizes
from benchmarks.race.models import MODELS

# Modes


def test_a_filter_takes_modes_that_have_it_and_extra_ones_only_if_no_other_has() -> None:
    assert contestants.select(["stage 2, interleaved"], is_large=False) == [REFERENCE, "ddp_zero stage 2, interleaved"]
    assert contestants.select(["overlapped", "torch Z"], is_large=False) == [
        REFERENCE,
        "torch ZeroRedundancyOptimizer",
        TORCHS,
        "ddp_zero stage 1, overlapped",
    ]
    clipped = contestants.select(["clipped"], is_large=False)
    assert REFERENCE in clipped
    assert CLIPPED in clipped
    assert len(clipped) == 4
    with pytest.raises(ValueError, match=r"got 'stage 3'\. There are: DDP"):
        contestants.select(["stage 3"], is_large=False)


def test_without_a_filter_modes_are_those_that_are_not_extra_and_of_a_large_model_fewer() -> None:
    usual = contestants.select([], is_large=False)
    assert usual[0] == REFERENCE
    assert not any(MODES[name].is_extra for name in usual)
    fewer = contestants.select([], is_large=True)
    assert fewer == [name for name in usual if name in contestants.FEWER]
    assert len(fewer) == len(contestants.FEWER)


def test_packages_that_are_not_installed_do_not_compete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contestants, "find_spec", lambda name: None if name == "fairscale" else object())
    names = contestants.select([], is_large=False)
    assert "FairScale OSS" not in names
    assert "DeepSpeed ZeRO-2" in names


# Memory by formula

_SIZES = Sizes(parameters=1000, state=800, largest_bucket=70, largest_block=30, activations=5)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (REFERENCE, 1000 + 800 + 2000 + 5),
        (TORCHS, 1000 + 800 + 1000 + 5),
        ("ddp_zero stage 1, overlapped", 1000 + 800 + 1000 + 5),
        ("ddp_zero stage 2, interleaved", 1000 + 800 + 3 * 70 + 5),
        ("ddp_zero stage 2, last bucket", 1000 + 800 + 3 * 70 + 400 + 5),
        ("FSDP2, no reshard after forward", 1000 + 800 + 2 * 400 + 2 * 30 + 5),
        ("DeepSpeed ZeRO-2", None),
    ],
)
def test_the_formula_adds_up_what_a_mode_keeps(name: str, expected: int | None) -> None:
    assert MODES[name].formula(_SIZES) == expected


def test_the_modes_of_the_large_model_fit_two_ranks_with_23_gib() -> None:
    nbytes = compare.parameter_bytes("87m")
    assert 4 * 80e6 < nbytes < 4 * 90e6
    assert compare.estimate(contestants.FEWER, nbytes, ranks=2) < 16 * 2**30
    assert compare.estimate([REFERENCE], nbytes, ranks=2) == 2 * 5 * nbytes


def test_the_model_of_many_tensors_has_2000() -> None:
    import torch

    with torch.device("meta"):
        assert len(list(MODELS["many"].build().parameters())) == 2000


def test_peaks_and_formula_are_those_of_each_rank() -> None:
    found = _found()
    rank = {"peak": 40 * 2**20, "peak_whole_run": 41 * 2**20, "state": 8 * 2**20}
    alone = {"peak": 9 * 2**20, "peak_whole_run": 9 * 2**20, "state": 0}
    compare.add_memory(found, {contestants.ALONE_NAME: [alone, alone], REFERENCE: [rank, rank], TORCHS: [rank, rank]})
    assert found["activation_bytes"] == [2**20, 2**20]
    assert found["modes"][REFERENCE]["peak_bytes_whole_run"] == [41 * 2**20] * 2
    assert found["modes"][REFERENCE]["formula_bytes"] == [(4 + 8 + 8 + 1) * 2**20] * 2
    compare.add_memory(found, {})
    assert found["modes"][TORCHS]["formula_bytes"] == []


# Table


def _found() -> dict[str, Any]:
    model = {"name": "tiny", "parameters": 2**20, "parameter_bytes": 2**22, "tensors": 2}
    model |= {"bucket_bytes": [2**21, 2**21], "block_bytes": [2**22]}
    memory: dict[str, Any] = {"peak_bytes": [], "peak_bytes_whole_run": [], "formula_bytes": []}
    base = {"seconds": [1.0, 2.0, 4.0], "sent_bytes": [2**22, 2**22], "difference": 0.0, **memory}
    torchs = {"seconds": [2.0, 2.0, 2.0], "sent_bytes": [2**22, 6291456], "difference": 0.00012, **memory}
    torchs |= {"peak_bytes": [2**20, 2**21], "peak_bytes_whole_run": [2**22, 2**21], "formula_bytes": [2**20, 2**20]}
    return {"model": model, "ranks": 2, "link": None, "modes": {REFERENCE: base, TORCHS: torchs}}


def test_ratios_are_of_the_same_round() -> None:
    assert report.quartiles_of_ratio([2.0, 2.0, 2.0], [1.0, 2.0, 4.0]) == [0.75, 1.0, 1.5]


def test_the_bound_is_twice_what_a_rank_does_not_own() -> None:
    assert report.lower_bound(2, 1000) == 1000
    assert report.lower_bound(4, 1000) == 1500


def test_a_row_has_the_median_the_ratios_and_the_rank_that_needs_most() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.table(_found()).splitlines()]
    assert {len(row) for row in rows} == {10}
    assert rows[2] == [REFERENCE, "2000", "1.00 (1.00 to 1.00)", "1.00 (0.75 to 1.50)", "4.19", "1.00", *"---", "0.0"]
    assert rows[3][1:3] == ["2000", "1.00 (0.75 to 1.50)"]
    assert rows[3][4:] == ["6.29", "1.50", "2", "4", "1", "0.00012"]


def test_ratios_to_a_mode_that_did_not_run_are_left_out() -> None:
    found = _found()
    del found["modes"][TORCHS]
    assert report.row(REFERENCE, found)[3] == report.NOTHING


def test_a_picture_is_drawn_with_and_without_memory(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = _found()
    for mode in found["modes"].values():
        mode["peak_bytes"] = mode["formula_bytes"] = [2**20]
    plots.draw(tmp_path / "with.png", found)
    for mode in found["modes"].values():
        mode["peak_bytes"] = []
    plots.draw(tmp_path / "without.png", found)
    assert (tmp_path / "with.png").stat().st_size > (tmp_path / "without.png").stat().st_size > 0


def test_what_is_written_can_be_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {"facts": ["one fact"], **_found()}
    options = Namespace(
        model="tiny",
        ranks=2,
        link="1gbit",
        keep_malloc=False,
        nodes=1,
        modes=["stage 2, Last"],
        results=tmp_path / "new",
    )
    for mode in found["modes"].values():
        mode["peak_bytes"] = mode["formula_bytes"] = [2**20]
    compare.write(options, found)
    stem = tmp_path / "new" / "compare-tiny-2ranks-1gbit-stage-2-last"
    assert json.loads(stem.with_suffix(".json").read_text()) == found
    assert stem.with_suffix(".md").read_text().strip() == capsys.readouterr().out.strip()


def test_names_of_files_tell_filters_and_stay_short() -> None:
    def stem(*modes: str) -> str:
        return compare.stem_of(
            Namespace(model="26m", ranks=4, link="1gbit", keep_malloc=False, nodes=1, modes=list(modes))
        )

    assert stem() == "compare-26m-4ranks-1gbit"
    assert stem("8 MiB") == "compare-26m-4ranks-1gbit-8-mib"
    assert len(stem("n" * 18)) == 43
    long = [
        stem("n" * 19),
        stem("n" * 20),
        stem("bucket views", "FSDP2", "stage 2"),
        stem("bucket views", "FSDP2", "stage 1"),
    ]
    assert len({*long}) == 4
    assert all(re.fullmatch("compare-26m-4ranks-1gbit-modes-[0-9a-f]{8}", one) for one in long)


# Ranks

_RANK = """
import json, os, sys, time
folder, rank = sys.argv[1], int(sys.argv[2])
job = json.load(open(f"{folder}/job.json"))
if rank == job["fails"]:
    sys.exit(3)
if job["fails"] is not None:
    time.sleep(60)
json.dump([rank, job["ranks"], os.environ["GREETING"]], open(f"{folder}/found-{rank}.json", "w"))
"""


def test_ranks_get_the_job_and_the_environment(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(_RANK)
    program = [str(tmp_path / "rank.py")]
    found = launch.run_ranks({"fails": None}, [[], ["env", "GREETING=hello"]], {"GREETING": "good day"}, program)
    assert found == [[0, 2, "good day"], [1, 2, "hello"]]


def test_ranks_find_the_package_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank.py").write_text(f"import benchmarks.race{_RANK}")
    program = [str(tmp_path / "rank.py")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert launch.run_ranks({"fails": None}, [[]], {"GREETING": "hello"}, program) == [[0, 1, "hello"]]


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(_RANK)
    program = [str(tmp_path / "rank.py")]
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=r"Expected rank 1 to end well, got exit code 3\."):
        launch.run_ranks({"fails": 1}, [[], []], {"GREETING": ""}, program)
    assert time.monotonic() - begin < 30


# Link


class _Machine:
    """Runs nothing, but keeps the namespaces that there would be; fails at a command of one's choice."""

    def __init__(
        self, fails_at: str = "never", error: type[BaseException] = OSError, there: Sequence[str] = ()
    ) -> None:
        self.fails_at, self.error, self.namespaces = fails_at, error, list(there)
        self.log: list[str] = []

    def __call__(self, command: Sequence[str]) -> str:
        line = " ".join(command)
        self.log.append(line)
        if self.fails_at in line:
            raise self.error(f"no: {line}")
        if line.startswith("ip netns add"):
            self.namespaces.append(command[-1])
        if line.startswith("ip netns delete"):
            self.namespaces.remove(command[-1])
        return "\n".join(f"{name} (id: 1)" for name in self.namespaces) if line == "ip netns list" else ""


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: tool)


def test_a_link_shapes_both_ends_of_every_rank_and_leaves_nothing() -> None:
    machine = _Machine(there=["somebody-elses"])
    with link.Link(3, "1gbit", machine, os.getpid()) as inside:
        assert len(machine.namespaces) == 5
        assert inside.prefix(2) == ["ip", "netns", "exec", inside.ranks[2]]
        for rank, name in enumerate(inside.ranks):
            assert f"ip -n {name} address add 10.77.0.{rank + 1}/16 dev lan" in machine.log
            shaped = [line for line in machine.log if line.startswith(f"tc -n {name} qdisc add dev lan root tbf")]
            shaped += [line for line in machine.log if f"-n {inside.hub} qdisc add dev port{rank} root tbf" in line]
            assert [" rate 1gbit " in line for line in shaped] == [True, True]
    assert machine.namespaces == ["somebody-elses"]


def test_ranks_of_a_node_share_a_link_to_the_others_of_a_tenth_of_the_rate() -> None:
    machine = _Machine()
    with link.Link(4, "1gbit", machine, os.getpid(), nodes=2) as inside:
        assert len(machine.namespaces) == 7
        first, second = inside.nodes
        homes = [
            next(node for node in inside.nodes if f"ip -n {node} link set port{rank} master bridge" in machine.log)
            for rank in range(4)
        ]
        assert homes == [first, first, second, second]
        assert not any("port0" in line and inside.hub in line for line in machine.log)
        for node in inside.nodes:
            (line,) = [one for one in machine.log if one.startswith(f"tc -n {node} qdisc add dev uplink")]
            assert " rate 100mbit " in line
        assert sum(" rate 1gbit " in line for line in machine.log) == 2 * 4
        assert sum(" rate 100mbit " in line for line in machine.log) == 2 * 2
    assert machine.namespaces == []


def test_bytes_from_a_node_are_those_of_its_link() -> None:
    shown = '[{"ifname": "uplink", "stats64": {"rx": {"bytes": 1}, "tx": {"bytes": 42}}}]'
    assert link.bytes_from_node("some-node", lambda command: shown if "some-node" in command else "") == 42


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("fails_at", ["netns add", "rank1 link set lo", "qdisc"])
def test_a_failure_while_a_link_is_made_leaves_nothing(fails_at: str, error: type[BaseException]) -> None:
    machine = _Machine(fails_at, error)
    expected = link.Unavailable if error is OSError else error
    with pytest.raises(expected, match="no: "), link.Link(2, "100mbit", machine, os.getpid()):
        pass
    assert machine.namespaces == []


def test_a_failure_inside_a_link_leaves_nothing() -> None:
    machine = _Machine()
    with pytest.raises(ZeroDivisionError), link.Link(2, "100mbit", machine, os.getpid()):
        raise ZeroDivisionError
    assert machine.namespaces == []


def test_what_dead_processes_left_is_removed_and_what_live_ones_have_is_not() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine = link.identity(os.getpid())
    reused = f"ddpzero-{os.getpid()}-1-hub"
    machine = _Machine(there=[f"ddpzero-{ended.pid}-77-hub", f"ddpzero-{mine}-rank9", reused, "ddpzero-x", "other"])
    with link.Link(2, "1gbit", machine, os.getpid()):
        pass
    assert machine.namespaces == [f"ddpzero-{mine}-rank9", "ddpzero-x", "other"]


def test_without_the_tools_there_is_no_link_and_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    machine = _Machine()
    with pytest.raises(link.Unavailable, match="no ip and no tc"), link.Link(2, "1gbit", machine, os.getpid()):
        pass
    assert machine.log == []


def test_the_front_picture_draws_all_modes_of_this_library_in_its_colour() -> None:
    assert [mode.startswith("ddp_zero") for mode in front.SHOWN] == [
        name.startswith(plots.OURS) for name in front.SHOWN.values()
    ]
    assert sum(name.startswith(plots.OURS) for name in front.SHOWN.values()) == 3
