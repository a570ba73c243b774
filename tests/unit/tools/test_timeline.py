"""From the events of a trace to the bars of a picture, on made-up times."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ddp_zero.tools.timeline import Range, iterations_in, main, minus, ranges_of, read_trace, union


def event(name: str, begin: float, end: float, **more: Any) -> dict[str, Any]:
    """Of a trace; milliseconds."""
    return {"ph": "X", "name": name, "ts": begin * 1e3, "dur": (end - begin) * 1e3, "cat": "user_annotation", **more}


def step_at(start: float) -> list[dict[str, Any]]:
    """An interleaved step of two buckets that takes 20 ms."""
    labels = [
        ("reduce (bucket 0)", 8, 8.5),
        ("reduce (bucket 1)", 12, 12.5),
        ("wait_reduce (bucket 0)", 12.5, 13),
        ("local_step (bucket 0)", 13, 14),
        ("sync (bucket 0)", 14, 14.25),
        ("wait_reduce (bucket 1)", 14.5, 16),
        ("local_step (bucket 1)", 16, 17),
        ("sync (bucket 1)", 17, 17.25),
        ("wait_sync (bucket 0)", 17.5, 18),
        ("wait_sync (bucket 1)", 18, 19.5),
        ("wait_errors", 19.5, 20),
    ]
    return [
        event("DistributedDataParallel.forward", start, start + 4),
        event("autograd::engine::evaluate_function: MmBackward0", start + 5, start + 7),
        event("autograd::engine::evaluate_function: AccumulateGrad", start + 7.1, start + 12.5),
        event("aten::mm", start + 5, start + 7, cat="cpu_op"),
        event("ddp_zero::wait_sync (bucket 0)", start, start + 90, cat="gpu_user_annotation"),
        *(event(f"ddp_zero::{name}", start + begin, start + end) for name, begin, end in labels),
    ]


TRACE = [{"ph": "M", "name": "process_name"}, *step_at(100), *step_at(130)]


def test_steps_are_told_apart_and_what_is_in_flight_ends_with_its_wait() -> None:
    first, second = iterations_in(ranges_of(TRACE, "made up"))
    assert (first.begin, first.end) == (100, 120)
    assert (second.begin, second.end) == (130, 150)
    assert first.buckets == [0, 1]
    bars = {(bar.what, bar.bucket): (bar.begin - 130, bar.end - 130) for bar in second.bars}
    assert bars["reduce", 0] == (8, 13)
    assert bars["reduce", 1] == (12, 16)
    assert bars["sync", 0] == (14, 18)
    assert bars["sync", 1] == (17, 19.5)
    assert bars["local_step", 1] == (16, 17)
    assert bars["wait_sync", 1] == (18, 19.5)


def test_what_is_exposed_is_the_time_of_waits_and_compute_has_none_of_it() -> None:
    step = iterations_in(ranges_of(TRACE, "made up"))[0]
    assert step.exposed_ms() == pytest.approx(0.5 + 1.5 + 0.5 + 1.5 + 0.5)
    assert step.in_flight_ms() == pytest.approx(19.5 - 8)
    compute = [(one.what, one.begin - 100, one.end - 100) for one in step.compute]
    assert compute == [
        ("forward", 0, 4),
        ("backward", 5, 8),
        ("backward", 8.5, 12),
    ]
    assert "step of 20.0 ms, 2 buckets" in step.summary()
    assert "exposed 4.5 ms (22% of the step)" in step.summary()


def test_a_sync_that_outlasts_its_step_ends_in_the_next_one() -> None:
    late = [one for one in step_at(0) if "wait_sync" not in one["name"]]
    late += [event("ddp_zero::wait_sync (bucket 1)", 21, 23), *(step_at(20.5)[:4])]
    step = iterations_in(ranges_of(late, "made up"))[0]
    assert [(bar.begin, bar.end) for bar in step.bars if bar.what == "sync" and bar.bucket == 1] == [(17, 23)]
    assert not [one for one in step.exposed if one.begin >= 20], "that is not this step's"


def test_a_step_without_a_hook_has_no_reductions() -> None:
    names = ("local_step", "sync", "wait_sync")
    labels = [event(f"ddp_zero::{name} (bucket 0)", 10 + at, 11 + at) for at, name in enumerate(names)]
    backward = event("autograd::engine::evaluate_function: X", 2, 9)
    (step,) = iterations_in(ranges_of([backward, *labels], "made up"))
    assert (step.begin, step.end) == (2, 13)
    assert [bar.what for bar in step.bars] == ["sync", "local_step", "wait_sync"]


def test_unions_and_differences_of_time() -> None:
    ranges = [Range("a", 5, 6), Range("a", 0, 2), Range("a", 1, 3), Range("a", 3.5, 4)]
    assert [(one.begin, one.end) for one in union(ranges, "b")] == [(0, 3), (3.5, 4), (5, 6)]
    assert [(one.begin, one.end) for one in union(ranges, "b", apart=1)] == [(0, 6)]
    left = minus([Range("a", 0, 10)], [Range("x", -1, 1), Range("x", 3, 4), Range("x", 9, 12)])
    assert [(one.begin, one.end) for one in left] == [(1, 3), (4, 9)]
    assert minus([Range("a", 1, 2)], [Range("x", 0, 3)]) == []


def test_the_command_writes_a_picture_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    trace = tmp_path / "trace.json.gz"
    trace.write_bytes(gzip.compress(json.dumps({"traceEvents": TRACE}).encode()))
    assert main([str(trace), "--step", "0", "--title", "made up"]) == 0
    assert "trace.png: step of 20.0 ms" in capsys.readouterr().out
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")
    assert main([str(trace), "-o", str(tmp_path / "a.svg")]) == 0
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert main([str(trace), "--step", "2"]) == 1
    assert "Expected a step from 0 to 1" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X", "ts": 1}]}'])
def test_what_is_no_trace_of_this_library_is_refused(
    content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(content)
    with pytest.raises(ValueError, match=r"(Expected|No) .* in .*trace\.json(, got|\.)"):
        read_trace(trace)
    assert main([str(trace)]) == 1
    assert "[ZERO-908]" in capsys.readouterr().err
