"""The one file that relies on internals of DDP's reducer and of autograd's engine.

The callers depend on these facts, measured on torch 2.13.0:

1. DDP calls the hook once per bucket, in index order, from the thread that runs backward, when each of the bucket's
   parameters has been marked ready. With ``gradient_as_bucket_view=True``, ``param.grad`` *is* the reducer's view of
   the bucket from then on, if the parameter got a gradient.
2. A tensor hook runs before the gradient is accumulated, also for a gradient that is undefined (with None), but not for
   a parameter that is not in the graph.
3. The reducer queues the publication of averages for the end of backward after the hook for the last bucket has
   returned, and the engine runs callbacks in the order in which they were queued, so a callback queued by a callback
   runs after the reducer.
4. Under `torch.distributed.algorithms.Join` a joined rank has no backward; DDP calls the hook with zeros of its own.
5. DDP rebuilds its buckets once, before the forward pass that follows the first reduced backward pass (in a static
   graph the second); never if it looks for unused parameters. It can be made to do so as soon as that backward pass is
   over (`rebuild_buckets`).
6. Callbacks that are queued for the end of a backward pass are dropped, uncalled, when an exception has ended it:
   before the caller of ``backward()`` sees the exception.
7. The reducer does nothing in passes that nobody has prepared it for, and may be without memory meanwhile; see
   `planned_reducer.py`.
"""

import gc
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed import BuiltinCommHookType, GradBucket, Logger, Reducer  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.local.compiler import never_compiled
from ddp_zero.values.placeholders import not_awaiting_params
from ddp_zero.values.shapes import Part, layout_of


def in_backward() -> bool:
    """True if this thread runs a backward pass."""
    return torch._C._current_graph_task_id() != NO_BACKWARD


def backward_id() -> int:
    """A number for the backward pass that this thread runs; a different one inside a reentrant checkpoint."""
    return torch._C._current_graph_task_id()


def backward_ids() -> Callable[[], int]:
    """`backward_id` without a call of Python, for hooks that ask once per parameter."""
    return torch._C._current_graph_task_id


NO_BACKWARD = -1
"""`backward_id` outside."""
_DDP_MIB = (1, 25)
"""DDP's own sizes of the first bucket and of all others."""


def accumulator_of(param: Tensor) -> Node | None:
    """The node that accumulates a parameter's gradient, on which DDP waits; None for a tensor of a class of its own.

    A parameter gets a new one if its ``data`` changes dtype or device, and DDP goes on to wait on the old one.
    """
    # not for a subclass, such as a distributed tensor: its dispatch may communicate
    return get_gradient_edge(param).node if type(param) in (nn.Parameter, Tensor) else None


