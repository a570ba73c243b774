"""State dicts: exactly the unsharded optimizer's, without pickle, and loadable anywhere."""

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel

from ddp_zero import ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from ddp_zero.core.local.placement import state_bytes
from tests import internals
from tests.multiproc.cases import (
    OPTIMIZERS,
    STATE_WRITES,
    LargestLiveBytes,
    OptimizerCase,
    Twins,
    assert_equal_models,
    assert_identical,
    batches,
    build_model,
    build_twins,
    loss_of,
    optimizer_case,
    sharded_twins,
    split_groups,
    step_on,
)
from tests.multiproc.harness import Cases, Setup, run_ranks

case = Cases()

ADAMW = optimizer_case("AdamW foreach")
SGD = optimizer_case("SGD momentum")


@case(1, 2, 4)
def _consolidated_equals_the_plain_state_dict(setup: Setup) -> None:
    for position, case in enumerate(OPTIMIZERS):
        twins = build_twins(case, groups=1 + position % 2, parameters_as_bucket_view=bool(position % 2))
        target = position % setup.world_size
        twins.assert_same_state(f"{case.name} before the first step", to=target)
        twins.train(setup, 3)
        twins.opt.consolidate_state_dict(to=target)
        if setup.rank == target:
            expected = twins.plain.state_dict()
            assert expected["state"] or case.name in ("SGD", "SGD maximize foreach")
            assert_identical(expected, twins.opt.state_dict(), case.name)


@case(1, 3)
def _states_are_in_the_order_in_which_the_plain_optimizer_made_them(setup: Setup) -> None:
    twins = build_twins(ADAMW)
    for model in (twins.plain_model, twins.model):
        for param in list(model.parameters())[:5]:
            param.requires_grad_(False)
    train_without_ddp(twins, 2)
    for model in (twins.plain_model, twins.model):
        for param in list(model.parameters())[2:4]:
            param.requires_grad_(True)
    train_without_ddp(twins, 2)
    for model in (twins.plain_model, twins.model):
        for param in model.parameters():
            param.requires_grad_(True)
    train_without_ddp(twins, 1)
    expected = twins.plain.state_dict()
    assert list(expected["state"]) != sorted(expected["state"])
    twins.opt.consolidate_state_dict(to=0)
    if setup.rank == 0:
        assert_identical(expected, twins.opt.state_dict(), "state dict")
    twins.opt.load_state_dict(expected)
    train_without_ddp(twins, 1)
    twins.assert_same_state("state dict after loading", to=setup.world_size - 1)


def train_without_ddp(twins: Twins, steps: int) -> None:
    """The same data on every rank, so that no reduction is needed and parameters may be frozen at will."""
    for inputs, targets in batches(0, steps):
        for model, optimizer in ((twins.plain_model.module, twins.plain), (twins.model.module, twins.opt)):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    twins.assert_equal("without ddp")


@case(1, 2, 3)
def _a_state_dict_resumes_in_the_plain_optimizer_in_torchs_and_in_ours(setup: Setup) -> None:
    for name in ("AdamW foreach", "SGD momentum", "Adagrad", "Adafactor"):
        case = optimizer_case(name)
        twins = build_twins(case, groups=2, parameters_as_bucket_view=True)
        twins.train(setup, 3)
        twins.opt.consolidate_state_dict(to=0)
        saved = [twins.opt.state_dict() if setup.rank == 0 else None]
        dist.broadcast_object_list(saved, src=0)
        weights = copy.deepcopy(twins.model.module)

        resumed: dict[str, DistributedDataParallel] = {}
        for kind in ("plain", "torch", "ours"):
            model = DistributedDataParallel(copy.deepcopy(weights))
            groups = split_groups(model, 2)
            optimizer: Any
            build: Any = case.build
            if kind == "plain":
                optimizer = case.build(groups, **case.options)
            elif kind == "torch":
                optimizer = TorchZero(groups, build, **case.options)
            else:
                optimizer = ZeroRedundancyOptimizer(groups, case.build, **case.options)
            optimizer.load_state_dict(copy.deepcopy(saved[0]))
            for inputs, targets in batches(setup.rank, 3, seed=1):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()
            resumed[kind] = model
        assert_equal_models(resumed["plain"], resumed["torch"], f"{name} resumed in torch's")
        assert_equal_models(resumed["plain"], resumed["ours"], f"{name} resumed in ours")
        if setup.world_size < 3:  # a new DDP has other buckets at first, and three ranks then sum in another order
            twins.train(setup, 3, seed=1)
            assert_equal_models(twins.plain_model, resumed["plain"], f"{name} unbroken")


