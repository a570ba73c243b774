"""``ddp-zero check``: versions, and features that work on this machine. Never initializes a process group.

Features are found by trying, not by version numbers. DDP's reducer is observed in one process, with torch's fake
process group: it sends nothing and is not registered.
"""

import inspect
import json
import platform
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward import (
    accumulating_node,
    after_the_reducer,
    put_reducer,
    rebuild_buckets,
    reducer_of,
    windows_in_bucket,
)
from ddp_zero.core.comm import all_gather_native, reduce_scatter_native
from ddp_zero.core.local import find_trim
from ddp_zero.core.state import open_port
from ddp_zero.core.step import calling_scaler, findings_of

FRAMEWORKS = ("transformers", "accelerate", "lightning")

RUN = {
    "torch": ("2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0"),
    "Python": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "system": ("Linux",),
}
"""Versions with which the tests, or their core, have passed; docs/status.md has the outcomes."""

COMBINATIONS = (("gloo", "cpu", True), ("gloo", "cuda", False), ("nccl", "cuda", False))
"""A backend, a device, and True if the tests have been run with them."""

_MARK = {True: "yes", False: "no", None: "?"}


# Probes


class NotTried(Exception):
    """A probe could not be made here, so its outcome is unknown."""


class Failed(Exception):
    """A probe was made, and its condition does not hold."""


@dataclass(frozen=True)
class Finding:
    """The outcome of a probe; ``works`` is None if it could not be tried."""

    name: str
    works: bool | None
    means: str
    detail: str = ""


@dataclass(frozen=True)
class Probe:
    """A feature to try, and the consequences for a user if it works or not.

    ``look`` returns a detail; it raises `NotTried` if it cannot try, and any other exception if the feature fails.
    """

    name: str
    look: Callable[[], str]
    if_works: str
    if_not: str

    def run(self) -> Finding:
        """Try it. Raises nothing."""
        try:
            return Finding(self.name, True, self.if_works, self.look())
        except NotTried as error:
            return Finding(self.name, None, "not known; the first step shows it", str(error))
        except Failed as error:
            return Finding(self.name, False, self.if_not, str(error))
        except Exception as error:  # whatever an unknown version of torch raises is a finding
            return Finding(self.name, False, self.if_not, f"{type(error).__name__}: {error}")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise Failed(problem)


# DDP's reducer


class _Observed:
    """A one-rank DDP model; records DDP's arguments to its hook."""

    def __init__(self) -> None:
        module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 2))
        try:
            group = _group_of_one()
            self.ddp = DistributedDataParallel(module, process_group=group, gradient_as_bucket_view=True)
        except Exception as error:
            raise NotTried(f"no DDP model without a process group: {type(error).__name__}: {error}") from error
        self.buffer = torch.empty(0)
        self.params: list[Tensor] = []
        self.views: dict[Tensor, Tensor] = {}
        self.published: list[bool] = []  # at the end of backward, True if gradients are the values in the future
        self.ddp.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))  # DDP would judge an annotation

    def backward(self) -> None:
        for param in self.ddp.parameters():
            param.grad = None
        self.ddp(torch.ones(1, 3)).sum().backward()

    def _reduce(self, bucket: Any) -> "torch.futures.Future[Tensor]":
        self.buffer, self.params = bucket.buffer(), bucket.parameters()
        self.views = {param: param.grad for param in self.params if param.grad is not None}
        doubled = self.buffer * 2
        windows = windows_in_bucket(self.params)

        def compare() -> None:
            pairs = [(param.grad, windows[param].view(doubled)) for param in self.params]
            self.published.append(all(grad is not None and torch.equal(grad, value) for grad, value in pairs))

        after_the_reducer(compare)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(doubled)
        return future


def _group_of_one() -> dist.ProcessGroup:
    """A process group of one rank, registered nowhere, whose collectives do nothing."""
    fake = import_module("torch.testing._internal.distributed.fake_pg")  # not there in every build
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group = dist.ProcessGroup(HashStore(), 0, 1)
    group._set_default_backend(kind)
    build = getattr(fake.FakeProcessGroup, "_create_internal", fake.FakeProcessGroup)  # torch 2.8 has the constructor
    group._register_backend(torch.device("cpu"), kind, build(0, 1))
    return group


def _end_of_backward() -> str:
    observed = _Observed()
    observed.backward()
    _require(observed.published == [True], f"gradients were published at {observed.published}, not once at the end")
    return "gradients are in place when it runs"


def _gradient_views() -> str:
    observed = _Observed()
    observed.backward()
    storage = observed.buffer.untyped_storage().data_ptr()
    shared = sum(view.untyped_storage().data_ptr() == storage for view in observed.views.values())
    _require(shared == len(observed.params) > 0, f"{shared} of {len(observed.params)} gradients lie in their bucket")
    return f"{shared} of {len(observed.params)} gradients lie in their bucket"


