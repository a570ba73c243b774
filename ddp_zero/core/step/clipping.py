"""Norms of gradients that are spread over ranks: one small collective, and the same bits as on one rank.

Each owner computes the norms of its gradients. All ranks gather these norms and combine them in the order of the
model's parameters, as torch's ``clip_grad_norm_(model.parameters())`` does on one rank: to the same bits if all
gradients have one dtype. (With several dtypes, torch combines norms dtype by dtype, fp16 and bf16 norms in that dtype;
here they are fp32.)
"""

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from operator import attrgetter, eq, is_, itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.core.local.parameters import LOW_PRECISION
from ddp_zero.core.plan.ownership import Pieces
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.options import StepOptions
from ddp_zero.values.placeholders import AbsentGradient

_NO_GRADIENT = -1.0  # no norm is negative
_GRAD, _DTYPE, _DEVICE, _DEVICE_TYPE = map(attrgetter, ("grad", "dtype", "device", "device.type"))
_KIND = attrgetter("dtype", "device")

GROUP_LIMIT = "max_grad_norm"
"""The key of a parameter group's own limit of the norm of its gradients."""

WHOLE, COMMON = -2, -1
"""Keys of `GradientStats.totals`: the norm of all gradients, and the norm of groups without a limit of their own."""


@dataclass(frozen=True)
class NonfiniteGradient:
    """The parameter, and if known the rank, whose gradient was not finite."""

    parameter: str  # its name
    rank: int | None  # the first group rank whose own gradient was not finite before averaging, if known
    description: str  # for messages


@dataclass(frozen=True)
class GradientStats:
    """Norms and flags of the gradients of one optimizer, the same on all of its data-parallel ranks."""

    # norms by `WHOLE`, `COMMON` or the index of a group with its own limit; None: no gradients
    totals: Mapping[int, Tensor | None] = field(default_factory=dict)
    norm_type: float = 2.0  # order of the p-norm
    flag: Tensor | float = 0.0  # above 0 if a gradient was not finite
    find: Callable[[], NonfiniteGradient | None] = lambda: None  # finds that gradient; a collective of these ranks


Result = TypeVar("Result")


TwoPhase = Generator[GradientStats, GradientStats, Result]
"""A step or a clip as a generator: it reads the optimizer's own gradients and yields their stats, which its caller
joins with the stats of other optimizers; when it is sent the result, it acts. If there is nothing to decide, it does
not yield.

It must not yield within a context manager: the generators of several optimizers are suspended side by side.
"""