@case(2, 3)
def _a_state_dict_of_torchs_zero_optimizer_resumes(setup: Setup) -> None:
    theirs_model = DistributedDataParallel(build_model())
    theirs = TorchZero(split_groups(theirs_model, 2), torch.optim.AdamW, lr=0.01)

    def train(optimizer: Any, model: nn.Module, seed: int) -> None:
        for inputs, targets in batches(setup.rank, 3, seed):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()

    train(theirs, theirs_model, 0)
    for rank in range(setup.world_size):
        theirs.consolidate_state_dict(to=rank)
        if rank == setup.rank:
            saved = copy.deepcopy(theirs.state_dict())
    before = copy.deepcopy(saved)
    fresh_model = DistributedDataParallel(copy.deepcopy(theirs_model.module))
    fresh = TorchZero(split_groups(fresh_model, 2), torch.optim.AdamW, lr=0.5)
    fresh.load_state_dict(copy.deepcopy(saved))
    ours_model = DistributedDataParallel(copy.deepcopy(theirs_model.module))
    ours = ZeroRedundancyOptimizer(split_groups(ours_model, 2), torch.optim.AdamW, lr=0.5)
    ours.load_state_dict(saved)
    train(fresh, fresh_model, 1)
    train(ours, ours_model, 1)
    assert_equal_models(fresh_model, ours_model, "after resuming from torch's")
    assert ours.param_groups[0]["lr"] == 0.01
    assert_identical(before, saved, "the caller's dict")
    assert 0 < len(ours.state) < len(list(ours_model.parameters()))


def _save(setup: Setup, path: str, resume: str | None, steps: int, seed: int) -> None:
    """Train on data that does not depend on the number of ranks, from a checkpoint if one is given; save."""
    model = build_model()
    opt = ZeroRedundancyOptimizer(
        split_groups(model, 2), torch.optim.AdamW, parameters_as_bucket_view=setup.world_size % 2 == 0, lr=0.01
    )
    if resume is not None:
        checkpoint = torch.load(resume, weights_only=True)
        model.load_state_dict(checkpoint["model"])
        opt.load_state_dict(checkpoint["opt"])
    for inputs, targets in batches(0, steps, seed):
        opt.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        opt.step()
    opt.consolidate_state_dict()
    if setup.rank == 0:
        torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, path)


def _save_unsharded(setup: Setup, path: str) -> None:
    """What six unbroken steps of the plain optimizer lead to."""
    model = build_model()
    plain = torch.optim.AdamW(split_groups(model, 2), lr=0.01)
    for seed in (0, 1):
        for inputs, targets in batches(0, 3, seed):
            plain.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            plain.step()
    torch.save({"model": model.state_dict(), "opt": plain.state_dict()}, path)


@case(1, 2)
def _a_loaded_state_dict_is_not_changed_by_the_load_or_later_steps(setup: Setup) -> None:
    twins = build_twins(ADAMW, groups=2)
    twins.train(setup, 2)
    whole = copy.deepcopy(twins.plain.state_dict())
    whole["state"]["shared"] = {"seen": [torch.ones(2)]}
    before = copy.deepcopy(whole)
    twins.opt.load_state_dict(whole)
    twins.train(setup, 1)
    for state in twins.opt.optim.state.values():
        state["late"] = 1
    seen: Any = twins.opt.optim.state["shared"]  # type: ignore[index]
    seen["seen"][0].fill_(7)
    assert_identical(before, whole, "the caller's state dict")