class _Listening:
    """In the place of DDP's reducer: notes which passes DDP wants to be reduced."""

    def __init__(self, own: Any) -> None:
        self.own, self.prepared = own, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def prepare_for_backward(self, _: list[Tensor]) -> None:
        self.prepared += 1


def _reducer_of_ours() -> str:
    observed = _Observed()
    listening = _Listening(reducer_of(observed.ddp))
    put_reducer(observed.ddp, listening)
    arrived: list[bool] = []
    params = list(observed.ddp.parameters())
    nodes = [accumulating_node(param) for param in params]
    for node, param in zip(nodes, params, strict=True):
        node.register_hook(lambda *_, param=param: arrived.append(param.grad is not None))
    with observed.ddp.no_sync():
        observed.backward()
    _require(listening.prepared == 0, "a pass in no_sync() was to be reduced")
    observed.backward()
    _require(listening.prepared == 1, f"DDP has asked {listening.prepared} times for the reduction of a pass")
    _require(not observed.params, "DDP's own reducer has reduced a pass that it was not prepared for")
    _require(arrived == [True] * 2 * len(params), f"of {len(params)} gradients in two passes {arrived} arrived")
    return "DDP tells it which passes to reduce"


def _rebuild() -> str:
    observed = _Observed()
    observed.backward()
    _require(bool(rebuild_buckets(observed.ddp)), "DDP kept its buckets")
    return "new buckets"


# Everything else


def _native() -> str:
    try:
        group = _group_of_one()
    except Exception as error:
        raise NotTried(f"{type(error).__name__}: {error}") from error
    whole, part = torch.zeros(2), torch.zeros(2)
    for collective in (all_gather_native, reduce_scatter_native):
        collective(whole, part, group=group, async_op=True).wait()
    return f"{all_gather_native.__name__}, {reduce_scatter_native.__name__}"


def _returned_memory() -> str:
    _require(find_trim() is not None, "the C library has no malloc_trim")
    return "malloc_trim"


def _port() -> str:
    with open_port():
        return "a port was opened and closed"


class _Scaled(torch.optim.SGD):
    """Notes the scaler that steps it, and tells it that a gradient was not finite."""

    _step_supports_amp_scaling = True

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(1))])
        self.caller: object = None

    def step(self, closure: Any = None) -> Any:
        pass

    @property
    def found_inf(self) -> None:
        """As `ddp_zero.parallel.ParallelOptimizer` learns of a scaler."""

    @found_inf.setter
    def found_inf(self, _: Tensor) -> None:
        self.caller = scaler = calling_scaler()
        if scaler is not None:
            for found in findings_of(scaler, self).values():
                found.fill_(1.0)

    @found_inf.deleter
    def found_inf(self) -> None:
        pass


def _grad_scaler() -> str:
    optimizer, scaler = _Scaled(), torch.amp.GradScaler("cpu", init_scale=8.0, backoff_factor=0.5)
    scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
    scaler.step(optimizer)
    _require(optimizer.caller is scaler, f"the optimizer found {type(optimizer.caller).__name__} among its callers")
    scaler.update()
    _require(scaler.get_scale() == 4.0, f"the scale became {scaler.get_scale():g}, not 4")
    return "a scaler was found, and told to lower its scale"


def _flattened_mesh() -> str:
    _require(hasattr(DeviceMesh, "_flatten"), "DeviceMesh has no _flatten")
    return "DeviceMesh._flatten"


def _shadowed_runs() -> str:
    try:
        schedules = import_module("torch.distributed.pipelining.schedules")
        base = import_module("torch.distributed.pipelining.stage")._PipelineStageBase
    except ImportError as error:  # of NumPy, say
        raise NotTried(f"{type(error).__name__}: {error}") from error
    reducer = dist.Reducer  # type: ignore[attr-defined]
    needed = {
        DistributedDataParallel: ("_match_all_reduce_for_bwd_pass", "_match_unused_params_allreduce"),
        reducer: ("_rebuild_buckets", "_push_all_rebuilt_params"),
        base: ("clear_runtime_states", "has_backward"),
    }
    lacks = [
        f"{one.__name__} has no {name}" for one, names in needed.items() for name in names if not hasattr(one, name)
    ]
    _require(not lacks, "; ".join(lacks))
    for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        order = ("has_backward =", "clear_runtime_states()", "_step_microbatches(")
        text = inspect.getsource(kind.step)
        places = [text.find(one) for one in order]
        _require(
            -1 not in places and places == sorted(places), f"{kind.__name__}.step does not do these in order: {order}"
        )
    return "stages are cleared before they communicate"


