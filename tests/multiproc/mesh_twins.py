"""Models over 2 x 2 ranks beside the same with the plain optimizer and reductions by hand, for tests."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from ddp_zero.parallel import ParallelOptimizer
from tests.multiproc.cases import Twins, batches, loss_of, sum_in_rank_order
from tests.multiproc.cut_models import CutBlock, gather_parts, is_cut
from tests.multiproc.experts import (
    average_experts,
    cut_mixture,
    dense_and_experts,
    expert_groups,
    wrapped_without_experts,
)
from tests.multiproc.parallel_models import OPTIONS, local_part, parallelized, squared

KINDS = ("experts", "cut, in DDP", "cut, without DDP", "distributed tensors")
DDP_OPTIONS: dict[str, Any] = {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0004}


def mesh_of_4() -> DeviceMesh:
    """Two data-parallel ranks times two with other parts."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))


class OverWholes:
    """The plain optimizer over whole parameters on every rank, for a model of which ranks hold parts."""

    def __init__(self, model: nn.Module, build: Callable[..., Optimizer], group: dist.ProcessGroup) -> None:
        self._group, self._rank = group, dist.get_rank(group)
        self._params: list[Any] = list(model.parameters())
        self._dims = [_cut_dim(name, param) for name, param in model.named_parameters()]
        parts = gather_parts([local_part(param) for param in self._params], group)
        self._sizes = [[part.shape[dim or 0] for part in every] for dim, every in zip(self._dims, parts, strict=True)]
        self._wholes = [nn.Parameter(one) for one in self._wholes_of(self._params)]
        self.plain = build(self._wholes, **OPTIONS)
        self.param_groups = self.plain.param_groups

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Step the wholes of the parts as they are, with the gradients that parts have. A collective of the group."""
        values, grads = self._wholes_of(self._params), self._wholes_of([_grad_like(param) for param in self._params])
        for whole, value, grad in zip(self._wholes, values, grads, strict=True):
            whole.copy_(value)
            whole.grad = grad
        self.plain.step()
        for dim, sizes, param, whole in zip(self._dims, self._sizes, self._params, self._wholes, strict=True):
            local_part(param).copy_(whole if dim is None else whole.split(sizes, dim)[self._rank])

    def _wholes_of(self, tensors: Sequence[Any]) -> list[Any]:
        """Of parameters, or of gradients, of which some may be None."""
        parts = iter(gather_parts([local_part(one) for one in tensors if one is not None], self._group))
        return [
            None if one is None else next(parts)[self._rank] if dim is None else torch.cat(next(parts), dim)
            for dim, one in zip(self._dims, tensors, strict=True)
        ]


def _grad_like(param: Any) -> Any:
    """The gradient, cut as the parameter is."""
    grad = param.grad
    is_distributed = isinstance(grad, DTensor) and isinstance(param, DTensor)
    return grad.redistribute(placements=param.placements) if is_distributed else grad


def _cut_dim(name: str, param: Any) -> int | None:
    if isinstance(param, DTensor):
        return next((one.dim for one in param.placements if isinstance(one, Shard)), None)
    return {"up": 0, "down": 1}.get(name.rpartition(".")[2])


class MeshTwins(Twins):
    """Two copies of a model: one for a `ParallelOptimizer`, and one for the plain optimizer.

    Args:
        kind: of `KINDS`.
        mesh: of 2 x 2 ranks, with dimensions ``data`` and ``tensor``, or of 2 x 2 x 2, with ``replicate`` and ``shard``
            in place of ``data``. One for all copies of a process: torch remembers
            operations on distributed tensors with the first mesh of a shape, groups included.
        build: the optimizer class.
        plain_hook: DDP's communication hook of the plain copy, with the group's ranks as its state.
        of_group: options of each parameter group that has a process group.
        wholes: for a class that steps whole matrices, sizes of the parts of hidden units; None for other classes.
        **options: of the `ParallelOptimizer`.
    """

    def __init__(
        self,
        kind: str,
        mesh: DeviceMesh,
        build: Callable[..., Optimizer] = AdamW,
        plain_hook: Any = None,
        of_group: Any = None,
        wholes: Sequence[int] | None = None,
        **options: Any,
    ) -> None:
        self.kind, self.mesh, self._sizes = kind, mesh, wholes
        self.has_experts = kind == "experts"
        names = mesh.mesh_dim_names or ()
        dims: Any = "data" if "data" in names else ("replicate", "shard")
        self.data: dist.ProcessGroup = mesh["data"].get_group() if dims == "data" else mesh[dims]._flatten().get_group()
        self.place = dist.get_rank() if self.has_experts else dist.get_rank(self.data)
        model, expected = self._model(), self._model()
        groups = self.groups(model)
        for one in groups if of_group else ():
            one.update(of_group if "process_group" in one else {})
        arguments = dict[str, Any](mesh=mesh, data_parallel_dim=dims)
        if self.has_experts:
            first = dist.get_rank() % 2 * 2
            arguments = {"global_names": {f"experts.local.{one}": f"experts.local.{first + one}" for one in range(2)}}
        hook = sum_in_rank_order if options.get("stage") == 2 and plain_hook is None else plain_hook
        if hook is not None and isinstance(expected, DistributedDataParallel):
            expected.register_comm_hook(expected.process_group, hook)
        self.foreach: dict[str, Any] = {"foreach": False} if kind == "distributed tensors" and wholes is None else {}
        if wholes is None:
            plain: Any = build(expected.parameters(), **self.foreach, **OPTIONS)
        else:
            plain = OverWholes(expected, build, mesh.get_group("tensor"))
        opt = ParallelOptimizer(model, build, groups, **arguments, **self.foreach, **options, **OPTIONS)
        super().__init__(expected, model, plain, opt, loss=self._loss, reduce=self._reduce)

    opt: Any

    def _model(self) -> nn.Module:
        if self.has_experts:
            spread, self.same = expert_groups(dist.get_rank(), 4, 2)
            return wrapped_without_experts(cut_mixture(dist.get_rank(), 2, 4, spread), **DDP_OPTIONS)
        if self.kind == "distributed tensors":
            hidden = 16 if self._sizes is None else sum(self._sizes)
            return parallelized(self.mesh["tensor"], hidden)
        group = self.mesh.get_group("tensor")
        model = nn.Sequential(*(CutBlock(group, seed=seed, sizes=self._sizes) for seed in (1, 2)))
        if self.kind == "cut, without DDP":
            return model
        return DistributedDataParallel(model, process_group=self.data, **DDP_OPTIONS)

    def groups(self, model: nn.Module) -> Any:
        """Parameter groups of our copy."""
        if self.has_experts:
            return dense_and_experts(model, self.same)
        if self.kind == "distributed tensors":
            return None
        named = list(model.named_parameters())
        return [
            {"params": [one for one in named if not is_cut(one[0])]},
            {"params": [one for one in named if one[0].endswith("up")], "sharded_over": {"tensor": 0}},
            {"params": [one for one in named if one[0].endswith("down")], "sharded_over": {"tensor": 1}},
        ]

    def _loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Of either copy."""
        if self.has_experts:
            return loss_of(model, *batch)
        if self.kind == "distributed tensors":
            loss: Tensor = (model(batch[0]) - 0.1).pow(4).mean()
            return loss
        return squared(model, batch)

    def _reduce(self, model: nn.Module) -> None:
        """Average the plain copy's gradients that DDP has not averaged, as a plain loop does."""
        if self.has_experts:
            average_experts(model, self.same)
        elif not isinstance(model, DistributedDataParallel):
            for param in model.parameters():
                if param.grad is not None:
                    grad = local_part(param.grad).mul_(1.0 / dist.get_world_size(self.data))
                    dist.all_reduce(grad, group=self.data)

    def clip_plain(self, limit: float) -> None:
        """Clip the plain copy's gradients by the norm that ours has found, which other tests compare with one device.

        Fails if nothing was clipped.
        """
        record = self.opt.last_step
        assert record is not None
        assert record.grad_norm is not None
        factor = torch.clamp(limit / (torch.tensor(record.grad_norm) + 1e-6), max=1.0)
        assert factor < 1
        for param in self.plain_model.parameters():
            if param.grad is not None:
                local_part(param.grad).mul_(factor)

    def train_and_compare(
        self, steps: int = 4, clip: float | None = None, after: Callable[[], None] = lambda: None
    ) -> None:
        """Train both copies, calling ``after`` after each step of ours, and compare after each."""
        for step, batch in enumerate(batches(self.place, steps)):
            self.zero_grad()
            self.backward(batch)
            self.opt.step()
            after()
            assert self.opt.last_step is not None
            assert self.opt.last_step.stepped
            if clip is not None:
                self.clip_plain(clip)
            self.plain.step()
            self.assert_equal(f"after step {step}: {self.kind}")
        self.assert_moved()
