"""The weights by which parameters are dealt to ranks: the cost of the step of each, and whether it may be cut."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ddp_zero.core.local.costs import Cost, has_known_cost, known_cost, stated_cost
from ddp_zero.core.local.inner import may_be_cut
from ddp_zero.core.local.mixed import class_for, classes_in
from ddp_zero.core.local.parameters import Weigh, Weight


def weigher(optimizer_class: Callable[..., Optimizer], defaults: Mapping[str, Any], cost: Cost) -> Weigh | None:
    """The weights by which parameters are dealt; None if only their bytes count and all parameters are of one class.

    Args:
        optimizer_class: builds the inner optimizer.
        defaults: its options.
        cost: the value of ``cost=``.
    """
    of_classes = classes_in(optimizer_class)
    if not (len(of_classes) > 1 or callable(cost) or (cost == "auto" and any(map(has_known_cost, of_classes)))):
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
        return Weight(found, may_be_cut(optimizer_class, group))

    return weigh
