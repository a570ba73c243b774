"""Takes back the very first step inside backward, where the user turns out to need gradients before the step.

Whether a loop clips or unscales gradients between ``backward()`` and ``opt.step()``, as with `torch.amp.GradScaler`,
shows only after the first backward pass, which has stepped already. So what that step changes is remembered until the
next call tells; if it was too early, it is undone, and from then on the step waits for ``opt.step()``.
"""

import copy

import torch

from ddp_zero.sharded_step import ShardedStep


class StepMemory:
    """What a step is about to change on this rank: made right before it.

    Costs the memory of this rank's parameters, and of their state if they have any yet.
    """

    def __init__(self, sharded: ShardedStep) -> None:
        self._sharded = sharded
        stepped = sharded.stepped
        owned = sharded.binding.owned()
        self._params = {index: sharded.table.params[index].detach().clone() for index in owned}
        self._masters = {index: master.detach().clone() for index, master in stepped.masters.items()}
        self._state = {key: copy.deepcopy(value) for key, value in sharded.inner.state.items()}
        self._order = copy.copy(sharded.order)

    @torch.no_grad()
    def take_back(self) -> None:
        """Undo the step, on every rank. A collective: owners send what their parameters were."""
        sharded = self._sharded
        for index, value in self._params.items():
            sharded.table.params[index].copy_(value)
        for index, value in self._masters.items():
            sharded.stepped[index].copy_(value)
        sharded.inner.state.clear()
        sharded.inner.state.update(self._state)
        sharded.order = self._order
        sharded.last_step = None
        sharded.local_step.take_back()
        for bucket in sharded.binding.plan.buckets:
            sharded.binding.sync.start(bucket)
        sharded.binding.sync.finish()
        sharded.stepped.note_versions()