class RestOfModel:
    """The part of the model that an optimizer does not hold, for decisions about the whole model. This class: nothing.

    `ddp_zero.parallel` overrides it for ranks with other experts, other parts of parameters and other stages.
    """

    def counted(self, norms: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """The norms, by parameter, that this rank adds to the total; other ranks that hold the same add the others."""
        return norms

    def stats_of_whole_model(self, stats: GradientStats) -> GradientStats:
        """The stats of the whole model, where this optimizer is stepped alone; RuntimeError if it is not whole."""
        return stats

    def find_nonfinite(self, stats: GradientStats) -> NonfiniteGradient | None:
        """Find a non-finite gradient, after joined stats have shown that there is one. A collective."""
        return stats.find()


def norms_of(grads: Mapping[int, Tensor], norm_type: float, *, rounds: bool) -> dict[int, Tensor]:
    """The norm of each gradient, in its dtype; for fp16 and bf16 in fp32, unless it ``rounds`` as torch's clipping."""
    all_grads = [*grads.values()]
    is_wide = rounds or {*map(_DTYPE, all_grads)}.isdisjoint(LOW_PRECISION)
    if (
        all_grads
        and is_wide
        and 0 not in map(Tensor.numel, all_grads)
        and {"cpu"}.issuperset(map(_DEVICE_TYPE, all_grads))
    ):
        return dict(zip(grads, torch._foreach_norm(all_grads, norm_type), strict=True))
    in_own_dtype = {i: grad for i, grad in grads.items() if rounds or grad.dtype not in LOW_PRECISION}
    nonempty = {i: grad for i, grad in in_own_dtype.items() if 0 not in grad.shape}
    if nonempty and next(iter(nonempty.values())).device.type != "cpu":
        nonempty = {i: g for i, g in nonempty.items() if _is_aligned(g)} if len(nonempty) == len(grads) else {}
    # on the CPU this takes the norms one by one
    fused = dict(zip(nonempty, torch._foreach_norm([*nonempty.values()], norm_type), strict=True)) if nonempty else {}
    return {i: fused[i] if i in fused else norm_of(grad, norm_type, rounds=rounds) for i, grad in grads.items()}


def norm_of(grad: Tensor, norm_type: float, *, rounds: bool) -> Tensor:
    """The norm of one gradient, in the dtype that `norms_of` documents."""
    dtype = torch.float32 if grad.dtype in LOW_PRECISION and not rounds else None
    if not grad.numel():  # an empty gradient has no largest element
        return grad.new_zeros((), dtype=dtype or grad.dtype.to_real())
    if dtype is None and grad.device.type != "cpu":  # by the kernel of torch's clipping
        aligned = grad if _is_aligned(grad) else grad.clone()
        return torch._foreach_norm([aligned], norm_type)[0]
    norm: Tensor = torch.linalg.vector_norm(grad, norm_type, dtype=dtype)
    return norm


def _is_aligned(grad: Tensor) -> bool:
    """True if a gradient begins at a multiple of four elements, as an allocation does.

    CUDA's norms read vectors of four elements where they can, which adds in a different order than element by element.
    """
    return grad.data_ptr() % (4 * grad.element_size()) == 0


class NormGatherer:
    """Gathers the norms of all gradients from their owners.

    Each rank sends a tensor of one size: its flag, then the norms of the parameters that it owns, in order of index.
    """

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._pieces: Sequence[Pieces] = ()  # of the plan that the attributes below are computed from
        self._norm_order: Sequence[int] = ()  # the table's, likewise
        self._order: list[int] = []  # the parameters that have an owner, in ``_norm_order``
        self._owned: list[int] = []  # the parameters whose norms this rank sends
        self._width = 0  # how many numbers each rank sends
        self._places: list[list[int]] = []  # by ``_order``: positions of the norms of each owner among all numbers

    def _follow_plan(self) -> None:
        """Compute the places of norms in the message from the owners and the order of norms of now."""
        binding, comm = self.shard.binding, self.shard.comm
        self._pieces, self._norm_order = binding.pieces, self.shard.table.norm_order
        owned_by: list[list[int]] = [[] for _ in range(comm.world_size)]
        for index, pieces in enumerate(self._pieces):
            for piece in pieces:
                owned_by[piece.owner].append(index)
        self._owned, self._width = owned_by[comm.group_rank], max(map(len, owned_by)) + 1
        places: dict[int, list[int]] = {}
        for rank, indices in enumerate(owned_by):
            for place, index in enumerate(indices, rank * self._width + 1):
                places.setdefault(index, []).append(place)
        self._order = [index for index in self._norm_order if index in places]
        self._places = [places[index] for index in self._order]

    def gather(
        self,
        norms: Mapping[int, Tensor],
        norm_type: float,
        flag: Tensor | float = 0.0,
        may_have_joined: bool = False,
        *,
        rounds: bool,
    ) -> tuple[dict[int, Tensor], Tensor]:
        """Gather all norms, by index, in `ParameterTable.norm_order`, and the sum of all flags. A collective.

        Args:
            norms: of this rank's parameters that have a gradient, by index. For a parameter that is cut, either each
                owner gives the norm of its part, or a single owner gives the norm of the whole.
            norm_type: order of the p-norm.
            flag: above 0 if this rank has found a gradient that is not finite; not negative.
            may_have_joined: whether some ranks may have run out of inputs, and so do not know which parameters have
                gradients. Then, or if some parameters have no gradient, this waits for the device.
            rounds: see `norms_of`.
        """
        table, comm = self.shard.table, self.shard.comm
        if self._pieces is not self.shard.binding.pieces or self._norm_order is not table.norm_order:
            self._follow_plan()
        device = next(iter(norms.values())).device if norms else table.accelerator()
        local = torch.full((self._width,), _NO_GRADIENT, dtype=torch.float64, device=device)
        local[0].fill_(flag)  # an assignment would wait for the GPU: torch copies the number from the host
        _write_norms(local[1:], [*map(norms.get, self._owned)])
        gathered = torch.stack(comm.all_gather_tensor(local))
        order, places = self._order, self._places
        if may_have_joined or any(map(is_, map(_GRAD, table.params), repeat(None))):
            has_gradient = (gathered != _NO_GRADIENT).flatten().tolist()
            present = [[place for place in of_owners if has_gradient[place]] for of_owners in places]
            order = [index for index, of_owners in zip(order, present, strict=True) if of_owners]
            places = [of_owners for of_owners in present if of_owners]
        combined = _combine_parts(gathered.flatten().unbind(), places, norm_type)
        dtypes = [*map(_DTYPE, map(table.params.__getitem__, order))]
        dtype_of_norm = {dtype: _dtype_of_norm(dtype, rounds=rounds) for dtype in set(dtypes)}
        norm_of_index: dict[int, Tensor] = dict(zip(order, combined, strict=True))
        for dtype in set(dtype_of_norm.values()):  # one operation for all of a dtype
            members = [*compress(order, map(eq, map(dtype_of_norm.__getitem__, dtypes), repeat(dtype)))]
            same_dtype = torch.stack([*map(norm_of_index.__getitem__, members)])
            norm_of_index |= zip(members, same_dtype.to(dtype).unbind(), strict=True)
        return norm_of_index, gathered[:, 0].sum()


def _dtype_of_norm(dtype: torch.dtype, *, rounds: bool) -> torch.dtype:
    return torch.float32 if dtype in LOW_PRECISION and not rounds else dtype.to_real()


def _write_norms(places: Tensor, norms: Sequence[Tensor | None]) -> None:
    """Write norms to a tensor, in order, one operation per dtype; an element without a norm stays as it is."""
    device = places.device
    if {Tensor}.issuperset(map(type, norms)) and len({*map(_KIND, norms)}) == 1:  # as most often
        present: list[Any] = [*norms]  # none is None
        places[: len(norms)] = torch.maximum(places[: len(norms)], torch.stack(present).to(device))
        return
    for dtype in {norm.dtype for norm in norms if norm is not None}:
        absent = torch.full((), _NO_GRADIENT, dtype=dtype, device=device)
        present = [absent if norm is None or norm.dtype != dtype else norm for norm in norms]
        on_device = [norm if norm.device == device else norm.to(device) for norm in present]
        places[: len(norms)] = torch.maximum(places[: len(norms)], torch.stack(on_device))


def _combine_parts(numbers: Sequence[Tensor], places: Sequence[Sequence[int]], norm_type: float) -> list[Tensor]:
    """The norm of each gradient in fp64, from the norms of its parts, which are at these places of ``numbers``.

    A norm of the whole, from a single owner, is returned to the bit. One operation combines all gradients that have the
    same number of parts.
    """
    sizes = [*map(len, places)]
    combined = [*map(numbers.__getitem__, map(itemgetter(0), places))]
    for num_parts in {*sizes} - {1}:
        members = [*compress(range(len(places)), map(eq, sizes, repeat(num_parts)))]
        parts = map(numbers.__getitem__, chain.from_iterable(map(places.__getitem__, members)))
        part_norms = torch.stack([*parts]).view(-1, num_parts)
        is_given = part_norms != _NO_GRADIENT
        norms = torch.where(is_given, part_norms, 0.0)
        is_whole = is_given.sum(1) == 1
        norm = torch.linalg.vector_norm(norms, norm_type, dim=1)
        whole = torch.where(is_whole, norms.amax(1), norm).unbind()
        deque(map(combined.__setitem__, members, whole), maxlen=0)
    return combined


def total_norm(norms: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norm of a list of norms; 0 if it is empty."""
    if not norms:
        return torch.tensor(0.0)
    on_device = norms if len({*map(_DEVICE, norms)}) == 1 else [norm.to(norms[0].device) for norm in norms]
    total: Tensor = torch.linalg.vector_norm(torch.stack([*on_device]), norm_type)
    return total


def coefficient_of(total: Tensor, max_norm: float) -> Tensor:
    """The factor that brings the norm of gradients to at most ``max_norm``, as torch computes it."""
    return torch.clamp(max_norm / (total + 1e-6), max=1.0)


def clip_gradients(
    owners: NormGatherer,
    indices: Sequence[int],
    max_norm: float,
    norm_type: float,
    *,
    are_on_owners: bool,
    rounds: bool,
    inverse_scale: float | None,
    rest_of_model: RestOfModel,
    check: Callable[[Tensor], None],
) -> TwoPhase[tuple[Tensor, Tensor, dict[int, Tensor]]]:
    """Scale gradients in ``param.grad`` so that their norm over all ranks is at most ``max_norm``.

    Args:
        owners: gathers norms from the owners of the gradients.
        indices: the parameters to clip, the same on every rank; their norms add up in this order.
        max_norm: the largest norm.
        norm_type: order of the p-norm; ``inf`` for the largest absolute value.
        are_on_owners: True if gradients count only on their owners; then this is a collective.
        rounds: see `norms_of`; False with a loss scale.
        inverse_scale: one over the loss scale, by which gradients are multiplied for their norms; None: no loss scale.
            The gradients themselves are multiplied only in the step, since they may underflow before.
        rest_of_model: the parameters of other optimizers.
        check: called with the norm before anything is changed; may raise.

    Returns the norm before clipping, the coefficient, and the norms of all parameters by index; the same on every rank.
    Raises RuntimeError if gradients were used up by a step inside backward.
    """
    shard = owners.shard
    params, owns = shard.table.params, shard.binding.owns
    grads: dict[int, Tensor] = {}
    for index in indices:
        grad = params[index].grad
        if grad is None or (are_on_owners and not owns(index)):
            continue
        counted_elements = shard.targets.owned_gradient(index) if are_on_owners else grad
        if counted_elements is None:
            assert isinstance(grad, AbsentGradient), "every other gradient is on this rank"
            grad.refuse()
        grads[index] = counted_elements
    if inverse_scale is None:
        norms = norms_of(grads, norm_type, rounds=rounds)
    else:
        norms = {index: _norm_unscaled(grad, norm_type, inverse_scale) for index, grad in grads.items()}
    if are_on_owners:
        norms_of_all, _ = owners.gather(norms, norm_type, rounds=rounds)
        norms = {index: norms_of_all[index] for index in indices if index in norms_of_all}
    local_total = total_norm([*rest_of_model.counted(norms).values()], norm_type)
    joint_stats = yield GradientStats({WHOLE: local_total}, norm_type)
    total = joint_stats.totals[WHOLE]
    assert total is not None, "the norm of no gradients is 0"
    check(total)
    coefficient = coefficient_of(total, max_norm)
    for device in {grad.device for grad in grads.values()}:
        torch._foreach_mul_([grad for grad in grads.values() if grad.device == device], coefficient.to(device))
    return total, coefficient, norms


def _norm_unscaled(grad: Tensor, norm_type: float, inverse_scale: float) -> Tensor:
    """The norm of a gradient divided by the loss scale, computed in fp32 at least."""
    wide = grad.float() if grad.dtype in LOW_PRECISION else grad
    return norm_of(wide * inverse_scale, norm_type, rounds=False)


def check_options(options: StepOptions, inner: Optimizer) -> None:
    """Raise ValueError for ``max_grad_norm`` where the inner optimizer has an option of that name."""
    if options.max_grad_norm is not None and GROUP_LIMIT in inner.defaults:
        raise ValueError(
            f"max_grad_norm is an option of ddp_zero and of {type(inner).__name__}, whose own would clip only by this "
            "rank's shard. Give the class its own in its parameter groups, or by functools.partial(..., "
            "max_grad_norm=...) in place of the class, and clip by opt.clip_grad_norm_() in the loop. [ZERO-105]"
        )
