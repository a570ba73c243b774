"""Options of a step over meshes: state elsewhere, and parameters that arrive after the step."""

from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import Schedule1F1B

from tests.multiproc.failing import FailingAdamW, fail_at_once, iterations
from tests.multiproc.harness import Cases, Setup
from tests.multiproc.mesh_twins import KINDS, MeshTwins, mesh_of_4
from tests.multiproc.parallel_models import CLIP, tied_group
from tests.multiproc.parallel_options import Flights, check_state
from tests.multiproc.stages import train_beside_plain
from tests.multiproc.two_memories import assert_away, taken_for_a_device

MODES: tuple[dict[str, Any], ...] = (
    {},
    {"stage": 2},
    {"max_grad_norm": CLIP},
    {"stage": 2, "max_grad_norm": CLIP},
    {"overlap": False},
)

case = Cases(timeout=180, group_timeout=30)


@case(
    4,
    few=[(KINDS[0], MODES[3]), (KINDS[1], MODES[1]), (KINDS[2], MODES[2]), (KINDS[0], MODES[4])],
    every=[*product(KINDS[:2], MODES), *product(KINDS[2:3], MODES[:3:2])],
)
def _parameters_arrive_during_the_next_forward_pass(
    setup: Setup, configurations: list[tuple[str, dict[str, Any]]]
) -> None:
    mesh = mesh_of_4()
    for kind, mode in configurations:
        flights = Flights()
        with flights.noting:
            twins = MeshTwins(kind, mesh, sync="forward", **mode)
            twins.train_and_compare(clip=mode.get("max_grad_norm"))
        flights.check(2 if kind == "experts" else 1)
        twins.opt.finish_sync()
    with pytest.raises(NotImplementedError, match=r"sync='forward' does not support distributed tensors such as param"):
        MeshTwins("distributed tensors", mesh, sync="forward")
    with pytest.raises(ValueError, match="sync='forward' needs parameters_as_bucket_view=True, got False"):
        MeshTwins("cut, without DDP", mesh, sync="forward", parameters_as_bucket_view=False)
    stages_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    tied = tied_group(stages_mesh)
    for stages in ({"wraps": False}, {}, {"stage": 2}):
        flights = Flights()
        with flights.noting:
            assert train_beside_plain(stages_mesh, tied, Schedule1F1B, {**stages, "sync": "forward"}).plain == 0.0
        flights.check(2)


@case(4)
def _an_error_of_one_rank_reaches_all_while_parameters_are_in_flight(setup: Setup) -> None:
    mesh = mesh_of_4()
    for kind, member, rank in (("experts", 1, 3), ("cut, in DDP", 0, 2), ("cut, without DDP", 0, 1)):
        twins = MeshTwins(kind, mesh, FailingAdamW, sync="forward")
        data = iterations(twins.opt, twins.model, twins.loss, twins.place)
        fail_at_once(twins.opt, data, member, rank)


@case(
    4,
    few=[(KINDS[0], MODES[3]), (KINDS[1], MODES[0]), (KINDS[3], MODES[2])],
    every=[*product(KINDS[:3], MODES[::3]), *product(KINDS[3:], MODES[:3:2])],
)
def _state_is_in_the_memory_of_the_host(setup: Setup, configurations: list[tuple[str, dict[str, Any]]]) -> None:
    mesh = mesh_of_4()
    for kind, mode in configurations:
        with taken_for_a_device():
            twins = MeshTwins(kind, mesh, offload="cpu", **mode)
        twins.train_and_compare(clip=mode.get("max_grad_norm"))
        for member in twins.opt.members:
            assert_away(member)
        check_state(twins)
    stages_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipe"))
    tied = tied_group(stages_mesh)
    for stages in ({"wraps": False, "max_grad_norm": CLIP}, {"stage": 2}):
        with taken_for_a_device():
            assert train_beside_plain(stages_mesh, tied, Schedule1F1B, {**stages, "offload": "cpu"}).plain == 0.0


@case(4)
def _state_moves_away_between_phases_and_back(setup: Setup) -> None:
    mesh = mesh_of_4()
    for kind in KINDS:
        twins = MeshTwins(kind, mesh, overlap=False)
        twins.train_and_compare(2)
        twins.opt.offload_state("cpu")
        with pytest.raises(RuntimeError, match=r"offload_state\(\)"):
            twins.opt.offload_state()
        twins.zero_grad()
        twins.backward((torch.ones(6, 8), torch.ones(6, 3)))
        with pytest.raises(RuntimeError, match=r"reload_state\(\)"):
            twins.opt.step()
        torch.distributed.barrier()
        twins.opt.reload_state()
        twins.opt.reset()
        twins.train_and_compare(2)


test_parallel_options = case.each()
