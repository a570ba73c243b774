"""The cost of a parameter's step, by which parameters are dealt to ranks.

A cost is counted in multiply-adds of a matrix product in the dtype that Muon uses, bfloat16. Only ratios count, and
only roughly: a step of AdamW moves memory, which costs as much as `ELEMENT` multiply-adds per element on a core with
matrix units (measured: 210 to 960, ``python -m benchmarks.matrix --costs``).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeGuard

from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.core.local.inner import SteppedTogether, may_be_cut
from ddp_zero.core.local.mixed import class_for, classes_in
from ddp_zero.core.local.parameters import HintsOf, PartitionHints
from ddp_zero.core.plan.partition import Item, Loads, partition_by_cost, partition_greedy
from ddp_zero.core.plan.weighted import byte_limit

Cost = Literal["auto", "bytes"] | Callable[[Tensor, Mapping[str, Any]], float]
"""The value of ``cost=``: chosen by the class, bytes only, or a function of a parameter and its group's options."""

ELEMENT = 256
"""Cost of an element in a step that computes with elements, such as AdamW's."""

_FP32 = 4
"""Cost of a multiply-add in fp32 matrix products and decompositions."""

_UNIT = 1 << 16
"""Parts of one unit of a user's cost that are still told apart."""

Shape = Sequence[int]


def cost_of_muon(shape: Shape, options: Mapping[str, Any]) -> int:
    """Newton-Schulz iterations: of k x l, k <= l, each is two products of k k l and one of k k k."""
    rows, columns = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    small, large = min(rows, columns), max(rows, columns)
    iterations = int(options.get("ns_steps", 5))
    if not options.get("use_muon", True) or len(shape) < 2:
        return ELEMENT * math.prod(shape)
    return iterations * (2 * small * small * large + small**3) + ELEMENT // 4 * small * large


def cost_of_soap(shape: Shape, options: Mapping[str, Any]) -> int:
    """Statistics, and four changes of basis, per dimension and step; a decomposition of each now and then."""
    every = int(options.get("precondition_frequency", 10))
    largest = int(options.get("max_precondition_dim", 10_000))
    has_bases = len(shape) > 1 or options.get("precondition_1d", False)
    dims = [dim for dim in shape if dim <= largest] if has_bases else []
    products = 5 * math.prod(shape) * sum(dims) + 6 * sum(dim**3 for dim in dims) // every
    return ELEMENT * math.prod(shape) + _FP32 * products


def cost_of_shampoo(shape: Shape, options: Mapping[str, Any]) -> int:
    """Statistics and a product with the preconditioner, per dimension and step; a root of each now and then."""
    every = int(options.get("preconditioning_compute_steps", 1))
    products = 2 * math.prod(shape) * sum(shape) + 20 * sum(dim**3 for dim in shape) // every
    return ELEMENT * math.prod(shape) + _FP32 * products


