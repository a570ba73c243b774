"""The arguments of `ParallelOptimizer`, checked and brought into one form."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ddp_zero.core.comm.agreement import Agreement
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.local.arguments import PARALLEL_OPTIONS, check_class, check_known, check_params, grouped
from ddp_zero.core.local.inner import ParamGroup
from ddp_zero.core.local.live_model import ddp_models_in
from ddp_zero.ddp_hooks import options_of_hook

_DECIDING = ("max_grad_norm", "norm_type", "nonfinite", "loss_scale", "stage", "overlap")
"""Options that must be the same on ranks with different parameters."""
_REFUSED = {
    "shard_group": "Shard over all ranks that hold a parameter.",
    "process_group": "Parameter groups name theirs.",
    "overlap_with_ddp": "Use overlap=.",
}


def other_dims(mesh: DeviceMesh | None, data: str | None, pipeline: str | None) -> list[str]:
    """The names of the mesh dimensions besides the data-parallel one."""
    names = list(mesh.mesh_dim_names or ()) if mesh is not None else []
    for argument, name in (("data_parallel_dim", data), ("pipeline_dim", pipeline)):
        if name is not None and name not in names:
            raise ValueError(f"Expected {argument} to name a dimension of the mesh, {names}, got {name!r}.")
    if mesh is not None and data is None:
        raise ValueError(
            f"Expected data_parallel_dim with mesh=, got none. Pass the name of the dimension of {names} along which "
            "ranks hold the same parameters."
        )
    return [name for name in names if name != data]


def data_group(
    model: nn.Module, given: ProcessGroup | None, mesh: DeviceMesh | None, dim: str | None
) -> ProcessGroup | None:
    """The data-parallel ranks; of several DDP models, those of the largest group."""
    if given is not None or mesh is not None:
        return given if mesh is None else mesh.get_group(dim)
    models = ddp_models_in(model) if isinstance(model, nn.Module) else {}  # else refused later, by all ranks
    groups: list[ProcessGroup] = [ddp.process_group for ddp in models.values()]
    return max(groups, key=lambda group: group.size(), default=None)


def check_arguments(model: object, optimizer_class: Any, options: Mapping[str, Any]) -> None:
    """Check types, and that no option is misspelt or decided elsewhere.

    Raises:
        TypeError: for one that is not right.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"Expected the model that this rank trains, an nn.Module, got {type(model).__name__}. The order is: model, "
            "optimizer class, parameter groups."
        )
    check_class(optimizer_class)
    for name, remedy in _REFUSED.items():
        if name in options:
            raise TypeError(f"Expected an option of ParallelOptimizer, got {name!r}. {remedy}")
    own = options_of_hook()
    check_known([name for name in options if name not in own], optimizer_class, [*own, *PARALLEL_OPTIONS])


def copied(params: Any, model: nn.Module) -> Any:
    """Parameter groups that may be written to."""
    check_params(params)
    named = [(name, param) for name, param in model.named_parameters()]
    if params is None:
        return named
    if callable(params):
        return grouped(named, params)
    return [dict(one) if isinstance(one, dict) else one for one in params]


def nonfinite(options: Mapping[str, Any], groups: Sequence[ParamGroup]) -> str:
    """What to do about gradients that are not finite: alike in all members, whether their steps wait or not."""
    given: str | None = options.get("nonfinite")
    if given is not None:
        return given
    own = [group.get("max_grad_norm") for group in groups]
    decides = [options.get("max_grad_norm"), options.get("loss_scale"), *own]
    return "step" if all(one is None for one in decides) else "skip"


@contextmanager
def agreements(
    comms: Sequence[Communicator], optimizer_class: object, options: Mapping[str, Any]
) -> Iterator[list[Agreement]]:
    """A block that succeeds on all of these ranks, with these options, or raises on all."""
    with ExitStack() as stack:
        found = [stack.enter_context(Agreement(comm, "building ParallelOptimizer")) for comm in reversed(comms)]
        for agreement in found:
            agreement.declare("optimizer class", getattr(optimizer_class, "__qualname__", repr(optimizer_class)))
            for name in _DECIDING:
                agreement.declare(name, options.get(name))
        yield found[::-1]
