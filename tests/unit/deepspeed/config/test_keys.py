"""The table of keys: nothing is ignored, and what is said of a key is what becomes of it."""

from pathlib import Path
from typing import Any

import pytest

from ddp_zero.deepspeed.config.command import listing, render
from ddp_zero.deepspeed.config.config import Config
from ddp_zero.deepspeed.config.table import SECTIONS, TABLE, ConfigError, Kind, autos, check, find, nearest
from ddp_zero.deepspeed.progress import warn_once

ROWS = [row for rows in SECTIONS.values() for row in rows]
PAGE = Path(__file__).parents[4] / "docs" / "deepspeed-keys.md"


def kinds(document: dict[str, Any]) -> dict[str, Kind]:
    return {one.path: one.kind for one in find(document)}


def test_the_page_is_the_generated_one() -> None:
    assert PAGE.read_text() == render(), "python -m ddp_zero config keys > docs/deepspeed-keys.md"


def test_every_key_has_one_row_and_every_block_a_row_of_its_own() -> None:
    assert len(TABLE) == len(ROWS)
    blocks = {path.rpartition(".")[0] for path in TABLE} - {""}
    assert blocks <= set(TABLE)
    assert all(row.text.endswith((".", ").")) for row in ROWS), [row.path for row in ROWS if row.text[-1] != "."]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"train_batch_size": 8}, {"train_batch_size": Kind.HONOURED}),
        ({"aio": {"block_size": 1}}, {"aio": Kind.NO_EFFECT}),
        ({"wandb": {"enabled": False, "project": "x"}}, {"wandb": Kind.OFF}),
        ({"wandb": {"project": "x"}}, {"wandb": Kind.OFF}),
        ({"wandb": {"enabled": True}}, {"wandb.enabled": Kind.REFUSED}),
        ({"zero_optimization": {"stage": 3}}, {"zero_optimization.stage": Kind.REFUSED}),
        ({"zero_optimization": True}, {"zero_optimization": Kind.HONOURED}),
        ({"zero_optimization": {"reduce_scatter": False}}, {"zero_optimization.reduce_scatter": Kind.NO_EFFECT}),
        ({"tensor_parallel": {"autotp_size": 1}}, {"tensor_parallel": Kind.NO_EFFECT}),
        ({"tensor_parallel": {"autotp_size": 2}}, {"tensor_parallel": Kind.REFUSED}),
        (
            {"zero_optimization": {"stage": 2, "contiguous_gradients": False}},
            {"zero_optimization.stage": Kind.HONOURED, "zero_optimization.contiguous_gradients": Kind.NO_EFFECT},
        ),
        (
            {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "bf16"}},
            {"zero_optimization.stage": Kind.HONOURED, "data_types.grad_accum_dtype": Kind.NO_EFFECT},
        ),
        ({"comms_config": {"comms_logger": {"enabled": True}}}, {"comms_config": Kind.NO_EFFECT}),
        ({"monitor_config": {"tensorboard": {"enabled": True}}}, {"monitor_config": Kind.NO_EFFECT}),
        *(
            (
                {"zero_optimization": {"stage": stage, "offload_param": {"device": device, "pin_memory": True}}},
                {
                    "zero_optimization.stage": Kind.REFUSED if stage == 3 else Kind.HONOURED,
                    "zero_optimization.offload_param.device": kind,
                    "zero_optimization.offload_param.pin_memory": Kind.REFUSED if stage == 3 else Kind.OFF,
                },
            )
            for stage, device, kind in (
                (0, "cpu", Kind.NO_EFFECT),
                (1, "nvme", Kind.NO_EFFECT),
                (2, "cpu", Kind.NO_EFFECT),
                (2, "none", Kind.OFF),
                (3, "cpu", Kind.REFUSED),
            )
        ),
        (
            {"zero_optimization": {"stage": 2, "cpu_offload_param": True}},
            {"zero_optimization.stage": Kind.HONOURED, "zero_optimization.cpu_offload_param": Kind.NO_EFFECT},
        ),
        ({"gradient_allreduce_op": "SUM"}, {"gradient_allreduce_op": Kind.REFUSED}),
        ({"gradient_allreduce_op": "mean"}, {"gradient_allreduce_op": Kind.HONOURED}),
        ({"sequence_parallel_size": 1}, {"sequence_parallel_size": Kind.OFF}),
        ({"sequence_parallel_size": True}, {"sequence_parallel_size": Kind.REFUSED}),
        ({"fp16": {"enabled": "auto"}}, {"fp16.enabled": Kind.HONOURED}),
        ({"optimizer": {"params": {"lr": 1}}}, {"optimizer.params": Kind.HONOURED}),
        ({"nebula": {"enabled": True}}, {"nebula": Kind.REFUSED}),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme", "pin_memory": True}}},
            {
                "zero_optimization.offload_optimizer.device": Kind.REFUSED,
                "zero_optimization.offload_optimizer.pin_memory": Kind.NO_EFFECT,
            },
        ),
    ],
)
def test_every_key_has_the_listed_kind(document: dict[str, Any], expected: dict[str, Kind]) -> None:
    assert kinds(document) == expected


