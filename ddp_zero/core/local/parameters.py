"""The user's parameters in one fixed order, with a name for each in messages.

A parameter's *index* is its position when the groups are walked in order, as in an optimizer's ``state_dict``. Other
modules refer to parameters by index; this one holds the tensors.
"""

import hashlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ddp_zero.core.local.arguments import PARALLEL_DOOR, PARALLEL_KEYS
from ddp_zero.core.local.tree import as_bytes
from ddp_zero.core.plan.shapes import is_dense
from ddp_zero.core.plan.shard_plan import ParameterSpec

_SAMPLED_ELEMENTS = 64


class ParameterTable:
    """Index, tensor, group and name of every parameter of an optimizer's groups.

    Args:
        param_groups: as `torch.optim.Optimizer.param_groups`; ``param_names`` are used where present.

    Attributes:
        norm_order: all parameters, by index, in the order in which norms of their gradients add up.

    Raises:
        ValueError: for a parameter that is given twice, is not dense, is on the meta device, is not initialised, or
            shares memory with a different one.
        TypeError: for a group with ranks of its own, or a distributed tensor.
    """

    def __init__(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        self.params: list[Tensor] = []
        self.groups: list[int] = []
        self._names: list[str | None] = []
        for group_index, group in enumerate(param_groups):
            _check_not_parallel(group_index, group)
            self.params.extend(group["params"])
            self.groups.extend([group_index] * len(group["params"]))
            self._names.extend(group.get("param_names", [None] * len(group["params"])))
        self._check_dense()
        self._ids = [id(param) for param in self.params]
        self.index_of = {param: index for index, param in enumerate(self.params)}
        self._check_distinct()
        self.norm_order: Sequence[int] = range(len(self.params))
        self._model: weakref.ref[nn.Module] | None = None

    def __len__(self) -> int:
        return len(self.params)

    def label(self, index: int) -> str:
        """A parameter in messages: its name if the user gave one, its index, group and shape."""
        name = f" {self._names[index]!r}" if self._names[index] is not None else ""
        return f"parameter {index}{name} (group {self.groups[index]}, shape {list(self.params[index].shape)})"

    def learn_names(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Set names for messages where the user gave none; the groups are not changed."""
        name_of = {param: name for name, param in named}
        self._names = [
            name_of.get(param) if name is None else name for param, name in zip(self.params, self._names, strict=True)
        ]

    def follow_order_of(self, model: nn.Module) -> None:
        """Add up norms in the order of ``model.parameters()`` from now on; parameters not in the model come last."""
        self._model = weakref.ref(model)
        self._order_norms()

    def extends(self, earlier: "ParameterTable") -> None:
        """Keep the order of norms of a table whose parameters this one begins with."""
        self.norm_order, self._model = earlier.norm_order, earlier._model
        self._order_norms()

    def _order_norms(self) -> None:
        model, ordered = None if self._model is None else self._model(), self.norm_order
        if model is not None:
            ordered = [self.index_of[param] for param in model.parameters() if param in self.index_of]
        self.norm_order = list(dict.fromkeys([*ordered, *range(len(self))]))

    def name(self, index: int) -> str:
        """A parameter's name if the user gave one, else its index."""
        given = self._names[index]
        return given if given is not None else f"parameter {index}"

    def accelerator(self) -> torch.device:
        """The first device that is not the CPU, or the CPU."""
        return next((param.device for param in self.params if param.device.type != "cpu"), torch.device("cpu"))

    def specs(self, active: Sequence[bool]) -> list[ParameterSpec]:
        """The plan's input: the tensors as they are now, and which of them a step can change.

        Devices of a type are numbered as they appear: a plan must be the same on ranks that each have their own.
        """
        devices = list(dict.fromkeys(param.device for param in self.params))
        numbers = [str([one for one in devices if one.type == device.type].index(device) or "") for device in devices]
        names = {device: f"{device.type}{number}" for device, number in zip(devices, numbers, strict=True)}
        return [
            ParameterSpec(
                numel=param.numel(),
                nbytes=param.numel() * param.element_size(),
                kind=f"{names[param.device]}/{str(param.dtype).removeprefix('torch.')}",
                active=is_active,
            )
            for param, is_active in zip(self.params, active, strict=True)
        ]

    def check_gradients(self) -> None:
        """Refuse sparse gradients, on every rank and before anything is sent.

        Raises:
            NotImplementedError: naming the first parameter with a gradient that is not dense.
        """
        for index, param in enumerate(self.params):
            if param.grad is not None and param.grad.layout is not torch.strided:
                raise NotImplementedError(
                    f"Expected dense gradients, got a {param.grad.layout} gradient for {self.label(index)}. Build the "
                    "layer with sparse=False, or keep its parameters in an optimizer of their own."
                )

    def check_groups(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Check that groups still hold exactly these parameters, since users may edit ``param_groups`` directly.

        Raises:
            RuntimeError: naming the group that differs.
        """
        held = [id(param) for group in param_groups for param in group["params"]]
        if held != self._ids:
            for position in range(max(len(param_groups), self.groups[-1] + 1)):
                ours = [id(param) for param, group in zip(self.params, self.groups, strict=True) if group == position]
                if position >= len(param_groups) or ours != [id(param) for param in param_groups[position]["params"]]:
                    raise RuntimeError(
                        f"Expected the parameters that the optimizer was built with in group {position}, got a "
                        "different set. Use add_param_group() to add some; build a new optimizer to remove some."
                    )

    def fingerprints(self) -> list["Fingerprint"]:
        """The properties that must be equal on every rank, and a sample of each parameter's values."""
        samples = sample_values(self.params)
        return [
            Fingerprint(
                name=self._names[index],
                group=self.groups[index],
                shape=tuple(param.shape),
                stride=tuple(param.stride()),
                dtype=str(param.dtype),
                device=param.device.type,
                trainable=param.requires_grad,
                sample=sample,
            )
            for index, (param, sample) in enumerate(zip(self.params, samples, strict=True))
        ]

    def _check_dense(self) -> None:
        for index, param in enumerate(self.params):
            given = self._names[index]
            shown = f"parameter {index}" if given is None else f"parameter {index} {given!r}"
            if is_lazy(param):
                raise ValueError(
                    f"Expected parameters with data, got {shown}, of a lazy module that was not run yet. Run the model "
                    "once before building the optimizer."
                )
            if param.is_nested or param.layout is not torch.strided:
                kind = "a nested tensor" if param.is_nested else f"of layout {param.layout}"
                raise ValueError(
                    f"Expected dense parameters, got {shown}, which is {kind}. Keep it in a plain optimizer of its "
                    "own, on every rank."
                )

    def _check_distinct(self) -> None:
        if len(self.index_of) != len(self.params):
            first = next(i for i, param in enumerate(self.params) if self.index_of[param] != i)
            raise ValueError(
                f"Expected every parameter once, got {self.label(first)} again as "
                f"{self.label(self.index_of[self.params[first]])}."
            )
        for index, param in enumerate(self.params):
            if param.is_meta:
                raise ValueError(
                    f"Expected parameters with data, got {self.label(index)} on the meta device. Call "
                    "module.to_empty(device=...) and initialise it before building the optimizer."
                )
        self._check_separate_memory()

    def _check_separate_memory(self) -> None:
        """Refuse two parameters on the same memory: two owners would step it, each unaware of the other."""
        spans = sorted(
            (param.untyped_storage().data_ptr(), *_span(param), index)
            for index, param in enumerate(self.params)
            if param.numel() and is_dense(param.shape, param.stride())
        )
        for (storage, _, end, first), (next_storage, start, _, second) in pairwise(spans):
            if storage == next_storage and start < end:
                raise ValueError(
                    f"Expected every parameter in memory of its own, got {self.label(min(first, second))} and "
                    f"{self.label(max(first, second))} on the same memory. To tie weights, use one Parameter object "
                    "in both places."
                )


def _check_not_parallel(position: int, group: Mapping[str, Any]) -> None:
    """Refuse what only `ddp_zero.parallel` takes, and what a plain optimizer would silently ignore or not share."""
    found = next((f"{key}=" for key in PARALLEL_KEYS if key in group), None)
    if found is None and any(hasattr(param, "device_mesh") for param in group["params"]):
        found = "a distributed tensor (DTensor)"
    if found is not None:
        raise TypeError(
            f"Expected parameters that all ranks of the optimizer hold alike, got {found} in group {position}. "
            f"{PARALLEL_DOOR}"
        )


@dataclass(frozen=True)
class Fingerprint:
    """The properties of a parameter that ranks compare; ``sample``, a digest, may differ before a broadcast."""

    name: str | None
    group: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    device: str
    trainable: bool
    sample: str

    def structure(self) -> tuple[Any, ...]:
        """Everything except the sampled values; it must be equal on every rank."""
        return (self.name, self.group, self.shape, self.stride, self.dtype, self.device, self.trainable)


def _span(param: Tensor) -> tuple[int, int]:
    start = int(param.storage_offset()) * param.element_size()
    return start, start + param.numel() * param.element_size()


@torch.no_grad()
def sample_values(params: Iterable[Tensor]) -> list[str]:
    """A digest of the first elements of each parameter, one device transfer per device."""
    heads = [as_bytes(_head(param)) for param in params]
    by_device: dict[torch.device, list[int]] = {}
    for index, head in enumerate(heads):
        by_device.setdefault(head.device, []).append(index)
    digests = [""] * len(heads)
    for indices in by_device.values():
        joined = torch.cat([heads[index] for index in indices]).cpu()
        for index, part in zip(indices, torch.split(joined, [heads[i].numel() for i in indices]), strict=True):
            digests[index] = hashlib.sha256(bytes(part.tolist())).hexdigest()[:16]
    return digests


def _head(param: Tensor) -> Tensor:
    """The first elements in logical order, without copying the rest."""
    if param.is_contiguous() or not param.dim():
        return param.reshape(-1)[:_SAMPLED_ELEMENTS]
    return param[:_SAMPLED_ELEMENTS].reshape(-1)[:_SAMPLED_ELEMENTS]
