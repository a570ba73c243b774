import torch

from ddp_zero.core.local.placement import state_bytes
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.partitions import WholeParameters
from ddp_zero.core.plan.shard_plan import ParameterSpec, ShardPlan, plan_standalone, whole_parameters
from ddp_zero.core.plan.weighted import WeightedParameters
from ddp_zero.insight.explain import describe_costs, describe_shards, draw_buckets


def make_plan(numels: list[int], owners: list[int], world_size: int, frozen: tuple[int, ...] = ()) -> ShardPlan:
    specs = [ParameterSpec(n, 4 * n, "cpu/float32", index not in frozen) for index, n in enumerate(numels)]
    return plan_standalone(specs, [GroupRank(owner) for owner in owners], world_size, 4_000)


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_describe_shards_prints_the_table_of_three_ranks() -> None:
    plan = make_plan([1500, 500, 500, 250], [0, 1, 1, 2], world_size=3, frozen=(2,))
    assert describe_shards(plan, group_rank=1, own_state_bytes=4_000) == "\n".join(
        [
            "  rank  parameters        elements           bytes   state bytes now",
            "     0           1           1,500           6,000           ~12,000",
            "*    1           2           1,000           4,000             4,000",
            "     2           1             250           1,000            ~2,000",
            "imbalance: 2.000 (largest share of trainable bytes / mean share)",
            "sync: 1 buckets, 4,000 bytes sent by this rank per step",
            "frozen: 1 parameters, not sent until they are trainable",
            "* this rank; ~ estimated from this rank's state bytes per parameter byte",
        ]
    )


def test_the_table_of_one_rank_has_no_bytes_sent_and_no_estimates() -> None:
    lines = words(describe_shards(make_plan([10, 20], [0, 0], world_size=1), 0, 240))
    assert lines[1] == ["*", "0", "2", "30", "120", "240"]
    assert lines[2][:2] == ["imbalance:", "1.000"]
    assert lines[3][:5] == ["sync:", "1", "buckets,", "0", "bytes"]
    assert len(lines) == 4


def test_state_bytes_of_other_ranks_are_unknown_to_a_rank_without_trained_parameters() -> None:
    lines = words(describe_shards(make_plan([10, 20, 5], [0, 1, 2], 4, frozen=(1,)), 1, 0))
    assert [line[-1] for line in lines[1:5]] == ["unknown", "0", "unknown", "0"]
    assert lines[6][3] == "0"


def test_a_plan_without_trainable_parameters_is_balanced() -> None:
    text = describe_shards(make_plan([10, 20], [0, 1], 2, frozen=(0, 1)), 0, 0)
    assert "imbalance: 1.000" in text
    assert "sync: 0 buckets, 0 bytes" in text
    assert "frozen: 2 parameters" in text


def test_the_drawing_of_a_plan_has_a_row_for_each_bucket_and_a_column_for_each_rank() -> None:
    plan = make_plan([1500, 500, 0, 700, 250], [0, 1, 1, 1, 2], world_size=3, frozen=(3,))
    specs = [*plan.specs, ParameterSpec(1_234_567, 1_234_567, "cpu/uint8"), ParameterSpec(0, 0, "cpu/uint8")]
    owners = [*plan.owners, GroupRank(2), GroupRank(0)]
    plan = WholeParameters().plan(whole_parameters(specs, owners, 3), [[6, 5], [], [4, 3, 2, 1, 0]], 4_000)
    assert draw_buckets(plan) == "\n".join(
        [
            "bucket               rank 0              rank 1              rank 2",
            "     0               0 in 1                   -      1,234,567 in 1",
            "     1                    -                   -                   -",
            "     2           1,500 in 1            500 in 2            250 in 1",
        ]
    )


def test_state_bytes_counts_all_nested_tensors_once() -> None:
    state = {
        torch.nn.Parameter(torch.ones(100)): {
            "step": torch.tensor(3.0),
            "exp_avg": torch.ones(3, 5, dtype=torch.bfloat16),
            "codes": [torch.ones(7, dtype=torch.uint8), (torch.ones(2, dtype=torch.complex128), 5)],
            "options": {"scale": {"inner": torch.ones(1, dtype=torch.float64)}, "name": "x"},
        },
        "shared": torch.ones(4, 4).t()[:2],
    }
    assert state_bytes(state) == 4 + 30 + 7 + 32 + 8 + 32
    assert state_bytes({}) == 0


def test_costs_are_shown_beside_bytes() -> None:
    specs = [ParameterSpec(10, 40, "cpu/float32", cost=cost, may_be_cut=False) for cost in (6, 2, 2, 2)]
    part = WeightedParameters(3.0)
    lines = describe_costs(part.plan(part.assign(specs, 2, 1000), None, 1000), 3.0)
    assert [line.split() for line in lines[1:3]] == [
        ["cost", "/", "mean", "1.000", "1.000"],
        ["bytes", "/", "mean", "0.500", "1.500"],
    ]
    assert "at most 3 times the mean" in lines[3]
    by_bytes = [ParameterSpec(10, 40, "cpu/float32")] * 2
    assert describe_costs(part.plan(part.assign(by_bytes, 2, 1000), None, 1000), 3.0) == []
