"""A rank's parameters in the whole model: their elements, global names, and the ranks that hold the same.

Also the state dicts of several members merged, in which parameters are numbered in the order of all groups, or
named. Named ones, for `torch.distributed.checkpoint`, have the keys of torch's ``flatten_optimizer_state_dict``: one
for each state and each option of each parameter, so that ranks with different parameters make up one dict.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from ddp_zero.core.comm import Communicator
from ddp_zero.core.local import CLASS_KEY, MASTER_KEY
from ddp_zero.optimizer import ZeroRedundancyOptimizer, shard_of, states_of
from ddp_zero.parallel.names import GlobalNames
from ddp_zero.parallel.whole_model import PartModel, Placed, chunk_of
from ddp_zero.values import Chunk

# One parameter


@dataclass(frozen=True)
class LocalParameter:
    """A parameter as this rank holds and steps it: the whole, or this rank's part of it."""

    param: Tensor  # a plain parameter; for a DTensor the local shard, in the DTensor's memory
    source: DTensor | None  # the DTensor that the user gave, if it is one
    cut_over: frozenset[str]  # names of the mesh dimensions along which ranks hold different parts
    # for mesh dimensions named by the user, the tensor dimension that is cut; None if not given
    declared: Mapping[str, int | None]
    label: str  # the parameter in messages

    @property
    def given(self) -> Tensor:
        """The parameter as the user gave it."""
        return self.param if self.source is None else self.source

    def restricted_to(self, dims: Collection[str]) -> "LocalParameter":
        """The same parameter, with ``cut_over`` restricted to these mesh dimensions."""
        return replace(self, cut_over=self.cut_over.intersection(dims))

    def single_cut(self) -> tuple[str, int] | None:
        """The mesh dimension and the dimension of the parameter that is cut along it; None unless exactly one is known.

        Parts are joined in the order of ranks, so a strided cut is none.
        """
        if len(self.cut_over) != 1:
            return None
        (mesh_dim,) = self.cut_over
        tensor_dim = self.declared.get(mesh_dim)
        if self.source is not None and mesh_dim not in self.declared:
            names = self.source.device_mesh.mesh_dim_names or ()
            placement = dict(zip(names, self.source.placements, strict=False)).get(mesh_dim)
            tensor_dim = placement.dim if type(placement) is Shard else None
        if tensor_dim is None or not -self.param.dim() <= tensor_dim < self.param.dim():
            return None
        return mesh_dim, tensor_dim % self.param.dim()

    def shape_with(self, tensor_dim: int, size: int) -> tuple[int, ...]:
        """The shape of this rank's part, but with ``size`` along one dimension."""
        return (*self.param.shape[:tensor_dim], size, *self.param.shape[tensor_dim + 1 :])

    def expose_gradient(self) -> None:
        """Set ``param.grad`` to the local tensor of the DTensor's gradient, in the same memory. Never communicates.

        The gradient may still be a partial sum (`Partial`), to which code such as `GradScaler` can apply a factor.
        """
        if self.source is not None and not self.hides_gradient():
            grad: Any = self.source.grad
            self.param.grad = None if grad is None else grad.to_local().detach()

    def hides_gradient(self) -> bool:
        """True if the DTensor's gradient has no local tensor of ``param``'s shape, as when it is cut otherwise."""
        grad: Any = None if self.source is None else self.source.grad
        return grad is not None and grad.to_local().shape != self.param.shape

    def fetch_gradient(self) -> None:
        """Set ``param.grad`` to the DTensor's gradient on this rank. A collective if that must be redistributed."""
        if self.source is None:
            return
        self.param.requires_grad_(self.source.requires_grad)
        grad: Any = self.source.grad
        if grad is not None and grad.placements != self.source.placements:
            grad = grad.redistribute(placements=self.source.placements)
        self.param.grad = None if grad is None else grad.to_local().detach()

    def drop_gradient(self, set_to_none: bool) -> None:
        """Drop or zero the DTensor's gradient, which `fetch_gradient` would bring back."""
        if self.source is None or self.source.grad is None:
            return
        if set_to_none:
            self.source.grad = None
        else:
            grad: Any = self.source.grad
            grad.to_local().detach().zero_()


