"""Parameter groups that are added to a sharded optimizer while it trains."""

from collections.abc import Callable
from contextlib import nullcontext

from ddp_zero.core.comm.agreement import Agreement
from ddp_zero.core.engine.engine import Engine
from ddp_zero.core.local.inner import check_epsilon, reserve_room
from ddp_zero.core.local.local_step import copy_options, localise_group
from ddp_zero.core.local.parameters import ParameterTable


def add_param_group(engine: Engine, add: Callable[[], None]) -> None:
    """See `ZeroRedundancyOptimizer.add_param_group`.

    Args:
        engine: of the optimizer.
        add: adds the group to the exposed ones.
    """
    sharded, hook = engine.sharded, engine.hook
    exposed, inner = sharded.param_groups, sharded.inner
    groups_before = len(exposed), len(inner.param_groups)
    moving = nullcontext() if hook is None else hook.late.while_memory_moves()
    try:
        with moving, Agreement(sharded.everyone, "add_param_group") as agreement:
            add()
            if any(param.grad is not None for param in exposed[-1]["params"]):
                engine.check_before_step("add_param_group() of parameters with gradients")
            table = ParameterTable(exposed)
            agreement.declare_parameters(table)
            binding = sharded.binding.extended(table)
            sharded.stepped.extend(table)
            stepped = sharded.stepped.own(binding.owned(), binding.owned_parts())
            inner.add_param_group(localise_group(exposed[-1], stepped))
            added = [(index, part) for index, part in binding.holdings() if index >= len(sharded.table)]
            reserve_room(inner, sharded.stepped, table, added)
            check_epsilon(inner, inner.param_groups, table, sharded.stepped)
    except Exception:
        sharded.stepped.own(sharded.binding.owned(), sharded.binding.owned_parts())  # while it knows the added ones
        sharded.stepped.extend(sharded.table)
        del exposed[groups_before[0] :], inner.param_groups[groups_before[1] :]
        raise
    with sharded.change():
        copy_options(inner.param_groups[-1], exposed[-1])
        sharded.order.is_as_built = False
        sharded.extend(table, binding)
