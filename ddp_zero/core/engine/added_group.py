"""Adds a parameter group to an optimizer."""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_zero.core.comm.ranks import Agreement
from ddp_zero.core.engine.attachment import Attachment
from ddp_zero.core.engine.shardable import check_unknown_classes
from ddp_zero.core.local.arguments import check_in_one_group
from ddp_zero.core.local.inner import check_epsilon, copy_options, local_group, options_known_to
from ddp_zero.core.local.mixed import CLASS_KEY, ParamGroup, with_class
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.error_codes import ending_with


class AddedGroup:
    """A parameter group that all ranks have agreed to add, and step from `commit` on.

    The constructor is a collective. It raises ValueError if the parameters are already in a group or differ between
    ranks, RuntimeError if it failed on another rank; then nothing is changed. ``table`` has all parameters, those of
    the group at the end.
    """

    def __init__(self, attachment: Attachment, param_group: ParamGroup) -> None:
        self._shard = shard = attachment.shard
        exposed, inner = shard.param_groups, shard.inner
        self._groups_before = len(exposed), len(inner.param_groups)
        moving = nullcontext() if attachment.hook is None else attachment.hook.late_changes.while_memory_moves()
        try:
            with moving, Agreement(shard.everyone, "add_param_group") as agreement:
                optimizer: Any = attachment.joinable
                check_in_one_group([*exposed, param_group])
                keys = list(param_group) if isinstance(param_group, dict) else []  # without defaults
                if "param_names" in exposed[0]:
                    self.add_param_names(param_group, exposed, attachment.passes.models.alive)
                with ending_with("[ZERO-102]"):
                    with_class(optimizer, inner, param_group, partial(Optimizer.add_param_group, optimizer))
                if any(param.grad is not None for param in exposed[-1]["params"]):
                    attachment.check_before_step("add_param_group() of parameters with gradients")
                self.table = table = ParameterTable(exposed, shard.table.hints_of)
                agreement.declare_parameters(table)
                agreement.declare("class of the group", exposed[-1].get(CLASS_KEY))
                build: Any = optimizer._build
                own = {key: exposed[-1][key] for key in keys if key in exposed[-1]}
                check_unknown_classes(build.args[0], build.keywords["defaults"], [own])
                self._binding = binding = shard.binding.for_table(table)
                shard.targets.extend(table)
                stepped = shard.targets.assign(binding.owned_parts())
                inner.add_param_group(local_group(exposed[-1], stepped))
                agreement.declare_options(inner.param_groups[-1], options_known_to(inner), "the added group")
                check_epsilon(inner, inner.param_groups, table, shard.targets)
        except Exception:
            self.undo()
            raise

    @staticmethod
    def add_param_names(param_group: ParamGroup, groups: Sequence[ParamGroup], models: Iterable[nn.Module]) -> None:
        """Give ``param_names`` to a group without: all groups have them, or none; `shard_optimizer` gives them."""
        given = param_group.get("params") if isinstance(param_group, dict) else None
        if not isinstance(given, Iterable) or isinstance(given, set):
            return  # torch refuses it
        params = param_group["params"] = [given] if isinstance(given, Tensor) else list(given)
        if all(isinstance(one, Tensor) for one in params):
            taken = {name for group in groups for name in group["param_names"]}
            first = sum(len(group["params"]) for group in groups)
            named = [pair for model in models for pair in model.named_parameters()]
            name_of = {param: name for name, param in named if name not in taken}
            names = [name_of.get(one, f"added.{place}") for place, one in enumerate(params, first)]
            param_group.setdefault("param_names", names)

    def commit(self) -> None:
        """Step the group from now on. Never communicates."""
        shard = self._shard
        with shard.changing_state():
            copy_options(shard.inner.param_groups[-1], shard.param_groups[-1])
            shard.order.is_as_constructed = False
            shard.extend(self.table, self._binding)

    def undo(self) -> None:
        """Remove the group again, instead of `commit`. Never communicates."""
        shard = self._shard
        shard.targets.assign(shard.binding.owned_parts())  # while it knows the added parameters
        shard.targets.extend(shard.table)
        del shard.param_groups[self._groups_before[0] :], shard.inner.param_groups[self._groups_before[1] :]