@pytest.mark.parametrize(
    ("document", "hint"),
    [
        ({"train_batch_sise": 8}, "'train_batch_sise': did you mean 'train_batch_size'?"),
        ({"fp16": {"enabled": True, "los_scale": 1}}, "did you mean 'fp16.loss_scale'?"),
        ({"fp16": {"enabled": False, "los_scale": 1}}, "did you mean 'fp16.loss_scale'?"),
        ({"loss_scale": 1}, "did you mean 'fp16.loss_scale'?"),
        ({"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}}, "offload_optimizer.device'?"),
        ({"wandb": {"enabled": True, "projekt": 1}}, "did you mean 'wandb.project'?"),
        ({"xyzzy": 1}, "'xyzzy', which DeepSpeed 0.19 does not have"),
    ],
)
def test_an_unknown_key_is_an_error_with_the_nearest_name(document: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError, match="Unknown keys in the DeepSpeed configuration") as raised:
        find(document)
    assert hint in str(raised.value)


def test_all_unknown_keys_and_all_refused_ones_are_listed() -> None:
    with pytest.raises(ConfigError) as unknown:
        find({"a_key": 1, "another": 2})
    assert str(unknown.value).count("\n- ") == 2
    with pytest.raises(ConfigError) as remedies:
        check({"zero_optimization": {"stage": 3, "zenflow": {"topk_ratio": 0.1}}, "amp": {"enabled": True}})
    assert str(remedies.value).count("\n- ") == 3
    assert "FSDP2" in str(remedies.value)


def test_keys_without_effect_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    document = {
        "train_batch_size": 8,
        "comms_config": {"comms_logger": {"enabled": True}},
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu", "pin_memory": True}},
    }
    for _ in range(2):
        warn_once(Config.parse(document, 2).findings, 0)
    told = [record.getMessage() for record in caplog.records]
    assert [line.split()[0] for line in told] == ["comms_config", "zero_optimization.offload_param.device"]
    assert "DeepSpeed does not read it either" in told[0]
    assert "DeepSpeed itself offloads parameters in stage 3 only" in told[1]


def test_every_refused_key_names_a_remedy() -> None:
    """Each of its texts is more than a statement of what is missing."""
    texts = [row.text for row in ROWS if row.kind is Kind.REFUSED]
    texts += [case.text for row in ROWS for case in row.cases if case.kind is Kind.REFUSED]
    verbs = ("Use ", "use ", "Leave it out", "Log ", "Load ", "Call ", "Multiply", "Set ", "Choose", "Save ", "Build")
    silent = [text for text in texts if not any(verb in text for verb in (*verbs, "nearest", "Generate", "halves"))]
    assert silent == ["Checkpoints are written to a folder that all ranks share.", "Weights are not quantized here."]


def test_auto_must_be_filled_except_where_it_is_a_value() -> None:
    document = {"train_batch_size": "auto", "data_types": {"keep_in_fp32_modules": "auto"}}
    assert autos(document) == ["train_batch_size", "data_types.keep_in_fp32_modules"]
    with pytest.raises(ConfigError, match=r'got "auto" for train_batch_size\. Write'):
        check(document)
    assert len(check({"data_types": {"keep_in_fp32_modules": "auto"}})) == 1


def test_the_nearest_name_is_one_of_the_table() -> None:
    assert nearest("zero_optimization.stag") == "zero_optimization.stage"
    assert nearest("qqq") is None


def test_the_listing_has_a_line_for_each_key() -> None:
    text = listing(find({"train_batch_size": 8, "aio": {"block_size": 1}}))
    assert [line.split()[0] for line in text.splitlines()] == ["train_batch_size", "aio"]
    assert listing([]) == ""
