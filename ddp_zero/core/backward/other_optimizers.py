"""Other optimizers over the parameters of one that steps inside backward.

An optimizer's hook stays on its DDP model until it leaves: a pass for another optimizer through that model steps the
earlier one, too. Torch tells of the steps of all optimizers, so the loop hears of it in the first one.
"""

import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ddp_zero.core.backward.overlap_machine import OverlapMachine
from ddp_zero.core.ddp.reducer import in_backward
from ddp_zero.core.local.compiler import never_compiled
from ddp_zero.core.local.mixed import MixedOptimizer
from ddp_zero.core.step.rank_shard import Shard

_watched: "weakref.WeakSet[StepInside]" = weakref.WeakSet()


class StepInside:
    """The step that backward takes for an optimizer, until its ``step()`` is called.

    Args:
        optimizer: the one that users hold. Once it is gone, nobody can call that.
    """

    def __init__(self, optimizer: object, shard: Shard, machine: OverlapMachine) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._shard, self._machine = shard, machine
        _watch_optimizers()
        _watched.add(self)

    def check_comes_before(self, found: str, groups: Sequence[Mapping[str, Any]]) -> None:
        """See `check_others_confirmed`."""
        is_ahead = self._machine.is_torn or self._machine.is_unconfirmed
        if not is_ahead or self._optimizer() is None:
            return
        own, inner = self._shard.table.index_of, self._shard.inner
        inners = inner.suboptimizers.values() if isinstance(inner, MixedOptimizer) else (inner,)
        if any(groups is one.param_groups for one in inners):  # under `Join` these step outside of backward, too
            return
        if any(param in own for group in groups for param in group["params"]):
            self._machine.refuse_other(found, type(self._shard.inner).__name__)


def check_others_confirmed(found: str, groups: Sequence[Mapping[str, Any]]) -> None:
    """Check that backward has taken no step of one optimizer that a plain loop would not have, before another.

    Args:
        found: the step or construction of that one, as messages name it.
        groups: the other one's.

    Raises:
        RuntimeError: otherwise.
    """
    for one in list(_watched):
        one.check_comes_before(found, groups)


@cache
def _watch_optimizers() -> None:
    # after a step, not before: an optimizer that wraps this library's has called its ``step()`` by then
    register_optimizer_step_post_hook(_after_step)


@never_compiled
def _after_step(optimizer: Optimizer, *_: object) -> None:
    if not in_backward():  # else it is one of those below the optimizers that users hold
        check_others_confirmed(f"a step of {type(optimizer).__name__} over its parameters", optimizer.param_groups)