@dataclass(frozen=True)
class CutSizes:
    """A cut of a tensor along one dimension of the mesh."""

    dim: int  # the dimension of the tensor that is cut
    sizes: tuple[int, ...]  # of all parts along it, in the order of ranks
    place: int  # of this rank's part


def read_cuts(given: object, position: int) -> dict[str, int | None]:
    """A group's ``sharded_over`` as a dict from mesh to tensor dimensions, or to None; TypeError if malformed."""
    if isinstance(given, str):
        return {given: None}
    found = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given) if isinstance(given, Iterable) else None
    kinds = (int, type(None))
    if found is None or not all(type(dim) is str and type(cut) in kinds for dim, cut in found.items()):
        raise TypeError(
            f"Expected sharded_over= of parameter group {position} to name mesh dimensions, or to map them to the "
            f"dimension of the tensors that is cut, as in {{'tensor': 0}}, got {given!r:.80}. [ZERO-805]"
        )
    return found


def local_parameter(
    param: Tensor, declared: Mapping[str, int | None], dims: Sequence[str], label: str
) -> LocalParameter:
    """A parameter as this rank holds it, cut along dimensions that `read_cuts` has found, or by a distributed tensor.

    ``dims`` name the mesh dimensions other than data-parallel dimensions.

    Raises:
        ValueError: for a distributed tensor on dimensions that are not among these.
        NotImplementedError: for a parameter that is neither cut nor replicated along a dimension.
    """
    unknown = [dim for dim in declared if dim not in dims]
    if unknown:
        raise ValueError(
            f"Expected sharded_over= of {label} to name dimensions of the mesh besides the data-parallel one, "
            f"{list(dims)}, got {unknown[0]!r}. [ZERO-805]"
        )
    if not isinstance(param, DTensor):
        return LocalParameter(param, None, frozenset(declared), declared, label)
    names = param.device_mesh.mesh_dim_names or ()
    cut_dims = set()
    for name, placement in zip(names, param.placements, strict=False):
        if name not in dims:
            raise ValueError(
                f"Expected {label} distributed over dimensions of the mesh besides the data-parallel one, "
                f"{list(dims)}, got {name!r}. Pass the mesh to ParallelOptimizer(mesh=...), and parallelize the model "
                "over a dimension of that mesh. [ZERO-806]"
            )
        if not isinstance(placement, Shard | Replicate):
            raise NotImplementedError(
                f"Expected {label} cut or replicated along {name!r}, got {placement}. Redistribute it first. [ZERO-806]"
            )
        if isinstance(placement, Shard):
            cut_dims.add(name)
    if not names:
        raise ValueError(
            f"{label} is distributed over a mesh without named dimensions. Build the mesh with mesh_dim_names=. "
            "[ZERO-801]"
        )
    detached: Any = param.detach()
    part = nn.Parameter(detached.to_local(), requires_grad=param.requires_grad)
    declared_only = {dim: tensor_dim for dim, tensor_dim in declared.items() if dim not in cut_dims}
    return LocalParameter(part, param, frozenset(cut_dims.union(declared)), declared_only, label)


# All parameters


