"""Ranks that share a parameter group, those of them that count in norms, and arguments."""

from typing import Any

import pytest
from torch import nn
from torch.optim import SGD

from ddp_zero.parallel.members import check_arguments, check_group_ranks, count_in_norms, nonfinite, other_dims


def test_a_group_counts_in_norms_on_its_first_rank_alone_also_across_pipeline_stages() -> None:
    stated = [[0, 1, 2, 3], [0, 1, 2, 3]]
    check_group_ranks([2, 3], stated, "group 2")  # raises nothing
    assert count_in_norms([2, 3], stated) == [False, False]
    assert count_in_norms([0, 1], stated) == [True, False]


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        (
            [[0, 2], [0, 1], [0, 2], [1, 3]],
            r"on who they are, got \[0, 1\] on global rank 1 and \[0, 2\] on global rank 0",
        ),
        ([[0, 2], [3], [0, 2], [1, 3]], r"contain the rank that passes it, got \[3\] on global rank 1"),
        ([[0], [1, 3], [0, 2], [1, 3]], r"got \[0, 2\] on global rank 2 and \[0\] on global rank 0"),
    ],
)
def test_groups_on_which_ranks_disagree_are_refused_with_their_ranks(stated: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_group_ranks([0, 1, 2, 3], stated, "group 1")


@pytest.mark.parametrize("experts", [1, 2, 4, 8])
def test_each_of_any_number_of_experts_counts_once_in_norms(experts: int) -> None:
    ranks = list(range(8))
    stated = [[peer for peer in ranks if peer % experts == rank % experts] for rank in ranks]
    check_group_ranks(ranks, stated, "experts")
    assert sum(count_in_norms(ranks, stated)) == experts
    assert count_in_norms(ranks, stated)[:experts] == [True] * experts


@pytest.mark.parametrize(
    ("options", "groups", "found"),
    [
        ({}, [{}], "step"),
        ({"max_grad_norm": 1.0}, [{}], "skip"),
        ({"loss_scale": 8.0}, [{}], "skip"),
        ({}, [{}, {"max_grad_norm": 1.0}], "skip"),
        ({"nonfinite": "raise", "max_grad_norm": 1.0}, [{}], "raise"),
    ],
)
def test_nonfinite_is_skip_where_any_group_clips_or_scales_unless_it_is_stated(
    options: dict[str, Any], groups: list[dict[str, Any]], found: str
) -> None:
    assert nonfinite(options, groups) == found


class Mesh:
    mesh_dim_names = ("data", "tensor", "stage")


def test_other_dims_are_neither_of_data_nor_of_the_pipeline() -> None:
    mesh: Any = Mesh()
    assert other_dims(mesh, ["data"], "stage") == ["tensor", "stage"]
    assert other_dims(mesh, ["data", "tensor"], None) == ["stage"]
    assert other_dims(None, [], None) == []


def test_dimensions_that_the_mesh_does_not_name_are_refused() -> None:
    mesh: Any = Mesh()
    with pytest.raises(ValueError, match=r"pipeline_dim to name a dimension of the mesh, .*got 'pipe'"):
        other_dims(mesh, ["data"], "pipe")
    with pytest.raises(ValueError, match="mesh= needs data_parallel_dim="):
        other_dims(mesh, [], None)
    with pytest.raises(ValueError, match=r"data_parallel_dim to name a dimension of the mesh, \[\]"):
        other_dims(None, ["data"], None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"process_group": None}, "Parameter groups name theirs"),
        ({"overlap_with_ddp": True}, "Use overlap="),
        ({"max_grad_nrm": 0.9}, "max_grad_norm"),
    ],
)
def test_unknown_options_and_those_of_groups_or_other_names_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check_arguments(nn.Linear(1, 1), SGD, {"lr": 0.1, **options})


def test_parameters_in_place_of_the_model_are_refused() -> None:
    with pytest.raises(TypeError, match="The order is: model, optimizer class, parameter groups"):
        check_arguments([1], SGD, {})


def test_options_of_all_groups_are_accepted() -> None:
    check_arguments(nn.Linear(1, 1), SGD, {"lr": 0.1, "stage": 2, "max_grad_norm": 1.0})