@case(2)
def _states_that_the_loop_drops_or_sets_are_those_of_the_next_step(setup: Setup) -> None:
    for mode in ({"stage": 2, "partition": "elements"}, {"master_weights": True}, {"stage": 2}, {}):
        twins = sharded_twins(**mode)
        held = twins.opt.state

        def drop(step: int, twins: Twins = twins) -> None:
            for model, optimizer in twins.sides:
                STATE_WRITES[step](optimizer, next(model.parameters()))

        twins.train(setup, len(STATE_WRITES), after_step=drop, where=f"{mode}")
        twins.train(setup, 1, where=f"{mode}, at last")
        assert held.keys() == twins.opt.state.keys() > set(), "what was held follows"
        assert isinstance(copy.deepcopy(held), dict)


@case(2)
def _a_state_set_in_opt_state_is_cut_to_this_ranks_elements_or_refused(setup: Setup) -> None:
    opt = sharded_twins(partition="elements").opt
    holdings = internals.shard_of(opt).binding.owned_parts()
    index, part = next((index, part) for index, part in holdings.items() if part is not None)
    param, numel = internals.shard_of(opt).table.params[index], part.stop - part.start
    with pytest.raises(ValueError, match=rf"elements {part.start} to {part.stop}, got shape \[{numel + 1}\].*ZERO-604"):
        opt.state[param] = {"exp_avg": torch.zeros(numel + 1)}
    with pytest.raises(ValueError, match=r"tensor of shape \[3\] that is not.*ZERO-119"):
        opt.state[torch.zeros(3)] = {}
    assert not opt.state
    for shape in (param.shape, (numel,)):
        given = {"exp_avg": torch.zeros(shape)}
        assert opt.state.pop(param, None) is None
        assert (opt.state.setdefault(param, given) is opt.state[param]) is (len(shape) == 1)
        assert opt.state.pop(param)["exp_avg"].shape == (numel,)
    low = sharded_twins(build_model().bfloat16(), master_weights=True).opt
    for one in low.param_groups[0]["params"]:
        low.state[one] = {"exp_avg": torch.zeros_like(one)}
    assert {state["exp_avg"].dtype for state in low.state.values()} == {torch.float32}, "as the masters"


@case(2)
def _the_step_names_a_value_that_was_set_in_a_wrong_shape(setup: Setup) -> None:
    for mode in ({"partition": "elements"}, {"stage": 2, "partition": "elements"}, {"overlap": False}):
        twins = sharded_twins(**mode)
        twins.train(setup, 1)
        for param, state in twins.opt.state.items():
            state["exp_avg"] = torch.zeros(param.numel() + 1)
        with pytest.raises(RuntimeError, match=r"Expected state 'exp_avg' of parameter .* to fit its shape.*ZERO-604"):
            twins.train(setup, 1)


@case(2)
def _a_parameter_without_state_has_an_empty_one(setup: Setup) -> None:
    modes: list[dict[str, Any]] = [{"partition": "elements"}, {"master_weights": True, "stage": 2}, {}]
    for mode in modes:
        opt = sharded_twins(build_model().bfloat16(), torch.optim.SGD, **mode).opt
        params = opt.param_groups[0]["params"]
        assert {*map(opt.state.get, params)} == {None}
        with pytest.raises(KeyError):
            opt.state.pop(params[0])
        for param in params:
            assert opt.state[param] == {}
            opt.state[param]["mine"] = 1
        shard = internals.shard_of(opt)
        owned = [index for index in shard.binding.owned() if opt.state[shard.table.params[index]] == {"mine": 1}]
        assert owned == [*shard.binding.owned()], f"{mode}"