def is_finalized(ddp: DistributedDataParallel) -> bool:
    """True if DDP has ended the last backward pass that it reduces: every parameter has its average."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError:
        return False
    return True


def after_the_reducer(callback: Callable[[], None]) -> None:
    """Call back at the end of this backward pass, when the reducer has published the gradients."""
    queue = torch.autograd.Variable._execution_engine.queue_callback
    # a callback queued now runs before the reducer's finalizer, which is queued after this hook returns
    queue(never_compiled(lambda: queue(callback)))


def at_end_of_backward(callback: Callable[[], object], if_interrupted: Callable[[], object]) -> None:
    """Call back at the end of this backward pass, before the reducer if its last bucket is not full yet.

    Args:
        callback: called then.
        if_interrupted: called instead once an exception has ended the pass, before the caller of backward sees it.
    """
    end = _EndOfPass(callback)
    torch.autograd.Variable._execution_engine.queue_callback(end)
    end.if_interrupted = if_interrupted


class _EndOfPass:
    """A callback that only the engine holds: an exception ends the pass, and drops it uncalled."""

    __slots__ = ("_callback", "if_interrupted")

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback: Callable[[], object] = callback
        self.if_interrupted: Callable[[], object] | None = None

    @never_compiled
    def __call__(self) -> None:
        self.if_interrupted = None
        self._callback()

    def __del__(self) -> None:
        if self.if_interrupted is not None:
            self.if_interrupted()


def will_reduce(ddp: DistributedDataParallel) -> bool:
    """True if a backward pass that starts now is meant to be reduced: it is not under ``no_sync()``."""
    return ddp.require_backward_grad_sync


def set_will_reduce(ddp: DistributedDataParallel, reduces: bool) -> bool:
    """Set whether passes that start from now on are meant to be reduced; returns the setting before."""
    before = will_reduce(ddp)
    ddp.require_backward_grad_sync = reduces
    return before


def prepare_reduction(ddp: DistributedDataParallel, loss: Tensor) -> None:
    """Have DDP reduce the next backward pass, though its forward pass was under ``no_sync()`` or has had one already.

    Pipeline schedules of torch do the same.
    """
    ddp.reducer.prepare_for_backward([loss] if finds_unused(ddp) else [])


def has_static_graph(ddp: DistributedDataParallel) -> bool:
    """True if the user has promised that every iteration uses the same parameters."""
    return bool(ddp.static_graph)


def finds_unused(ddp: DistributedDataParallel) -> bool:
    """True if any iteration may leave parameters unused, which only the reducer knows; the first layout is final."""
    return bool(ddp.find_unused_parameters and not ddp.static_graph)


def gradients_are_views(ddp: DistributedDataParallel) -> bool:
    """True if ``param.grad`` is the reducer's view of its bucket."""
    return bool(ddp.gradient_as_bucket_view)


def reduced_parameters(ddp: DistributedDataParallel) -> list[tuple[str, Tensor]]:
    """The parameters that DDP puts into buckets, with their names.

    DDP compares the names to ignore with the name of a module, a dot and the name of a parameter: for parameters
    of the root module that is a leading dot. A parameter in several places is ignored only if it is in all of them.
    """
    return [(name, param) for param, name in _names_to_reduce(ddp).items() if param.requires_grad]


def _names_to_reduce(ddp: DistributedDataParallel) -> dict[Tensor, str]:
    names: dict[Tensor, str] = {}
    for module_name, module in ddp.module.named_modules():
        for name, param in module.named_parameters(recurse=False):
            if f"{module_name}.{name}" not in ddp.parameters_to_ignore:
                names.setdefault(param, f"{module_name}.{name}".removeprefix("."))
    return names


def in_buckets(ddp: DistributedDataParallel) -> list[tuple[str, Tensor]]:
    """The parameters that DDP was built to reduce, with their names, also if they were frozen since.

    Not those that were frozen when the model was wrapped, even if they train now: `reduced_parameters` would name them.
    """
    names = _names_to_reduce(ddp)
    if len(names) == count_reduced(ddp):
        return [(name, param) for param, name in names.items()]
    try:
        params = [param for bucket in _buckets_of(ddp) for param in bucket.parameters()]
    except RuntimeError:  # of a bucket for sparse gradients, which has no memory
        return reduced_parameters(ddp)
    return [(names[param], param) for param in params if param in names]


def in_order_of_reducer(ddp: DistributedDataParallel) -> list[Tensor]:
    """The parameters of `in_buckets` in the order of `ready_times`."""
    reduced = {param for _, param in in_buckets(ddp)}
    return [param for param in _names_to_reduce(ddp) if param in reduced]


def ready_times(ddp: DistributedDataParallel) -> list[int]:
    """The time at which DDP last took each parameter to be ready for reduction, in nanoseconds of its own clock."""
    return list(ddp.reducer.get_backward_stats())


def localized_parameters(ddp: DistributedDataParallel) -> list[str]:
    """Names of the parameters that ``DDP(model, device_mesh=...)`` has put in the place of distributed tensors.

    The first forward pass takes them out of their modules, for good (torch 2.13.0); DDP still reduces them.
    """
    return [name for name, param in ddp.module.named_parameters() if hasattr(param, "_st_info")]


