"""Replica groups of torchft, real lighthouse and managers, next to the same groups with the plain optimizer."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from tests.frameworks.job import as_a_job, assert_equal, values
from tests.multiproc.harness import Cases, Setup

pytest.importorskip("torchft")

from ddp_zero import DynamicLossScale, checkpoint
from ddp_zero.integrations.torchft import ManagedOptimizer, prepare
from ddp_zero.optimizer import shard_of
from tests.frameworks.replica_groups import OPTIONS, STEPS, Groups, Net, Recipe, Run, equal_training, inputs_of, trained

case = Cases(as_a_job, timeout=300)

MODES: dict[str, Recipe] = {
    "stage 1": Recipe(1),
    "stage 1, not overlapped, no hook": Recipe(1, {"overlap": False}),
    "stage 2": Recipe(2),
    "stage 2, the quorum before the forward pass": Recipe(2, is_async=False),
    "stage 2, parameters in flight": Recipe(2, {"sync": "forward"}),
}
RECIPES: dict[str, Recipe] = {
    "clip": Recipe(clip=0.05),
    "clip values": Recipe(clip_value=0.01),
    "clip and accumulate": Recipe(clip=0.05, accumulate=3),
    "momentum": Recipe(optimizer=partial(SGD, momentum=0.9)),
    "loss scale": Recipe(options={"loss_scale": DynamicLossScale(2.0**10, growth_interval=3)}, clip_inside=0.05),
}


@case(4)
def _is_bit_equal_to_the_plain_optimizer(setup: Setup) -> None:
    for name, recipe in MODES.items():
        ours = equal_training(setup, recipe, name)
        _sends_what_a_rank_owns(ours, name)


def _sends_what_a_rank_owns(run: Run, where: str) -> None:
    """A step sends the gradients that this rank owns, and a flag for each."""
    shard = shard_of(run.opt.optim)
    owned = [shard.table.params[index] for index in shard.binding.owned()]
    assert 0 < len(owned) < len(shard.table.params)
    per_step = sum(param.nbytes for param in owned) + 4 * len(owned)
    assert run.sent == per_step * len(run.committed), (where, run.sent, per_step)


@case(4)
def _recipes_are_bit_equal_to_the_plain_optimizer(setup: Setup) -> None:
    for name, recipe in RECIPES.items():
        for stage in (1, 2):
            if name == "clip and accumulate" and stage == 1:
                continue
            run = equal_training(setup, replace(recipe, stage=stage), f"{name}, stage {stage}")
            if name == "loss scale":
                assert run.opt.loss_scale == 2.0**12, "the scale has grown twice, in groups that have missed steps too"


@case(2)
def _groups_of_one_rank_are_bit_equal_to_the_plain_optimizer(setup: Setup) -> None:
    for stage in (1, 2):
        equal_training(setup, Recipe(stage, clip=0.05), f"one rank, stage {stage}")


@case(2)
def _a_closure_may_begin_the_quorum(setup: Setup) -> None:
    groups = Groups(setup, is_async=True, init_sync=False)
    manager = groups.manager()
    ddp = DistributedDataParallel(Net(), process_group=groups.pair, gradient_as_bucket_view=True)
    opt = prepare(manager, ddp, AdamW, stage=2, **OPTIONS)

    def closure() -> Tensor:
        opt.zero_grad()
        loss: Tensor = ddp(inputs_of(setup, 0, 0), (0, 1, 2)).square().mean()
        loss.backward()
        return loss

    for step in (1, 2):
        assert opt.step(closure) > 0
        assert manager.current_step() == opt.last_step.number == step
    manager.shutdown(wait=False)
    dist.barrier()


@case(4)
def _masters_are_healed_as_well(setup: Setup) -> None:
    run = trained(setup, Recipe(2, {"master_weights": True}, dtype=torch.bfloat16))
    masters = run.opt.master_weights
    assert masters
    mine = {name: masters[param] for name, param in run.ddp.module.named_parameters() if param in masters}
    every: list[Any] = [None] * setup.world_size
    dist.all_gather_object(every, (run.model, mine))
    for rank in range(2):
        assert_equal(every[rank], every[rank + 2], f"rank {rank} of both groups")
    assert_equal(every[0][0], every[1][0], "within a group")


@case(4)
def _a_parameter_that_only_some_groups_have_used_counts_as_zeros_elsewhere(setup: Setup) -> None:
    def uses(group: int, step: int) -> tuple[int, ...]:
        return (0, 1 + group) if step % 2 else (0,)

    expected = _by_ddp_of_all_ranks(setup, uses)
    for stage in (1, 2):
        recipe = Recipe(stage, uses=uses, finds_unused=True, refuses=False, has_schedule=False)
        run = trained(setup, recipe)
        assert_equal(expected, run.model, f"stage {stage}")


def _by_ddp_of_all_ranks(setup: Setup, uses: Callable[[int, int], tuple[int, ...]]) -> dict[str, Tensor]:
    """Parameters after training in one DDP model that adds up pairs of ranks first, as replica groups do."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]

    def hook(state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        buffer = bucket.buffer()
        for group in (pairs[setup.rank // 2], across[setup.rank % 2]):
            dist.all_reduce(buffer.div_(2), group=group)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(buffer)
        return future

    net = Net()
    ddp = DistributedDataParallel(net, find_unused_parameters=True, bucket_cap_mb=0.001)
    ddp.register_comm_hook(None, hook)
    opt = AdamW(net.parameters(), **OPTIONS)
    for step in range(STEPS):
        opt.zero_grad()
        ddp(inputs_of(setup, step, 0), uses(setup.rank // 2, step)).square().mean().backward()
        opt.step()
    return values(net)


@case(4)
def _a_group_without_the_others_first_steps_starts_from_theirs(setup: Setup) -> None:
    """With ``init_sync`` groups that begin with other parameters take over those of one group."""
    run = trained(setup, Recipe(2, starts_alike=False, refuses=False))
    every: list[Any] = [None] * setup.world_size
    dist.all_gather_object(every, run.model)
    for model in every:
        assert_equal(every[0], model, "between groups")


@case(4)
def _a_checkpoint_holds_what_the_sharded_optimizer_does(setup: Setup) -> None:
    run = trained(setup, Recipe(2, refuses=False, has_schedule=False))
    folder = setup.folder / f"group_{setup.rank // 2}"
    checkpoint.save(folder, run.ddp, run.opt, extra={"torchft": run.manager.state_dict()})
    again = trained(setup, Recipe(2, refuses=False, has_schedule=False, load=folder, steps=2 * STEPS))
    assert len(again.committed) == STEPS
    whole = trained(setup, Recipe(2, refuses=False, has_schedule=False, steps=2 * STEPS))
    assert_equal(whole.model, again.model, "resumed")


@case(4)
def _what_cannot_be_managed_is_refused(setup: Setup) -> None:
    groups = Groups(setup, is_async=True, init_sync=False)
    manager = groups.manager()
    build = partial(DistributedDataParallel, process_group=groups.pair, gradient_as_bucket_view=True)
    with pytest.raises(ValueError, match=r"Expected partition='parameters', got 'elements'.*\[ZERO-915\]"):
        prepare(manager, build(Net()), AdamW, partition="elements", **OPTIONS)
    with pytest.raises(TypeError, match=r"Expected a ddp_zero.ZeroRedundancyOptimizer, got AdamW.*\[ZERO-915\]"):
        ManagedOptimizer(manager, build(Net()), AdamW(Net().parameters()))  # type: ignore[arg-type]
    ddp = build(Net())
    opt = prepare(manager, ddp, AdamW, stage=2, **OPTIONS)
    with pytest.raises(RuntimeError, match=r"Expected opt.zero_grad\(\) before the forward pass.*\[ZERO-915\]"):
        opt.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(ddp(inputs_of(setup, 0, 0), (0, 1, 2)).sum()).backward()
    with pytest.raises(RuntimeError, match=r"A torch.amp.GradScaler looks at the gradients.*\[ZERO-915\]"):
        scaler.step(opt)
    give, take = manager._user_state_dicts["ddp_zero"], manager._load_state_dict_fns["ddp_zero"]
    healthy: Any = give()
    with pytest.raises(ValueError, match=r"Expected the same owners of all parameters.*\[ZERO-915\]"):
        take({**healthy, "owners": healthy["owners"][::-1]})
    opt.zero_grad()
    ddp(inputs_of(setup, 0, 0), (0, 1, 2)).sum().backward()
    opt.average_gradients()
    # as where one rank of the group has taken over a state, and the other could not
    manager.load_state_dict({"step": setup.rank % 2, "batches_committed": 0})
    manager.report_error(RuntimeError("a test refuses this step"))
    with pytest.raises(RuntimeError, match=r"Expected every rank of this replica group.*\[ZERO-915\]"):
        opt.step()
    manager.shutdown(wait=False)


test_torchft = case.each()