@case(2)
def _states_that_do_not_fit_replace_nothing(setup: Setup) -> None:
    twins = sharded_twins(partition="elements")
    twins.train(setup, 1)
    before = copy.deepcopy(dict(twins.opt.state))
    first, *_, last = twins.model.parameters()
    with pytest.raises(ValueError, match=r"got shape \[7, 7, 7\].*ZERO-604"):
        twins.opt.state = {first: {}, last: {"exp_avg": torch.zeros(7, 7, 7)}}
    assert_identical(list(before.values()), list(twins.opt.state.values()), "the states")
    twins.train(setup, 1)


@case(2)
def _a_write_to_a_state_drops_what_was_consolidated(setup: Setup) -> None:
    def scale(state: Any) -> None:
        state["exp_avg"].mul_(0.5)

    def replace(state: Any) -> None:
        state["exp_avg_sq"] = state["exp_avg_sq"] * 2

    modes: list[dict[str, Any]] = [{}, {"partition": "elements"}]
    for mode in modes:
        twins = sharded_twins(**mode)
        for write in (scale, replace, dict.clear):
            twins.train(setup, 1)
            twins.opt.consolidate_state_dict()
            for optimizer in (twins.plain, twins.opt):
                for state in optimizer.state.values():
                    write(state)
            dist.barrier()  # every rank has written, and then asked the others
            assert_identical(twins.plain.state_dict()["state"], twins.opt.state_dict()["state"], f"{mode} {write}")
            dist.barrier()


@case(2)
def _a_state_set_before_the_first_step_is_in_the_state_dict_of_every_rank(setup: Setup) -> None:
    modes: list[dict[str, Any]] = [{}, {"partition": "elements"}]
    for mode in modes:
        twins = sharded_twins(**mode)
        for place in (0, -1):
            for model, optimizer in twins.sides:
                param = list(model.parameters())[place]
                optimizer.state[param] = {"step": torch.tensor(3.0), "exp_avg": param * 2, "exp_avg_sq": param**2}
            dist.barrier()  # every rank has written, and then asked the others
            assert_identical(twins.plain.state_dict()["state"], twins.opt.state_dict()["state"], f"{mode} {place}")
            dist.barrier()


@case(2)
def _states_that_are_set_for_parameters_of_other_ranks_are_in_no_checkpoint(setup: Setup) -> None:
    twins = sharded_twins()
    twins.train(setup, 1)
    for one in twins.opt.param_groups[0]["params"]:
        twins.opt.state[one] = {"step": torch.tensor(1.0), "exp_avg": one * 0, "exp_avg_sq": one * 0}
    twins.opt.state.update((param, {}) for param in [*twins.opt.state])
    named = {name for name, _ in twins.model.module.named_parameters()}
    own = twins.opt.sharded_state_dict(init_missing=True)["state"]
    every: list[Any] = [{}, {}]
    dist.all_gather_object(every, {name: sorted(state) for name, state in own.items()})
    assert not every[0].keys() & every[1].keys()
    assert every[0].keys() | every[1].keys() == named
    assert {*map(tuple, (every[0] | every[1]).values())} == {("exp_avg", "exp_avg_sq", "step")}