PROBES = (
    Probe(
        "callbacks at the end of backward",
        _end_of_backward,
        "steps inside backward can wait for DDP's reducer",
        "use stage 1 standalone (no overlap): steps inside backward cannot be trusted",
    ),
    Probe(
        "gradients as views of buckets",
        _gradient_views,
        "gradients are used without a copy",
        "stage 1 copies gradients into buckets and out of them",
    ),
    Probe(
        "a reducer in the place of DDP's",
        _reducer_of_ours,
        "stage 2 reduces gradients in buckets of the plan",
        "use stage 1: stage 2 cannot know which backward passes to reduce",
    ),
    Probe(
        "rebuilding buckets on request",
        _rebuild,
        "from the second step on, stage 1 steps inside backward",
        "use stage 1 standalone (no overlap): the first iteration inside backward may fail",
    ),
    Probe(
        "native collectives",
        _native,
        "on NCCL equal segments travel by them (never run)",
        "on NCCL segments travel one by one",
    ),
    Probe(
        "returning freed memory",
        _returned_memory,
        "what stage 2 frees once goes back to the system",
        "what stage 2 frees once may go on counting as this process's memory",
    ),
    Probe(
        "listening for other ranks",
        _port,
        "opt.state_dict() works on one rank alone, where a firewall lets ranks connect",
        "call opt.consolidate_state_dict() before opt.state_dict(), or use ddp_zero.checkpoint",
    ),
    Probe(
        "findings of torch.amp.GradScaler",
        _grad_scaler,
        "ranks with other parts of a model skip a step together, under GradScaler too",
        "with ParallelOptimizer use loss_scale= in place of GradScaler",
    ),
    Probe(
        "a group over several mesh dimensions",
        _flattened_mesh,
        "data_parallel_dim= may name several dimensions",
        "pass data_parallel_group= where several dimensions of a mesh are data-parallel",
    ),
    Probe(
        "runs of pipeline schedules",
        _shadowed_runs,
        "under Join pipelines may have different numbers of batches",
        "give every pipeline the same number of batches: Join cannot follow schedules",
    ),
)


# The report


def backends() -> Mapping[str, bool]:
    return {name: bool(dist.is_backend_available(name)) for name in ("gloo", "nccl", "xccl", "ucc", "mpi")}


def devices() -> Mapping[str, int]:
    """The number of devices by type; the CPU is one."""
    found = {"cpu": 1}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        found[accelerator.type] = torch.accelerator.device_count()
    return found


def as_text(found: Mapping[str, Any]) -> str:
    lines = [f"{name} {version or 'not installed'}" for name, version in found["versions"].items()]
    lines += ["", "backends: " + ", ".join(f"{name} {_MARK[here]}" for name, here in found["backends"].items())]
    lines += ["devices: " + ", ".join(f"{name} ({count})" for name, count in found["devices"].items())]
    lines += ["", "What this torch and this machine can do:"]
    lines += ["  {:3} {name}: {means} [{detail}]".format(_MARK[one["works"]], **one) for one in found["findings"]]
    lines += ["", "What the tests of ddp_zero have been run with:"]
    for one in found["combinations"]:
        here = "here" if one["is_here"] else "not here"
        lines.append(f"  {_MARK[one['was_run']]:3} {one['backend']} on {one['device']} ({here})")
    lines += [f"  no  {difference}" for difference in found["not_run"]]
    works = "ddp_zero can work here." if found["works"] else f"ddp_zero cannot work here. {found['problem']}"
    return "\n".join([*lines, "", works])


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def problem_of(available: Mapping[str, bool]) -> str | None:
    """The reason why the library cannot work with these backends; None if it can."""
    if available["gloo"] or available["nccl"]:
        return None
    return (
        "This PyTorch is built with neither Gloo nor NCCL: its process groups cannot send tensors. "
        "Install a build that has one of them."
    )


def differences(versions: Mapping[str, str | None]) -> list[str]:
    return [
        f"{name} {versions[name]} (run: {', '.join(run)})"
        for name, run in RUN.items()
        if not any(_is_of(str(versions[name]), release) for release in run)
    ]


def _is_of(version: str, release: str) -> bool:
    """True for this release, or a build of it: 2.13.0+cpu is of 2.13.0, and 3.11.4 of 3.11."""
    return version == release or version.startswith((f"{release}.", f"{release}+", f"{release} "))


def report(version: str, probes: Sequence[Probe] = PROBES) -> dict[str, Any]:
    """Examine this machine, for JSON. Initializes no process group and imports no framework."""
    versions = {
        "ddp_zero": version,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{name: version_of(name) for name in FRAMEWORKS},
    }
    available, present = backends(), devices()
    problem = problem_of(available)
    return {
        "works": problem is None,
        "versions": versions,
        "backends": available,
        "devices": present,
        "findings": [asdict(probe.run()) for probe in probes],
        "combinations": [
            dict(backend=backend, device=device, is_here=available[backend] and device in present, was_run=was_run)
            for backend, device, was_run in COMBINATIONS
        ],
        "not_run": differences(versions),
        "problem": problem,
    }


def main(options: Namespace) -> int:
    """``ddp-zero check [--json]``. Returns 0 if the library can work here, else 1."""
    found = report(version_of("ddp_zero") or "not installed")
    print(json.dumps(found, indent=2) if options.json else as_text(found))
    return 0 if found["works"] else 1
