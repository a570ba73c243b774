"""The weights by which parameters are dealt to ranks: the cost of each step, whether it may be cut, stated owners."""

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.core.local.costs import Cost, has_known_cost, known_cost, stated_cost
from ddp_zero.core.local.inner import SteppedTogether, may_be_cut
from ddp_zero.core.local.mixed import class_for, classes_in
from ddp_zero.core.local.parameters import Weigh, Weight


def weigher(optimizer_class: Callable[..., Optimizer], defaults: Mapping[str, Any], cost: Cost) -> Weigh | None:
    """The weights by which parameters are dealt; None if only their bytes count and all parameters are of one class."""
    of_classes = classes_in(optimizer_class)
    knows_costs = callable(cost) or (cost == "auto" and any(map(has_known_cost, of_classes)))
    if not (len(of_classes) > 1 or knows_costs or any(map(_states_owners, of_classes))):
        return None

    def weigh(param: Tensor, group: Mapping[str, Any]) -> Weight:
        kind = class_for(optimizer_class, group)
        if callable(cost):
            found = stated_cost(cost, param, group)
        elif cost == "bytes":
            found = 0
        else:
            own = defaults if kind is of_classes[0] else {}
            found = known_cost(kind, param.shape, {**own, **group})
        owner = kind.owner_of(param) if _states_owners(kind) else None
        return Weight(found, may_be_cut(optimizer_class, group), owner)

    return weigh


def _states_owners(kind: object) -> TypeGuard[type[SteppedTogether]]:
    return isinstance(kind, type) and issubclass(kind, SteppedTogether)