@case(1, 2, 3)
def _groups_kept_from_before_a_load_keep_their_values(setup: Setup) -> None:
    modes: list[dict[str, Any]] = [{}, {"stage": 2}, {"partition": "elements"}, {"stage": 2, "sync": "forward"}]
    for number, mode in enumerate([None, *modes]):
        ddp = DistributedDataParallel(build_model(), gradient_as_bucket_view=True)
        if mode is None:
            opt = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=0.1)
        else:
            opt = shard_optimizer(ddp, torch.optim.AdamW, lr=0.1, **mode)
        plain = torch.optim.AdamW(build_model().parameters(), lr=0.1)
        inputs, targets = next(batches(setup.rank, 1))
        step_on(opt, loss_of(ddp, inputs, targets))
        folder = setup.folder / str(number)
        checkpoint.save(folder, ddp, opt, step=1)
        state = copy.deepcopy(opt.state_dict())
        dist.barrier()
        state_of_peers = state if setup.rank == 0 or setup.world_size == 1 else None
        loads: list[Callable[[], object]] = [
            lambda opt=opt, state=state: opt.load_state_dict(state),  # type: ignore[misc]
            lambda opt=opt, state=state_of_peers: opt.load_state_dict(state),  # type: ignore[misc]
            lambda opt=opt, ddp=ddp, folder=folder: checkpoint.load(folder, ddp, opt),  # type: ignore[misc]
        ]
        for load in loads:
            kept, kept_by_plain = opt.param_groups, plain.param_groups
            kept_group, kept_by_plain[0]["lr"] = kept[0], 0.3
            kept_group["lr"] = 0.3
            load()
            plain.load_state_dict(state | {"state": {}})
            for groups in (kept, kept_by_plain):
                assert groups[0]["lr"] == 0.3, mode
            for one in (opt, plain):
                assert one.param_groups[0]["lr"] == 0.1, mode
            assert opt.param_groups[0]["params"] == kept_group["params"]
            opt.param_groups[0]["lr"] = kept_group["lr"]  # as a script that goes on with its own rate
            before = copy.deepcopy(ddp.module)
            step_on(opt, loss_of(ddp, inputs, targets))
            assert opt.param_groups[0]["lr"] == 0.3
            pairs = zip(before.parameters(), ddp.parameters(), strict=True)
            assert not any(torch.equal(one, other) for one, other in pairs), "nothing moved"


@case(1, 2, 3)
def _a_consolidated_state_dict_is_kept_until_the_next_step(setup: Setup) -> None:
    twins = build_twins(ADAMW)
    opt = twins.opt
    twins.train(setup, 1)
    if setup.world_size == 1:
        assert_identical(twins.plain.state_dict(), opt.state_dict(), "without consolidation")
        return
    opt.consolidate_state_dict(to=1)
    with mock.patch("ddp_zero.core.comm.requests.Listener.ask", side_effect=ConnectionError("asked")):
        if setup.rank == 1:
            saved = opt.state_dict()
            assert opt.state_dict()["state"][0]["exp_avg"] is saved["state"][0]["exp_avg"]
            snapshot = copy.deepcopy(saved)
        else:
            with pytest.raises(RuntimeError, match="to give its part of the optimizer's state, got asked"):
                opt.state_dict()
        dist.barrier()  # no rank asks any more
        twins.train(setup, 1, seed=1)
        with pytest.raises(RuntimeError, match="got asked"):  # not what is stale
            opt.state_dict()
    if setup.rank == 1:
        assert_identical(snapshot, saved, "a snapshot taken before the step")
    with pytest.raises(ValueError, match="rank below"):
        opt.consolidate_state_dict(to=setup.world_size)
    with pytest.raises(ValueError, match="argument `to`"):
        opt.consolidate_state_dict(to=setup.rank)


class _Opaque:
    """Something that only pickle could send."""