class Holdings:
    """The parameters of a rank's `ParallelOptimizer` in the whole model.

    Args:
        params_of_ranks: for each member, the ranks that share its parameters, and the parameters.
        everyone: the data-parallel ranks.
        mesh: the mesh of all ranks, or None.
        home_dims: see `Axes.home_dims`.
        names: names of values in the whole model; None if unchanged. TypeError for neither a mapping nor a function.
        parts: sizes of all parts of parameters that are declared cut, from `measure_parts`.
    """

    def __init__(
        self,
        params_of_ranks: Sequence[tuple[ProcessGroup, Sequence[LocalParameter]]],
        everyone: ProcessGroup,
        mesh: DeviceMesh | None,
        home_dims: Sequence[str],
        names: GlobalNames | None,
        parts: Mapping[Tensor, Sequence[CutSizes]],
    ) -> None:
        if not (names is None or callable(names) or isinstance(names, Mapping)):
            raise TypeError(
                "Expected global_names to map names of this rank's model to those in the whole one, or a function "
                f"that does, got {type(names).__name__}. [ZERO-813]"
            )
        self._mesh = mesh
        self._names = names
        self._parts = parts
        dims = () if mesh is None else mesh.mesh_dim_names or ()
        grid = None if mesh is None else mesh.mesh
        self._home = home_of(get_process_group_ranks(everyone), grid, dims, home_dims)
        self._held = {
            local.param: (local, home_of(get_process_group_ranks(group), grid, dims, home_dims))
            for group, local_params in params_of_ranks
            for local in local_params
        }

    def part_of(self, model: nn.Module) -> PartModel:
        """This rank's part of the model; ValueError for a cut along an undeclared dimension, or equal names."""
        placed = {local.given: Placed(local.param, *self._extent(local), home) for local, home in self._held.values()}
        return PartModel(model, placed, self._names, self._home)

    def as_distributed(self, param: Tensor, value: Any) -> Any:
        """A value in a parameter's state, as a `DTensor` if the parameter is cut and the value has its local shape."""
        local, _ = self._held[param]
        if not local.cut_over or not isinstance(value, Tensor) or value.shape != param.shape:
            return value
        shape, _ = self._extent(local)
        self._check_chunks(local)
        stride = torch.empty(shape, device="meta").stride()
        mesh, placements = self._placements(local)
        return DTensor.from_local(value, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    def _check_chunks(self, local: LocalParameter) -> None:
        """NotImplementedError for parts of other sizes than ``torch.chunk`` makes, which a `DTensor` must have."""
        for cut in self._parts.get(local.param, ()):
            chunks = [len(chunk) for chunk in torch.empty(sum(cut.sizes), device="meta").chunk(len(cut.sizes))]
            chunks += [0] * (len(cut.sizes) - len(chunks))
            if list(cut.sizes) != chunks:
                raise NotImplementedError(
                    f"Expected parts of {local.label} as torch.chunk cuts dimension {cut.dim}, {chunks}, for "
                    f"sharded_state_dict(), got {list(cut.sizes)}. Use ddp_zero.checkpoint, which takes any sizes. "
                    "[ZERO-608]"
                )

    def _extent(self, local: LocalParameter) -> tuple[tuple[int, ...], Chunk]:
        """The shape of the whole parameter, and this rank's elements of it."""
        shape = tuple(local.param.shape)
        offsets = (0,) * local.param.dim()
        if local.source is not None:
            shape = tuple(local.source.shape)
            offsets = tuple(chunk_of(local.source, local.label).offsets)
        self._declared_dims(local)
        cuts = self._parts.get(local.param, ())
        shape, offsets = whole_of(shape, offsets, cuts)
        return shape, Chunk(offsets, tuple(local.param.shape))

    def _declared_dims(self, local: LocalParameter) -> list[tuple[str, int]]:
        """Mesh dimensions, in order, with the tensor dimension that the user declared cut along each."""
        found = []
        for dim in (self._mesh.mesh_dim_names or ()) if self._mesh is not None else ():
            if dim not in local.declared:
                continue
            tensor_dim = local.declared[dim]
            if tensor_dim is None or not -local.param.dim() <= tensor_dim < local.param.dim():
                raise ValueError(
                    f"Expected sharded_over={{{dim!r}: <dimension of the tensor that is cut>}} for {local.label} of "
                    f"shape {list(local.param.shape)}, got {tensor_dim}. Without it the parameter has no place in the "
                    "whole model: checkpoints and sharded_state_dict() need one. [ZERO-805]"
                )
            found.append((dim, tensor_dim % local.param.dim()))
        return found

    def _placements(self, local: LocalParameter) -> tuple[DeviceMesh, list[Placement]]:
        """The mesh and placements of a `DTensor` that has the parameter's cuts."""
        declared = self._declared_dims(local)
        if local.source is not None:
            if declared:
                raise NotImplementedError(
                    f"{local.label} is a distributed tensor and has sharded_over=. Leave sharded_over= out for it. "
                    "[ZERO-805]"
                )
            return local.source.device_mesh, list(local.source.placements)
        assert self._mesh is not None, "sharded_over names a dimension of the mesh"
        return self._mesh[tuple(dim for dim, _ in declared)], [Shard(tensor_dim) for _, tensor_dim in declared]


def whole_of(
    shape: Sequence[int], offsets: Sequence[int], cuts: Sequence[CutSizes]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of the whole tensor, and this part's offsets.

    ``offsets`` are the part's in a larger part; the outermost cut comes first.
    """
    sizes, begins = list(shape), list(offsets)
    for cut in reversed(cuts):
        begins[cut.dim] += sum(cut.sizes[: cut.place])
        sizes[cut.dim] = sum(cut.sizes)
    return tuple(sizes), tuple(begins)


def measure_parts(
    local_params: Sequence[LocalParameter], mesh: DeviceMesh | None, levels: Mapping[str, Communicator]
) -> dict[Tensor, list[CutSizes]]:
    """The sizes of all parts of parameters that are declared cut, the outermost cut first. A collective of the mesh.

    ``levels`` are the ranks along each dimension of the mesh that has several.
    """
    sizes = {place: list(local.given.shape) for place, local in enumerate(local_params)}
    cuts_of_param: dict[Tensor, list[CutSizes]] = {}
    # the innermost dimension first: along the next one, parts are what it has joined
    for dim in reversed(() if mesh is None else mesh.mesh_dim_names or ()):
        if dim not in levels:
            continue
        cut_dims = {place: local.declared.get(dim) for place, local in enumerate(local_params)}
        lengths = {
            place: sizes[place][at]
            for place, at in cut_dims.items()
            if at is not None and -len(sizes[place]) <= at < len(sizes[place])
        }
        lengths_of_ranks = [json.loads(text) for text in levels[dim].all_gather_text(json.dumps(lengths))]
        for place, length in lengths.items():
            at = (cut_dims[place] or 0) % len(sizes[place])
            parts = tuple(
                local.get(str(place), length) for local in lengths_of_ranks
            )  # what lacks on a rank is told by a save
            cuts_of_param.setdefault(local_params[place].param, []).insert(
                0, CutSizes(at, parts, levels[dim].group_rank)
            )
            sizes[place][at] = sum(parts)
    return cuts_of_param


def home_of(ranks: Sequence[int], grid: Tensor | None, dims: Sequence[str], home_dims: Sequence[str]) -> str:
    """The holders of a parameter, as text: ranks, or their coordinates along the ``home_dims`` mesh dimensions."""
    if grid is None:
        return f"ranks {json.dumps(sorted(ranks))}"
    columns = [dims.index(dim) for dim in home_dims]
    coordinates = {rank: (grid == rank).nonzero() for rank in ranks}
    places = {tuple(at for column in columns for at in place[:, column].tolist()) for place in coordinates.values()}
    return f"{', '.join(home_dims)} {json.dumps(sorted(places))}"


# State dicts

Places = Sequence[tuple[int, int]]
"""For each parameter group, its member and its position there."""


def merge(state_dicts: Sequence[dict[str, Any]], places: Places) -> dict[str, Any]:
    """The state dict over all groups; other entries, such as a loss scale, are the first member's."""
    groups: list[dict[str, Any]] = []
    numbers: dict[tuple[int, int], int] = {}
    for member, position in places:
        group = state_dicts[member]["param_groups"][position]
        for old in group["params"]:
            numbers[member, old] = len(numbers)
        groups.append({**group, "params": [numbers[member, old] for old in group["params"]]})
    state = {
        numbers.get((member, old), old): value
        for member, state_dict in enumerate(state_dicts)
        for old, value in state_dict["state"].items()
    }
    rest = {key: value for key, value in state_dicts[0].items() if key not in ("state", "param_groups")}
    order = sorted(state, key=lambda key: (isinstance(key, str), str(key) if isinstance(key, str) else key))
    return {"state": {key: state[key] for key in order}, "param_groups": groups, **rest}


def split(state_dict: dict[str, Any], places: Places) -> list[dict[str, Any]]:
    """Split a state dict of `merge` into the members' state dicts; ValueError for another number of groups."""
    groups = state_dict["param_groups"]
    if len(groups) != len(places):
        raise ValueError(
            f"Expected a state dict of {len(places)} parameter groups, got {len(groups)}. Build the groups as when "
            "saving. [ZERO-604]"
        )
    rest = {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}
    parts = []
    for member in range(1 + max(group_member for group_member, _ in places)):
        member_groups = [
            group for group, (group_member, _) in zip(groups, places, strict=True) if group_member == member
        ]
        old = [number for group in member_groups for number in group["params"]]
        new = {number: place for place, number in enumerate(old)}
        renumbered = [{**group, "params": [new[number] for number in group["params"]]} for group in member_groups]
        state = {
            new.get(key, key): value for key, value in state_dict["state"].items() if key in new or isinstance(key, str)
        }
        parts.append({"state": state, "param_groups": renumbered, **rest})
    return parts


_STATE, _GROUPS, _REST = "state", "param_groups", "rest"


def pack(
    members: Sequence[ZeroRedundancyOptimizer], holdings: Holdings, model: nn.Module, init_missing: bool
) -> dict[str, Any]:
    """See `ParallelOptimizer.sharded_state_dict`."""
    part = holdings.part_of(model)
    flat_state_dict = dict[str, Any]()
    for member in members:
        member_dict = states_of(member).sharded_state_dict(part, init_missing)
        table = shard_of(member).table
        index_of = {name: index for index, name in enumerate(table.names_in(part))}
        for name, state in member_dict.pop(_STATE).items():
            if name not in index_of:
                flat_state_dict[f"{_REST}.{name}"] = state  # belongs to no parameter
                continue
            index = index_of[name]
            for key, value in state.items():
                is_of_part = index not in table.wholes or key == MASTER_KEY
                saved_value = holdings.as_distributed(table.params[index], value) if is_of_part else value
                flat_state_dict[f"{_STATE}.{name}.{key}"] = saved_value
        for group in member_dict.pop(_GROUPS):
            for name in group.pop("params"):
                flat_state_dict.update({f"{_GROUPS}.{name}.{key}": value for key, value in group.items()})
        flat_state_dict.update({f"{_REST}.{key}": value for key, value in member_dict.items()})
    return flat_state_dict


def unpack(
    state_dict: Mapping[str, Any], members: Sequence[ZeroRedundancyOptimizer], holdings: Holdings, model: nn.Module
) -> list[dict[str, Any]]:
    """Each member's state dict by parameter index, from a dict with the keys of `pack`.

    Raises ValueError, naming the parameter, if options are missing, or differ in a group.
    """
    part = holdings.part_of(model)
    states: dict[str, dict[str, Any]] = {}
    options: dict[str, dict[str, Any]] = {}
    rest: dict[str, Any] = {}
    for path, value in state_dict.items():
        kind, _, name = path.partition(".")
        if kind == _REST:
            rest[name] = value
            continue
        name, _, key = name.rpartition(".")
        local = value.to_local() if isinstance(value, DTensor) else value
        {_STATE: states, _GROUPS: options}.get(kind, {}).setdefault(name, {})[key] = local
    scale = {"loss_scale": rest.pop("loss_scale")} if "loss_scale" in rest else {}
    state_dicts = []
    for member in members:
        names = shard_of(member).table.names_in(part)
        remaining = iter(names)
        groups = [
            _group([next(remaining) for _ in group["params"]], group, options, member.defaults)
            for group in member.param_groups
        ]
        member_states = {name: states[name] for name in names if name in states}
        nested = {"state": {**rest, **member_states}, "param_groups": groups, **scale}
        state_dicts.append(states_of(member).by_index(nested, part))
    return state_dicts


def _group(
    names: list[str], group: Mapping[str, Any], options: Mapping[str, dict[str, Any]], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """A member's group with the options that were saved for its parameters; ValueError if these differ."""
    missing = next((name for name in names if name not in options), None)
    if missing is not None:
        raise ValueError(
            f"Expected options of {missing!r} in the state dict, got none. Build the groups as when saving. [ZERO-604]"
        )
    other = next((name for name in names if options[name] != options[names[0]]), None)
    if other is not None:
        raise ValueError(
            f"The state dict has different options for {other!r} and {names[0]!r}, which are in one group. "
            "Build the groups as when saving. [ZERO-604]"
        )
    options_and_params = {key: value for key, value in group.items() if key != "param_names"}
    return {
        **(load_group(options_and_params, options[names[0]], defaults) if names else options_and_params),
        "params": names,
    }


def group_options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def same_class(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if both groups are stepped by the same class."""
    return group.get(CLASS_KEY) == other.get(CLASS_KEY)


def load_group(group: Mapping[str, Any], options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """A group after a load of saved options.

    As with torch's ``load_state_dict``, an option that the group has gained since it was saved is gone. An option that
    the class has gained since keeps its value.
    """
    gained = group_options(group).keys() - options.keys() - defaults.keys()
    return {**{key: value for key, value in group.items() if key not in gained}, **options}
