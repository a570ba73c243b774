"""``"auto"`` is filled from what is known, and contradictions are told all at once."""

from types import SimpleNamespace
from typing import Any

import pytest

from ddp_zero.deepspeed.config.config import Auto, hidden_size
from ddp_zero.deepspeed.config.table import ConfigError, autos

ARGS = SimpleNamespace(
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_grad_norm=0.5,
    learning_rate=3e-4,
    adam_beta1=0.9,
    adam_beta2=0.95,
    adam_epsilon=1e-6,
    weight_decay=0.1,
    fp16=False,
    bf16=True,
)

EVERYTHING: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "fp16": {"enabled": "auto"},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
}


def test_full_evaluation_in_low_precision_trains_in_it() -> None:
    """As the Hugging Face integration has it: one precision for the model."""
    auto = Auto({"fp16": {"enabled": "auto"}, "bf16": {"enabled": False}})
    auto.fill_from_trainer(SimpleNamespace(**{**vars(ARGS), "bf16": False, "fp16_full_eval": True}), ranks=2)
    assert auto.finish() == {"fp16": {"enabled": True}, "bf16": {"enabled": False}}


def test_everything_that_is_auto_is_filled() -> None:
    auto = Auto(EVERYTHING)
    auto.fill_from_trainer(ARGS, ranks=3)
    assert set(autos(auto.document)) == {
        *("scheduler.params.warmup_num_steps", "scheduler.params.total_num_steps"),
        "zero_optimization.reduce_bucket_size",
    }
    auto.fill_from_model(SimpleNamespace(hidden_size=8))
    auto.fill_steps(100, 10)
    assert autos(auto.document) == []
    assert auto.finish() == {
        "train_batch_size": 24,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.1}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 10, "total_num_steps": 100},
        },
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 64},
    }
    assert EVERYTHING["train_batch_size"] == "auto", "what is given is not changed"


def test_a_key_that_is_missing_stays_missing() -> None:
    auto = Auto({"train_batch_size": 24})
    auto.fill_from_trainer(ARGS, ranks=3)
    auto.fill_from_model(None)
    auto.fill_steps(100, 0)
    assert auto.finish() == {"train_batch_size": 24}


def test_all_mismatches_are_in_one_error() -> None:
    auto = Auto(
        {
            "train_batch_size": 7,
            "bf16": {"enabled": False},
            "optimizer": {"params": {"lr": 1.0, "betas": [0.9, 0.95]}},
            "scheduler": {"params": {"total_num_steps": 5, "warmup_min_lr": 3}},
        }
    )
    auto.fill_from_trainer(ARGS, ranks=3)
    auto.fill_steps(100, 0)
    with pytest.raises(ConfigError) as raised:
        auto.finish()
    lines = [line for line in str(raised.value).splitlines() if line.startswith("- ")]
    assert lines == [
        "- train_batch_size = 7, but train_batch_size (calculated) = 24",
        "- optimizer.params.lr = 1.0, but learning_rate = 0.0003",
        "- bf16.enabled = False, but bf16 = True",
        "- scheduler.params.total_num_steps = 5, but the number of training steps = 100",
    ]


def test_zero_warm_up_steps_are_filled_in_as_one() -> None:
    auto = Auto({"scheduler": {"params": {"warmup_num_steps": "auto"}}})
    auto.fill_steps(100, 0)
    assert auto.document == {"scheduler": {"params": {"warmup_num_steps": 1}}}


@pytest.mark.parametrize(
    ("config", "size"),
    [
        (SimpleNamespace(hidden_size=8), 8),
        (SimpleNamespace(hidden_sizes=[8, 32, 16]), 32),
        (SimpleNamespace(text_config=SimpleNamespace(hidden_size=8)), 8),
        (SimpleNamespace(text_config=SimpleNamespace(hidden_sizes=[8, 9])), 9),
        (SimpleNamespace(text_config={"hidden_size": 5}), 5),
        ({"hidden_size": 4}, 4),
        (SimpleNamespace(), None),
        (None, None),
    ],
)
def test_the_hidden_size_is_found_where_models_have_it(config: object, size: int | None) -> None:
    assert hidden_size(config) == size


def test_all_sizes_that_follow_from_the_hidden_size_are_filled() -> None:
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    auto = Auto({"zero_optimization": dict.fromkeys(names, "auto")})
    with pytest.raises(ConfigError, match=r"zero_optimization\.reduce_bucket_size, .* cannot be filled"):
        auto.fill_from_model(SimpleNamespace())
    auto.fill_from_model(SimpleNamespace(hidden_size=10))
    assert auto.document == {"zero_optimization": dict(zip(names, (100, 90, 100), strict=True))}