class StatefulOddity(torch.optim.SGD):
    """An optimizer that keeps a Python object in its state."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for param in group["params"]:
                if param.shape == (5,):
                    self.state[param]["odd"] = _Opaque()
        return result


@case(2, 3)
def _consolidation_sends_no_pickle(setup: Setup) -> None:
    refuse = mock.Mock(side_effect=AssertionError("pickled"))
    twins = build_twins(optimizer_case("toy 8-bit Adam"))
    twins.train(setup, 2)
    pickling = ("dumps", "loads", "dump", "load", "Pickler", "Unpickler")
    with mock.patch.multiple(pickle, **dict.fromkeys(pickling, refuse)):
        twins.opt.consolidate_state_dict(to=0)
    if setup.rank == 0:
        assert_identical(twins.plain.state_dict(), twins.opt.state_dict(), "8-bit state")

    odd = build_twins(OptimizerCase("odd", StatefulOddity, {"lr": 0.1, "momentum": 0.9}))
    warnings.filterwarnings("ignore", r"(?s)No save can hold this.*ZERO-611", UserWarning)
    odd.train(setup, 1)
    owner_says = r"parameter \d+ \(group 0, shape \[5\]\).*_Opaque at \['odd'\]"
    with pytest.raises((TypeError, RuntimeError), match=owner_says):
        odd.opt.consolidate_state_dict(to=0)
    odd.train(setup, 1, seed=1)  # nobody hangs, and training goes on


@case(2, 3)
def _consolidation_needs_memory_of_one_state_on_the_other_ranks(setup: Setup) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(10_000)) for _ in range(12)]
    opt = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.1)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    existing = [*params, *(tensor for state in opt.state.values() for tensor in state.values())]
    with LargestLiveBytes(existing) as memory:
        opt.consolidate_state_dict(to=0)
    one_state = 2 * 4 * 10_000
    if setup.rank == 0:
        assert memory.largest > 11 * one_state, "the instrument sees what the receiver allocates"
    else:
        assert memory.largest < 1.2 * one_state


@case(2)
def _misfits_are_named(setup: Setup) -> None:
    twins = build_twins(ADAMW, groups=2)
    twins.train(setup, 2)
    good = copy.deepcopy(twins.plain.state_dict())
    bad: dict[str, dict[str, Any]] = {
        "2 parameter groups, got 1": {**good, "param_groups": good["param_groups"][:1]},
        "parameters in group 1": {**good, "param_groups": [good["param_groups"][0], {"params": [1]}]},
        "for 77": {**good, "state": {77: {}}},
        r"state 'exp_avg' of parameter 2 \(group 0.*shape \[3, 3\]": {
            **good,
            "state": {**good["state"], 2: {**good["state"][2], "exp_avg": torch.ones(3, 3)}},
        },
        "got no 'state'": {"param_groups": []},
    }
    for message, state_dict in bad.items():
        with pytest.raises(ValueError, match=message):
            twins.opt.load_state_dict(state_dict)
    twins.train(setup, 2, seed=1)


@case(1, 2, 3, 4)
def _state_bytes_are_a_share_of_the_unsharded(setup: Setup) -> None:
    for case in (ADAMW, SGD):
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(40 + i, 41 + i) for i in range(12)])
        twins = build_twins(case, model=model)
        inputs = torch.randn(4, 40)
        for ddp, optimizer in twins.sides:
            ddp(inputs).sum().backward()
            optimizer.step()
        whole, own = state_bytes(twins.plain.state), state_bytes(twins.opt.state)
        largest = max(state_bytes(state) for state in twins.plain.state.values())
        assert whole > 0
        assert abs(own - whole / setup.world_size) <= largest, (own, whole / setup.world_size, largest)


test_state = case.each()


def test_a_checkpoint_continues_bit_for_bit_at_any_world_size(tmp_path: Any) -> None:
    unbroken, half = str(tmp_path / "unbroken.pt"), str(tmp_path / "half.pt")
    run_ranks(_save, 3, half, None, 3, 0)
    finals = []
    for world_size in (1, 2, 4):
        resumed = str(tmp_path / f"resumed{world_size}.pt")
        run_ranks(_save, world_size, resumed, half, 3, 1)
        finals.append(torch.load(resumed, weights_only=True))
    run_ranks(_save_unsharded, 1, unbroken)
    expected = torch.load(unbroken, weights_only=True)
    for final in finals:
        assert_identical(dict(expected["model"]), dict(final["model"]), "weights")
        assert_identical(expected["opt"], final["opt"], "optimizer")
