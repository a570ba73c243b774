"""Tests whether torch and this machine behave as the core requires, whatever their version numbers.

DDP's reducer is observed in one process, with torch's fake process group, which sends nothing.
"""

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.comm.exchange import all_gather_native, reduce_scatter_native
from ddp_zero.core.comm.requests import Listener, Request
from ddp_zero.core.ddp.reducer import (
    accumulating_node,
    after_the_reducer,
    put_reducer,
    rebuild_buckets,
    reducer_of,
    windows_in_bucket,
)
from ddp_zero.core.local.memory import find_trim
from ddp_zero.core.step.decision import calling_scaler


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

    ``test`` returns a detail; it raises `NotTried` if it cannot try, and any other exception if the feature fails.
    """

    name: str
    test: Callable[[], str]
    if_works: str
    if_not: str

    def run(self) -> Finding:
        """Try it. Raises nothing."""
        try:
            return Finding(self.name, True, self.if_works, self.test())
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


class _ObservedDDP:
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
    observed = _ObservedDDP()
    observed.backward()
    _require(observed.published == [True], f"gradients were published at {observed.published}, not once at the end")
    return "gradients are in place when it runs"


def _gradient_views() -> str:
    observed = _ObservedDDP()
    observed.backward()
    storage = observed.buffer.untyped_storage().data_ptr()
    shared = sum(view.untyped_storage().data_ptr() == storage for view in observed.views.values())
    _require(shared == len(observed.params) > 0, f"{shared} of {len(observed.params)} gradients lie in their bucket")
    return f"{shared} of {len(observed.params)} gradients lie in their bucket"


class _ReducerStandIn:
    """Stands in for DDP's reducer, and counts the passes that DDP wants to be reduced."""

    def __init__(self, own: Any) -> None:
        self.own, self.prepared = own, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def prepare_for_backward(self, _: list[Tensor]) -> None:
        self.prepared += 1


def _reducer_of_ours() -> str:
    observed = _ObservedDDP()
    listening = _ReducerStandIn(reducer_of(observed.ddp))
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
    observed = _ObservedDDP()
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


_SECONDS = 10.0


class _Answers:
    def answer(self, request: Request) -> None:
        request.answer({"connection": "here"})
        with request.connection(_SECONDS) as connection:
            connection.sendall(memoryview(b"1"))


def _question() -> str:
    listener = Listener(HashStore())
    answers = _Answers()
    _, key = listener.ask(listener.register(answers), {})
    with listener.connection_to(key, _SECONDS) as connection:
        connection.recv_into(memoryview(bytearray(1)))
    return "a Gloo group of two was built and dropped"


class _Scaled(torch.optim.SGD):
    """An optimizer that finds the scaler that steps it, and tells the scaler that a gradient was not finite."""

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
        if (calling := calling_scaler(self)) is not None:
            self.caller, findings = calling
            for found in findings.values():
                found.fill_(1.0)

    @found_inf.deleter
    def found_inf(self) -> None:
        pass


def _grad_scaler() -> str:
    optimizer = _Scaled()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, backoff_factor=0.5)
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
        "on NCCL equal segments travel by them (run with one rank)",
        "on NCCL segments travel one by one",
    ),
    Probe(
        "returning freed memory",
        _returned_memory,
        "what stage 2 frees once goes back to the system",
        "what stage 2 frees once may go on counting as this process's memory",
    ),
    Probe(
        "asking another rank",
        _question,
        "opt.state_dict() works on one rank alone, where ranks can connect by Gloo",
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


def probe() -> list[dict[str, Any]]:
    """The findings of all probes, as plain values."""
    return [asdict(each.run()) for each in PROBES]