def count_reduced(ddp: DistributedDataParallel) -> int:
    """The number of parameters that DDP puts into buckets: they were trainable when the model was wrapped."""
    return int(ddp._get_ddp_logging_data()["num_parameter_tensors"])


@dataclass(frozen=True)
class Window:
    """The place of a parameter's gradient in a 1-D tensor.

    It has the parameter's strides of when the layout is made. If they change (``model.to(memory_format=...)``), stage 2
    makes other layouts before the next pass; DDP's own bucket keeps the old ones.

    Attributes:
        shape, stride: see `layout_of`.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, param: Tensor, offset: int, part: Part = None) -> "Window":
        """The place of a part of a parameter that begins at an offset, laid out as DDP does."""
        return cls(offset, tuple(param.shape), param.stride()).of_part(part)

    def of_part(self, part: Part) -> "Window":
        """The place of a part of the gradient."""
        first, shape, stride = layout_of(self.shape, self.stride, part)
        return Window(self.offset + first, shape, stride)

    def view(self, flat: Tensor) -> Tensor:
        """That part of a 1-D contiguous tensor."""
        return flat.as_strided(self.shape, self.stride, int(flat.storage_offset()) + self.offset)


def windows_in_bucket(params: Sequence[Tensor]) -> dict[Tensor, Window]:
    """The places of a bucket's parameters in DDP's memory: end to end."""
    starts = accumulate((param.numel() for param in params), initial=0)
    return {param: Window.of(param, start) for param, start in zip(params, starts, strict=False)}


def rebuild_buckets(ddp: DistributedDataParallel) -> list[list[Tensor]]:
    """Have DDP rebuild its buckets after a backward pass instead of in its next forward pass. A collective.

    Gradients stay where they are. Not to be called under Join, or in the hook: the reducer is locked there.

    Returns:
        The parameters of each new bucket, or none if DDP keeps the buckets that it has.
    """
    with _no_gradients(ddp):
        # a collective: ranks agree on the order of gradients; every rank calls it after the same backward pass
        if not ddp.reducer._rebuild_buckets():
            return []
    return [one.parameters() for one in _buckets_of(ddp)]


def params_of_buckets(ddp: DistributedDataParallel, count: int) -> set[Tensor]:
    """The parameters of DDP's first buckets."""
    return {param for bucket in (_buckets_of(ddp)[:count] if count else ()) for param in bucket.parameters()}


def _buckets_of(ddp: DistributedDataParallel) -> list[GradBucket]:
    with _no_zeros()():
        # would allocate zeros as large as all gradients at once
        built: list[GradBucket] = ddp.reducer._get_zeros_like_grad_buckets()
    return built


@contextmanager
def _no_gradients(ddp: DistributedDataParallel) -> Iterator[None]:
    params = list(ddp.module.parameters())
    with not_awaiting_params():
        # or the reducer would copy them into its new buckets, of which no memory may be there
        grads = [param.grad for param in params]
        for param in params:
            param.grad = None
        try:
            yield
        finally:
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad


@cache
def _no_zeros() -> Callable[[], Any]:
    """A context that hands out the tensor itself where zeros like it are asked for."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class NoZeros(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if func is torch.ops.aten.zeros_like.default else func(*args, **(kwargs or {}))

    return NoZeros


# A reducer in the place of DDP's own


def reducer_of(ddp: DistributedDataParallel) -> Any:
    """The reducer that DDP talks to."""
    return ddp.reducer


def reduces_itself(ddp: DistributedDataParallel) -> bool:
    """True if DDP talks to its own reducer."""
    return isinstance(ddp.reducer, Reducer)


def landed_gradients(ddp: DistributedDataParallel) -> set[Tensor]:
    """Parameters whose gradients have left ``param.grad`` in a pass that is being reduced."""
    landed = getattr(ddp.reducer, "landed", set)
    found: set[Tensor] = landed()
    return found


def put_reducer(ddp: DistributedDataParallel, reducer: Any) -> None:
    """Have DDP talk to this reducer from now on."""
    ddp.reducer._reset_state()  # or one that a forward pass has prepared would reduce the next backward pass
    ddp.reducer = reducer
    ask_again(ddp)


def replace_reducer(ddp: DistributedDataParallel, reducer: Any) -> None:
    """As `put_reducer`, and release DDP's own, which lives, with its memory, as long as anything else refers to it."""
    if gradients_are_views(ddp):
        memory = {storage.data_ptr() for storage in bucket_memory(ddp)}
        with not_awaiting_params():
            for _, param in in_buckets(ddp):
                grad = param.grad
                # also of a model that has not run: DDP's constructor moves gradients that are there into its buckets
                if grad is not None and grad.layout is torch.strided and grad.untyped_storage().data_ptr() in memory:
                    param.grad = grad.clone()
    put_reducer(ddp, reducer)
    ddp.logger = _FrozenLogger(ddp.logger)