def cost_of_scalable_shampoo(shape: Shape, options: Mapping[str, Any]) -> int:
    """As `cost_of_shampoo`, over blocks."""
    block = int(options.get("block_size", 512))
    every = int(options.get("preconditioning_compute_steps", 1000))
    dims = [min(dim, block) for dim in shape] if len(shape) > 1 else []
    blocks = math.prod(-(-dim // block) for dim in shape)
    products = 3 * math.prod(shape) * sum(dims) + 30 * blocks * sum(dim**3 for dim in dims) // every
    return ELEMENT * math.prod(shape) + _FP32 * products


_COSTS: dict[tuple[str, str], Callable[[Shape, Mapping[str, Any]], int]] = {
    ("torch", "Muon"): cost_of_muon,
    ("muon", "SingleDeviceMuon"): cost_of_muon,
    ("muon", "SingleDeviceMuonWithAuxAdam"): cost_of_muon,
    **{("pytorch_optimizer", name): cost_of_muon for name in ("Muon", "AdaMuon", "NorMuon", "AdaGO")},
    ("pytorch_optimizer", "SOAP"): cost_of_soap,
    ("pytorch_optimizer", "Shampoo"): cost_of_shampoo,
    ("pytorch_optimizer", "ScalableShampoo"): cost_of_scalable_shampoo,
}
"""Known costs, by package and name of the class."""


def has_known_cost(optimizer_class: object) -> bool:
    return _lookup(optimizer_class) is not None


def known_cost(optimizer_class: object, shape: Shape, options: Mapping[str, Any]) -> int:
    """The cost of a step, by options of class and group; proportional to elements if the class is not known."""
    found = _lookup(optimizer_class)
    return ELEMENT * math.prod(shape) if found is None else found(shape, options)


def deal_by_cost(
    wholes: Sequence[tuple[object, Shape, Mapping[str, Any]]],
    nbytes: Sequence[int] | None,
    ranks: int,
    max_byte_imbalance: float,
) -> list[int]:
    """The rank that steps each parameter, by class, shape and options; with ``nbytes`` of None, bytes do not count."""
    items = [Item(known_cost(*whole), size) for whole, size in zip(wholes, nbytes or [1] * len(wholes), strict=True)]
    loads = [0] * ranks
    limit = len(items)
    if nbytes is not None:
        for rank, size in zip(partition_greedy(nbytes, ranks), nbytes, strict=True):
            loads[rank] += size
        limit = byte_limit(loads, max_byte_imbalance)
    return [*partition_by_cost(items, Loads(ranks), limit)]


def stated_cost(cost: Callable[[Tensor, Mapping[str, Any]], float], param: Tensor, group: Mapping[str, Any]) -> int:
    """A user's cost as an integer; TypeError if it is not a number, ValueError if it is negative or not finite."""
    found = cost(param, group)
    if isinstance(found, bool) or not isinstance(found, int | float):
        raise TypeError(f"Expected cost= to return a number, got {found!r:.80}. [ZERO-127]")
    if not (math.isfinite(found) and found >= 0):
        raise ValueError(f"Expected cost= to return a finite number of at least 0, got {found!r}. [ZERO-127]")
    return round(found * _UNIT)


def check_cost(cost: object, max_byte_imbalance: object) -> None:
    """Check the options of the partition by cost; TypeError for a wrong type, ValueError for a wrong name or bound."""
    if cost not in ("auto", "bytes") and not callable(cost):
        raise ValueError(f"Expected cost to be 'auto', 'bytes' or a function, got {cost!r:.80}. [ZERO-127]")
    if isinstance(max_byte_imbalance, bool) or not isinstance(max_byte_imbalance, int | float):
        raise TypeError(f"Expected max_byte_imbalance to be a number, got {max_byte_imbalance!r:.80}. [ZERO-127]")
    if not 1 <= max_byte_imbalance < math.inf:
        raise ValueError(f"Expected max_byte_imbalance of at least 1, got {max_byte_imbalance!r}. [ZERO-127]")


def make_hints_of(optimizer_class: Callable[..., Optimizer], defaults: Mapping[str, Any], cost: Cost) -> HintsOf | None:
    """A function that gives partition hints; None if only bytes count and all parameters are of one class."""
    of_classes = classes_in(optimizer_class)
    knows_costs = callable(cost) or (cost == "auto" and any(map(has_known_cost, of_classes)))
    if not (len(of_classes) > 1 or knows_costs or any(map(_states_owners, of_classes))):
        return None

    def hints_of(param: Tensor, group: Mapping[str, Any]) -> PartitionHints:
        kind = class_for(optimizer_class, group)
        if callable(cost):
            found = stated_cost(cost, param, group)
        elif cost == "bytes":
            found = 0
        else:
            own = defaults if kind is of_classes[0] else {}
            found = known_cost(kind, param.shape, {**own, **group})
        owner = kind.owner_of(param) if _states_owners(kind) else None
        return PartitionHints(found, may_be_cut(optimizer_class, group), owner)

    return hints_of


def _states_owners(kind: object) -> TypeGuard[type[SteppedTogether]]:
    return isinstance(kind, type) and issubclass(kind, SteppedTogether)


def _lookup(optimizer_class: object) -> Callable[[Shape, Mapping[str, Any]], int] | None:
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        return None
    ancestors = ((base.__module__.partition(".")[0], base.__name__) for base in optimizer_class.__mro__)
    return next((_COSTS[name] for name in ancestors if name in _COSTS), None)
