"""Matrices stepped whole with options of a step, `Join`, `GradScaler` and shard groups: the bits of one device."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests import internals
from tests.multiproc.cases import ToyLAMB
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.joined_training import go_on, train_ours, train_plain_by_hand, train_plain_with_ddp
from tests.multiproc.mesh_twins import KINDS, MeshTwins, mesh_of_4
from tests.multiproc.parallel_models import CLIP
from tests.multiproc.parallel_options import Flights, check_state
from tests.multiproc.replicas import groups_of, hook_of
from tests.multiproc.scaled import train_scaled
from tests.multiproc.two_memories import assert_away, taken_for_a_device

IN_DDP, WITHOUT_DDP, DISTRIBUTED = KINDS[1:]
EVEN, UNEVEN, EMPTY = (8, 8), (11, 5), (16, 0)
SIZES = (EVEN, UNEVEN, EMPTY)
OF_DTENSOR = {EVEN: (8, 8), UNEVEN: (8, 7), EMPTY: (1, 0)}
"""What a distributed tensor allows."""
MODES: tuple[dict[str, Any], ...] = ({}, {"stage": 2}, {"max_grad_norm": CLIP}, {"stage": 2, "max_grad_norm": CLIP})

case = Cases(timeout=400, group_timeout=60)


def mesh_twins(kind: str, mesh: DeviceMesh, sizes: tuple[int, int], **options: Any) -> MeshTwins:
    found = MeshTwins(kind, mesh, ToyLAMB, wholes=OF_DTENSOR[sizes] if kind == DISTRIBUTED else sizes, **options)
    assert internals.cuts_of(found.opt), "parts meet"
    return found


Configuration = tuple[str, tuple[int, int], dict[str, Any]]
"""The kind of a model, sizes of the parts, and options of the optimizer."""


def configurations_of(kinds: Sequence[str], sizes: Sequence[tuple[int, int]]) -> list[Configuration]:
    """In every mode that a kind can have."""
    modes = {kind: MODES if kind == IN_DDP else MODES[::2] for kind in kinds}
    return [(kind, parts, mode) for kind, parts in product(kinds, sizes) for mode in modes[kind]]


PLAIN, CLIPPED, BOTH = MODES[0], MODES[2], MODES[3]
FEW: list[Configuration] = [(IN_DDP, UNEVEN, BOTH), (WITHOUT_DDP, EVEN, CLIPPED), (DISTRIBUTED, UNEVEN, PLAIN)]
EVERY = configurations_of(KINDS[1:], SIZES)


@case(4, marks=[pytest.mark.nightly])
def _every_kind_and_mode_equals_one_device(setup: Setup) -> None:
    mesh = mesh_of_4()
    for kind, sizes, mode in EVERY:
        mesh_twins(kind, mesh, sizes, **mode).train_and_compare(clip=mode.get("max_grad_norm"))


@case(
    4,
    few=[(IN_DDP, UNEVEN, BOTH), (WITHOUT_DDP, EMPTY, PLAIN), (IN_DDP, EVEN, {"stage": 2})],
    every=configurations_of((IN_DDP, WITHOUT_DDP), SIZES),
)
def _parameters_arrive_during_the_next_forward_pass(setup: Setup, configurations: list[Configuration]) -> None:
    mesh = mesh_of_4()
    for kind, sizes, mode in configurations:
        flights = Flights()
        with flights.noting:
            twins = mesh_twins(kind, mesh, sizes, sync="forward", **mode)
            twins.train_and_compare(clip=mode.get("max_grad_norm"))
        flights.check(1)
        twins.opt.finish_sync()


@case(
    4,
    few=[*FEW[1:], (IN_DDP, EMPTY, BOTH)],
    every=[one for one in EVERY if one[1] != UNEVEN and one[2] in (PLAIN, BOTH)],
)
def _state_is_in_the_memory_of_the_host(setup: Setup, configurations: list[Configuration]) -> None:
    mesh = mesh_of_4()
    for kind, sizes, mode in configurations:
        with taken_for_a_device():
            twins = mesh_twins(kind, mesh, sizes, offload="cpu", **mode)
        twins.train_and_compare(clip=mode.get("max_grad_norm"))
        assert_away(twins.opt.members[0])
        check_state(twins)


@case(4, few=FEW, every=[*product(KINDS[1:], SIZES[:2], [PLAIN])])
def _state_moves_away_between_phases_and_back(setup: Setup, configurations: list[Configuration]) -> None:
    mesh = mesh_of_4()
    for kind, sizes, _ in configurations:
        twins = mesh_twins(kind, mesh, sizes)
        twins.train_and_compare(2)
        twins.opt.offload_state()
        twins.opt.reload_state()
        twins.train_and_compare(2)


IN_THE_LOOP: tuple[dict[str, Any], ...] = ({"overlap": False}, {"stage": 2, "overlap": False})


@case(
    4,
    few=[
        (IN_DDP, UNEVEN, {"stage": 2}),
        (WITHOUT_DDP, EVEN, CLIPPED),
        (DISTRIBUTED, EVEN, IN_THE_LOOP[0]),
        (IN_DDP, UNEVEN, IN_THE_LOOP[1]),
    ],
    every=[*(one for one in EVERY if one[1] != EMPTY and one[2] != BOTH), *product(KINDS[1:], SIZES[:2], IN_THE_LOOP)],
)
def _scales_under_a_grad_scaler_equal_one_device(setup: Setup, configurations: list[Configuration]) -> None:
    mesh = mesh_of_4()
    for kind, sizes, mode in configurations:
        unscaled_in = "the loop" if mode in IN_THE_LOOP else "the step" if "max_grad_norm" in mode else None
        train_scaled(mesh_twins(kind, mesh, sizes, **mode), unscaled_in)


INPUTS = ((3, 1), (0, 2), (2, 2))


@case(
    4,
    few=[
        ((IN_DDP, EVEN, BOTH), (3, 1)),
        ((WITHOUT_DDP, EMPTY, PLAIN), (0, 2)),
        ((DISTRIBUTED, EMPTY, CLIPPED), (2, 2)),
    ],
    every=[*product(configurations_of(KINDS[1:], (EVEN, EMPTY)), INPUTS)],
)
def _parts_whose_data_parallel_rank_has_joined(
    setup: Setup, configurations: list[tuple[Configuration, tuple[int, int]]]
) -> None:
    """Owners that have joined step the wholes of which they have parts."""
    mesh = mesh_of_4()
    for (kind, sizes, mode), inputs in configurations:
        twins = mesh_twins(kind, mesh, sizes, **mode)
        steps = inputs[twins.place]
        norms = train_ours(twins, steps)
        assert len(norms) == steps
        if kind == IN_DDP:
            train_plain_with_ddp(twins, steps, norms)
        else:
            train_plain_by_hand(twins, inputs, norms, counts_all=True)
        twins.assert_equal(f"with {mode}, parts {sizes}, {inputs} batches")
        twins.assert_moved()
        go_on(twins, inputs, is_clipped="max_grad_norm" in mode)


@case(4, few=FEW, every=configurations_of(KINDS[1:], SIZES[:2]))
def _every_rank_keeps_the_state_of_its_wholes(setup: Setup, configurations: list[Configuration]) -> None:
    mesh, alone = mesh_of_4(), groups_of(1)
    for kind, sizes, mode in configurations:
        twins = mesh_twins(kind, mesh, sizes, shard_group=alone, **mode)
        twins.train_and_compare(clip=mode.get("max_grad_norm"))
        check_replicas(twins, 2)


@case(8, few=[(UNEVEN, BOTH)], every=[*product((EVEN, UNEVEN), MODES[1:])])
def _two_replicas_of_two_shards_of_two_parts_equal_one_device(
    setup: Setup, configurations: list[tuple[tuple[int, int], dict[str, Any]]]
) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    for sizes, mode in configurations:
        twins = mesh_twins(IN_DDP, mesh, sizes, plain_hook=hook_of(mode), shard_group=mesh.get_group("shard"), **mode)
        twins.train_and_compare(clip=mode.get("max_grad_norm"))
        check_replicas(twins, 2)


def check_replicas(twins: MeshTwins, replicas: int) -> None:
    """Every whole has its state on as many hosts as there are replicas, all else on every rank with other parts too."""
    given = {stepped: param for stepped, param in internals.given_for(twins.opt).items()}
    here = {given.get(param, param) for param, state in twins.opt.state.items() if state}
    numbers = internals.cuts_of(twins.opt)
    counted = torch.tensor([int(param in here) for param in twins.model.parameters()])
    dist.all_reduce(counted)
    found = sorted(counted.tolist())
    assert found == sorted([replicas] * len(numbers) + [2 * replicas] * (len(counted) - len(numbers)))


test_parallel_whole_options = case.each()
