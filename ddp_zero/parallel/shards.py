"""Parameters that are distributed tensors: the optimizer steps this rank's part of each, in the same memory."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard


@dataclass(frozen=True)
class Held:
    """A parameter as a member steps it.

    Attributes:
        param: a plain parameter; for a distributed tensor this rank's part, in its memory.
        source: the distributed tensor, or None.
        cut_over: names of the mesh dimensions along which ranks hold different parts.
        declared: of those that the user has named: which dimension of the tensor is cut; None: not said.
        label: the parameter in messages.
    """

    param: Tensor
    source: DTensor | None
    cut_over: frozenset[str]
    declared: Mapping[str, int | None]
    label: str

    @property
    def given(self) -> Tensor:
        """The parameter as the user gave it."""
        return self.param if self.source is None else self.source

    def along(self, dims: Collection[str]) -> "Held":
        """The same, of which only cuts over these dimensions are known."""
        return replace(self, cut_over=self.cut_over.intersection(dims))


def read_cuts(given: object, position: int) -> dict[str, int | None]:
    """A group's ``sharded_over`` as a dict from mesh dimensions to dimensions of its tensors, None where not said.

    Raises:
        TypeError: for anything but names, or a dict from names to numbers.
    """
    if isinstance(given, str):
        return {given: None}
    found = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given) if isinstance(given, Iterable) else None
    kinds = (int, type(None))
    if found is None or not all(type(dim) is str and type(cut) in kinds for dim, cut in found.items()):
        raise TypeError(
            f"Expected sharded_over= of parameter group {position} to name mesh dimensions, or to map them to the "
            f"dimension of the tensors that is cut, as in {{'tensor': 0}}, got {given!r:.80}."
        )
    return found


def held(param: Tensor, declared: Mapping[str, int | None], dims: Sequence[str], label: str) -> Held:
    """How a rank holds a parameter.

    Args:
        param: as the user gave it.
        declared: mesh dimensions along which the user has said that it is cut, from `read_cuts`.
        dims: names of the mesh dimensions other than the data-parallel one.
        label: the parameter in messages.

    Raises:
        ValueError: for a distributed tensor on dimensions that are not among these.
        NotImplementedError: for one that is neither cut nor replicated along a dimension.
    """
    unknown = [dim for dim in declared if dim not in dims]
    if unknown:
        raise ValueError(
            f"Expected sharded_over= of {label} to name dimensions of the mesh besides the data-parallel one, "
            f"{list(dims)}, got {unknown[0]!r}."
        )
    if not isinstance(param, DTensor):
        return Held(param, None, frozenset(declared), declared, label)
    names = param.device_mesh.mesh_dim_names or ()
    cut, shown = set(declared), set()
    for name, placement in zip(names, param.placements, strict=False):
        if name not in dims:
            raise ValueError(
                f"Expected {label} distributed over dimensions of the mesh besides the data-parallel one, "
                f"{list(dims)}, got {name!r}. Pass the mesh to ParallelOptimizer(mesh=...), and parallelize the model "
                "over a dimension of that mesh."
            )
        if not isinstance(placement, Shard | Replicate):
            raise NotImplementedError(
                f"Expected {label} cut or replicated along {name!r}, got {placement}. Redistribute it first."
            )
        if isinstance(placement, Shard):
            cut.add(name)
            shown.add(name)
    if not names:
        raise ValueError(f"Expected {label} on a mesh with named dimensions, got one without names.")
    own: Any = param.detach()
    part = nn.Parameter(own.to_local(), requires_grad=param.requires_grad)
    rest = {dim: tensor_dim for dim, tensor_dim in declared.items() if dim not in shown}
    return Held(part, param, frozenset(cut), rest, label)


class Shards:
    """The distributed tensors of one member, and the parts that are stepped for them."""

    def __init__(self, all_held: Sequence[Held]) -> None:
        self._pairs = [(one.source, one.param) for one in all_held if one.source is not None]

    def bring_gradients(self) -> None:
        """Give each part this rank's part of the gradient."""
        for source, part in self._pairs:
            part.requires_grad_(source.requires_grad)
            grad: Any = source.grad
            if grad is None:
                part.grad = None
                continue
            if grad.placements != source.placements:
                grad = grad.redistribute(placements=source.placements)
            part.grad = grad.to_local().detach()

    def drop_gradients(self) -> None:
        """Follow a user who has dropped all gradients."""
        for source, _ in self._pairs:
            source.grad = None