def give_back_reducer(ddp: DistributedDataParallel, own: "weakref.ref[Any]", params: Sequence[Tensor]) -> None:
    """Have DDP talk to a reducer of its own again: the one that it had, if anything has kept it, or a new one.

    Args:
        ddp: the model.
        own: DDP's own reducer.
        params: those that DDP was built to reduce.
    """
    if (kept := own()) is not None:
        put_reducer(ddp, kept)
        del ddp._comm_hooks[1:]  # it knows the first only
        return
    _build_reducer(ddp, params)
    ddp._comm_hooks.clear()
    if ddp.static_graph:
        asks = _LearnsInReducedPass(params)
        asks.ask(ddp)  # the forward pass may have begun
        ddp.register_forward_pre_hook(asks)


def _build_reducer(ddp: DistributedDataParallel, params: Sequence[Tensor]) -> None:
    """Give DDP a new reducer of its own for the parameters that it was built to reduce."""
    names = _names_to_reduce(ddp)
    with trainable_for_now(params):  # as when the model was wrapped
        # not those that were frozen then, even if they train now
        found = [
            one
            for one in zip(*ddp._build_params_for_reducer(), strict=True)
            if any(one[0] is param for param in params)
        ]
        reduced = [param for param, _ in found]
        labels = {place: names[param] for place, param in enumerate(reduced)}
        ddp._ddp_init_helper(reduced, [is_sparse for _, is_sparse in found], labels, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        assert ddp.logger is not None, "of the new reducer"
        ddp.logger._set_static_graph()


def _renew_reducer(ddp: DistributedDataParallel, params: Sequence[Tensor]) -> None:
    """As `_build_reducer`, with the communication hook that DDP's reducer has."""
    hooks = ddp._comm_hooks
    built_in = built_in_hook(ddp)
    ddp._comm_hooks = []
    try:
        _build_reducer(ddp, params)
        if hooks:
            hook, state = hooks[0]  # the reducer knows the first only
            ddp.register_comm_hook(state, hook)
        elif built_in is not None:
            ddp._register_builtin_comm_hook(built_in)
    finally:
        ddp._comm_hooks = hooks


class _LearnsInReducedPass:
    """A hook by which DDP's reducer learns a static graph in the first pass that is reduced, and in none before.

    The reducer counts backward passes in ``no_sync()``, too, and learns in its first alone: after such passes a new
    reducer takes its place.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._params = params
        self._is_done = self._holds_back = False

    def ask(self, ddp: DistributedDataParallel) -> None:
        """Have the pass ask that begins now, if it is reduced."""
        holds_back = not will_reduce(ddp)
        if self._holds_back and not holds_back and reduces_itself(ddp):
            _renew_reducer(ddp, self._params)  # after an error the next pass tries again
        self._holds_back = ddp._static_graph_delay_allreduce_enqueued = holds_back

    @never_compiled
    def __call__(self, ddp: DistributedDataParallel, _: Any) -> None:
        if self._is_done or not torch.is_grad_enabled():
            return
        self._is_done = bool(ddp._static_graph_delay_allreduce_enqueued) and not self._holds_back  # DDP has asked
        if not self._is_done:
            self.ask(ddp)


class _FrozenLogger:
    """Stands in for DDP's logger, which would keep DDP's reducer alive, with the record so far."""

    def __init__(self, logger: Any) -> None:
        self._data = logger._get_ddp_logging_data()

    def _set_comm_hook_name(self, name: str) -> None:
        self._data.strs_map = {**self._data.strs_map, "comm_hook": name}

    def _get_ddp_logging_data(self) -> Any:
        return self._data

    def __getattr__(self, name: str) -> Any:
        if hasattr(Logger, name):
            return _does_nothing
        raise AttributeError(name)


def _does_nothing(*_: object) -> None:
    pass


def of_a_reducer_at_rest(name: str) -> Any:
    """A method of DDP's reducer that it no longer has: it does nothing; AttributeError if no reducer has such."""
    if hasattr(Reducer, name):
        return _does_nothing
    raise AttributeError(name)


def ask_again(ddp: DistributedDataParallel) -> None:
    """Have DDP ask for the reduction of the first pass of a static graph, in which its reducer learns the graph."""
    ddp._static_graph_delay_allreduce_enqueued = False


def bucket_memory(ddp: DistributedDataParallel) -> list[torch.UntypedStorage]:
    """The memory of the reducer's buckets; none of a reducer for sparse gradients."""
    try:
        return [bucket.buffer().untyped_storage() for bucket in _buckets_of(ddp)]
    except RuntimeError:
        return []


def registered_hook(ddp: DistributedDataParallel, place: int) -> tuple[Callable[[Any, Any], Any], Any]:
    """One of the communication hooks of a model, and its state."""
    hook, state = ddp._comm_hooks[place]
    return hook, state


def registered_hooks(ddp: DistributedDataParallel) -> list[Callable[[Any, Any], Any]]:
    """All communication hooks of a model, in the order of their registration."""
    return [hook for hook, _ in ddp._comm_hooks]


def built_in_hook(ddp: DistributedDataParallel) -> BuiltinCommHookType | None:
    """The hook of DDP's own, in C++, that was registered last; it is in no list, only DDP's record names it."""
    name = ddp._get_ddp_logging_data().get("comm_hook")
    return next((kind for kind in BuiltinCommHookType.__members__.values() if str(kind) == name), None)


def keep_hooks_in(ddp: DistributedDataParallel, kind: type[list[Any]]) -> None:
    """Have a model keep its communication hooks, with their states, in a list of this kind, which hears of new ones."""
    if type(ddp._comm_hooks) is not kind:
        ddp._comm_hooks = kind(ddp._comm_hooks)


def last_hook(ddp: DistributedDataParallel) -> int:
    """The place of the communication hook that was registered last."""
    return len(ddp._comm_hooks) - 1


def add_hook(ddp: DistributedDataParallel, hook: Callable[[Any, Any], Any]) -> None:
    """Register a further communication hook; DDP's own reducer takes one only, and does not know it."""
    ddp._comm_hooks += [(hook, None)]


def bucket_caps(ddp: DistributedDataParallel) -> list[int] | None:
    """The bytes at which the user wants buckets closed, the last for all further ones; None: not asked for."""
    caps = list(getattr(ddp, "bucket_bytes_cap_list", None) or ())
    if caps:
        return caps
    return None if ddp.bucket_bytes_cap_default else [ddp.bucket_bytes_cap]


def accumulating_node(param: Tensor) -> Node:
    """The node that accumulates a parameter's gradient, of whatever type the parameter is."""
    with not_awaiting_params():
        return get_gradient_edge(param).node


def will_run(node: Node) -> bool:
    """True if the backward pass that this thread runs accumulates the gradient of this node."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # a pass of `torch.autograd.grad` with respect to it
        return False


@contextmanager
def trainable_for_now(params: Iterable[Tensor]) -> Iterator[None]:
    """Frozen parameters are trainable within the context: torch registers no hook on them else."""
    frozen = [param for param in params if not param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    try:
        yield
    finally:
        for param in frozen:
            param.requires_grad_(False)


def place_of_bucket(ddp: DistributedDataParallel, bucket: GradBucket, before: Sequence[int]) -> tuple[int, bool]:
    """A bucket's index, and whether it is the last one, in the first backward pass of a static graph.

    There DDP numbers every bucket 0 and marks none as the last, if there are several (torch 2.13).

    Args:
        ddp: the model.
        bucket: the argument of a DDP hook.
        before: the number of parameters in each earlier bucket of this pass.
    """
    return len(before), sum(before) + len(bucket.parameters()) == len(reduced_parameters(ddp))


def watch_iterations_under_join(ddp: DistributedDataParallel, watch: Callable[[bool], object]) -> Callable[[], None]:
    """Call a function in each iteration under Join, where it may communicate as DDP does, and may raise.

    Ranks that train call it before the forward pass of the module, and ranks that have joined before they shadow the
    backward pass: both right after the message by which DDP tells joined ranks whether it will reduce.

    Args:
        ddp: the model.
        watch: the function; its argument is True on a rank that has joined.

    Returns:
        A function that ends it.
    """
    # a model must not be kept alive by what it calls
    reference = weakref.ref(ddp)

    @never_compiled
    def tell(is_joined_rank: bool) -> Any:
        model = reference()
        assert model is not None, "it calls this"
        reduces = type(model)._check_global_requires_backward_grad_sync(model, is_joined_rank)
        # after DDP's own message, which is in flight on ranks that train: the same order on every rank of the group
        watch(is_joined_rank)
        return reduces

    def stop() -> None:
        model = reference()
        if model is not None:
            vars(model).pop("_check_global_requires_backward_grad_sync", None)

    # on the instance, which both paths call: Join shadows DDP's collectives before it gets to the optimizer's hook
    vars(ddp)["_check_global_requires_backward_grad_sync"] = tell
    return stop


_due_after_shadows: WeakKeyDictionary[DistributedDataParallel, list[Callable[[], object]]] = WeakKeyDictionary()
"""Of models in a `Join`: what ranks that have joined do after DDP's part of a backward pass."""


def after_the_shadow(ddp: DistributedDataParallel, callback: Callable[[], object]) -> None:
    """As `after_the_reducer`, on a rank that has joined, if `watch_shadows_under_join` is on."""
    if ddp in _due_after_shadows:
        _due_after_shadows[ddp].append(callback)


def watch_shadows_under_join(ddp: DistributedDataParallel) -> Callable[[], None]:
    """Call back those that have asked `after_the_shadow`, in their order; returns a function that ends it.

    Ranks that train do so inside backward, before any optimizer steps. Join's hook of an optimizer would be too late:
    another one may be listed, and shadowed, before it.
    """
    # a model must not be kept alive by what it calls
    reference = weakref.ref(ddp)
    name = "_match_unused_params_allreduce" if ddp.find_unused_parameters else "_match_all_reduce_for_bwd_pass"

    def shadow() -> None:
        model = reference()
        assert model is not None, "it calls this"
        getattr(type(model), name)(model)
        while due:
            due.pop(0)()

    def stop() -> None:
        model = reference()
        if model is not None and _due_after_shadows.get(model) is due:  # not a later call's
            del _due_after_shadows[model], vars(model)[name]

    due = _due_after_shadows[ddp] = []
    vars(ddp)[name] = shadow  # on the instance, which DDP's hook for Join calls
    return stop


def rebuild_before_forward(ddp: DistributedDataParallel) -> None:
    """On a rank that has joined: build DDP's final buckets, if they are due. A collective, as in a forward pass."""
    ddp.reducer._rebuild_buckets()


def reduce_zeros(ddp: DistributedDataParallel) -> None:
    """On a rank that has joined: take part in the reductions of a backward pass, with zeros. A collective.

    DDP's own part of Join does the same, in passes of which it learns in a forward pass.
    """
    ddp._match_all_reduce_for_bwd_pass()
    if ddp.find_unused_parameters:
        ddp._match_unused_params_allreduce()
    ddp.reducer._push_all_rebuilt_params()


def sends_buffers(ddp: DistributedDataParallel) -> bool:
    """True if forward passes send the buffers of the first rank to all."""
    return bool(ddp.broadcast_buffers and ddp.modules_buffers)


def follows_join(ddp: DistributedDataParallel) -> bool:
    """True if a model is in the list of an active `Join`, or of one that has ended (torch 2.13.0)."""
    return bool(ddp._join_config.enable)


def latest_join(ddp: DistributedDataParallel) -> object:
    """An object for the `Join` that has listed a model last."""
    return ddp._join_config


def missing_for_models() -> list[str]:
    """Parts of torch that are read of any DDP model, and that this version lacks, in words."""
    return [
        *_lacking("DDP", DistributedDataParallel, ["_get_ddp_logging_data"]),
        *_lacking("DDP's reducer", Reducer, ["_check_reducer_finalized"]),
        *_lacking("torch._C", torch._C, ["_current_graph_task_id"]),
    ]


def missing_for_hooks(partitions: bool) -> list[str]:
    """The same for a communication hook, of stage 2 if it partitions; `engine.probes` tries the rest."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    missing = [
        *missing_for_models(),
        *_lacking("DDP", DistributedDataParallel, ["register_comm_hook", "_check_global_requires_backward_grad_sync"]),
        *_lacking("DDP's reducer", Reducer, ["_rebuild_buckets", "_get_zeros_like_grad_buckets"]),
        *_lacking("autograd's engine", engine, ["queue_callback"]),
    ]
    if partitions:
        missing += _lacking("DDP's reducer", Reducer, ["_reset_state"])
        missing += _lacking("torch._C", torch._C, ["_will_engine_execute_node"])
    try:
        _no_zeros()
    except ImportError as error:
        missing.append(str(error))
    return missing


def _lacking(words: str, owner: object, names: Iterable[str]) -> list[str]:
    return [f"{words} has no {name}" for name in names if not hasattr(owner, name)]


def ddp_takes(option: str) -> bool:
    """True if this version's `DistributedDataParallel` has an option of this name."""
    return option in inspect.signature(DistributedDataParallel).parameters


def bucket_options(mib: float | None) -> dict[str, Any]:
    """Options of DDP for buckets of so many MiB, or of DDP's own sizes; in the first iteration too, where torch can."""
    if ddp_takes("bucket_cap_mb_list"):
        return {"bucket_cap_mb_list": [*_DDP_MIB] if mib is None else [mib]}
    return {} if mib is None else {"bucket_cap_mb": mib}


def has_python_reducer(ddp: DistributedDataParallel) -> bool:
    """True if DDP reduces each gradient by itself, in Python: it hands hooks no buckets."""
    return bool(ddp._use_python_reducer)


def is_finalized_by_hand(ddp: DistributedDataParallel) -> bool:
    """True if gradients are published when the user calls ``finalize_backward()``, where torch has that."""
    return bool(getattr(ddp, "require_manual_backward_finalization", False))


def models_over(params: Iterable[Tensor]) -> list[DistributedDataParallel]:
    """The DDP models in this process that reduce any of these parameters.

    No parameter refers to its DDP model, so all objects known to the garbage collector are searched.
    """
    gc.collect()  # or ranks would differ in models that are garbage
    wanted = set(map(id, params))
    found = [one for one in gc.get_objects() if DistributedDataParallel in type(one).__mro__]  # faster than isinstance
    alive = [ddp for ddp in found if _has_module(ddp)]
    return [ddp for ddp in alive if any(id(param) in wanted for _, param in reduced_parameters(ddp))]


def _has_module(ddp: DistributedDataParallel) -> bool:
    """False of one whose construction failed; a subclass may ask its module for what it does not have itself."""
    try:
        nn.Module.__getattr__(ddp, "module")
    except AttributeError:
        return False
    return True
