"""How a rank's parameters lie in the whole model: names there, which elements they are, and who holds the same."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard

from ddp_zero.core.local.live_model import PartModel, Placed, box_of
from ddp_zero.core.plan.boxes import Box
from ddp_zero.core.plan.global_names import GlobalNames
from ddp_zero.parallel.members import Plan
from ddp_zero.parallel.shards import Held


class Holdings:
    """What a rank's `ParallelOptimizer` knows of the whole model.

    Args:
        plans: of its members.
        everyone: the data-parallel ranks.
        mesh: of all ranks, or None.
        kept: names of the mesh dimensions along which plain parameters differ or are shared by data-parallel ranks:
            the data-parallel and the pipeline dimension.
        names: of values in the whole model; None: as they are.

    Raises:
        TypeError: for names that are neither a mapping nor a function.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        everyone: ProcessGroup,
        mesh: DeviceMesh | None,
        kept: Sequence[str],
        names: GlobalNames | None,
    ) -> None:
        if not (names is None or callable(names) or isinstance(names, Mapping)):
            raise TypeError(
                f"Expected global_names to map names of this rank's model to those in the whole one, or a function "
                f"that does, got {type(names).__name__}."
            )
        self._mesh = mesh
        self._names = names
        self._home = _home(everyone, mesh, kept)
        self._homes = [self._home if plan.group is None else _home(plan.group, mesh, kept) for plan in plans]
        self._plans = plans
        self._held = {one.param: one for plan in plans for one in plan.held}

    def part_of(self, model: nn.Module) -> PartModel:
        """This rank's part of the model, as `PartModel`.

        Raises:
            ValueError: for a parameter that is cut along a dimension that nobody has stated, or names that collide.
        """
        placed = {
            one.given: Placed(one.param, *self._extent(one), home)
            for plan, home in zip(self._plans, self._homes, strict=True)
            for one in plan.held
        }
        return PartModel(model, placed, self._names, self._home)

    def as_distributed(self, param: Tensor, value: Any) -> Any:
        """A value of the state of a parameter that is stepped: as a `DTensor` if the parameter is cut and it is too."""
        one = self._held[param]
        if not one.cut_over or not isinstance(value, Tensor) or value.shape != param.shape:
            return value
        shape, _ = self._extent(one)
        stride = torch.empty(shape, device="meta").stride()
        mesh, placements = self._placements(one)
        return DTensor.from_local(value, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)

    def _extent(self, one: Held) -> tuple[tuple[int, ...], Box]:
        """The shape of the whole parameter, and the elements that are here."""
        shape, offsets = list(one.param.shape), [0] * one.param.dim()
        sizes = tuple(shape)
        if one.source is not None:
            shape, offsets = list(one.source.shape), list(box_of(one.source, one.label).offsets)
        for dim, tensor_dim in reversed(self._declared(one)):
            assert self._mesh is not None, "sharded_over names a dimension of the mesh"
            offsets[tensor_dim] += self._mesh.get_local_rank(dim) * shape[tensor_dim]
            shape[tensor_dim] *= self._mesh[dim].size()
        return tuple(shape), Box(tuple(offsets), sizes)

    def _declared(self, one: Held) -> list[tuple[str, int]]:
        """Dimensions of the mesh, in its order, and of the tensor that are cut as the user has said."""
        found = []
        for dim in (self._mesh.mesh_dim_names or ()) if self._mesh is not None else ():
            if dim not in one.declared:
                continue
            tensor_dim = one.declared[dim]
            if tensor_dim is None or not -one.param.dim() <= tensor_dim < one.param.dim():
                raise ValueError(
                    f"Expected sharded_over={{{dim!r}: <dimension of the tensor that is cut>}} for {one.label} of "
                    f"shape {list(one.param.shape)}, got {tensor_dim}. Without it the parameter has no place in the "
                    "whole model: checkpoints and sharded_state_dict() need one."
                )
            found.append((dim, tensor_dim % one.param.dim()))
        return found

    def _placements(self, one: Held) -> tuple[DeviceMesh, list[Placement]]:
        declared = self._declared(one)
        if one.source is not None:
            if declared:
                raise NotImplementedError(
                    f"Expected {one.label} either as a distributed tensor or with sharded_over=, got both."
                )
            return one.source.device_mesh, list(one.source.placements)
        assert self._mesh is not None, "sharded_over names a dimension of the mesh"
        return self._mesh[tuple(dim for dim, _ in declared)], [Shard(tensor_dim) for _, tensor_dim in declared]


def _home(group: ProcessGroup, mesh: DeviceMesh | None, kept: Sequence[str]) -> str:
    """Who holds a parameter, as text: ranks, or where they are in the mesh along the dimensions that matter."""
    ranks = get_process_group_ranks(group)
    if mesh is None:
        return f"ranks {json.dumps(sorted(ranks))}"
    names = list(mesh.mesh_dim_names or ())
    columns = [names.index(dim) for dim in kept]
    rows = {rank: [(mesh.mesh == rank).nonzero()[:, column].tolist() for column in columns] for rank in ranks}
    places = sorted({tuple(one for found in row for one in found) for row in rows.values()})
    return f"{', '.join(kept)} {json.dumps(places)}"
