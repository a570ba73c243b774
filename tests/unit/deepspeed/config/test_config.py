"""Configurations are valid or cannot be built, and say everything that is wrong with them."""

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from ddp_zero.deepspeed.config.config import Batch, Config, read
from ddp_zero.deepspeed.config.table import TABLE, ConfigError, Kind, value_at


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        ((32, 4, None), 2, (32, 4, 4)),
        ((32, None, 2), 2, (32, 8, 2)),
        ((None, 4, 3), 2, (24, 4, 3)),
        ((32, None, None), 2, (32, 16, 1)),
        ((None, 4, None), 2, (8, 4, 1)),
        ((24, 4, 3), 2, (24, 4, 3)),
        ((1, None, None), 1, (1, 1, 1)),
    ],
)
def test_any_two_numbers_give_the_third(
    given: tuple[Any, Any, Any], ranks: int, expected: tuple[int, int, int]
) -> None:
    assert Batch.solve(*given, ranks) == Batch(*expected)


@pytest.mark.parametrize(
    ("given", "ranks", "told"),
    [
        ((33, 4, None), 2, "33 = 4 * 4 * 2, which is 32"),
        ((32, 4, 3), 2, "32 = 4 * 3 * 2, which is 24"),
        ((3, None, 2), 2, "3 = 1 * 2 * 2, which is 4"),
        ((1, None, None), 2, "1 = 1 * 1 * 2, which is 2"),
        ((None, None, 2), 2, "has neither train_batch_size nor"),
        ((None, None, None), 2, "has neither train_batch_size nor"),
        ((0, 4, None), 2, "train_batch_size = 0"),
        ((8, 4.5, None), 2, "train_micro_batch_size_per_gpu = 4.5"),
        ((8, True, None), 2, "train_micro_batch_size_per_gpu = True"),
    ],
)
def test_contradictions_are_refused_with_the_equation(given: tuple[Any, Any, Any], ranks: int, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Batch.solve(*given, ranks)
    assert told in str(raised.value)
    assert "train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps" in str(raised.value)


def parsed(**document: Any) -> Config:
    return Config.parse({"train_batch_size": 4, **document}, 2)


def test_defaults_are_those_of_deepspeed() -> None:
    config = parsed()
    assert (config.rest.gradient_clipping, config.zero.stage, config.dtype) == (1.0, 0, "float32")
    assert (config.fp16.initial_scale_power, config.fp16.loss_scale_window, config.fp16.hysteresis) == (16, 1000, 2)
    assert (config.fp16.min_loss_scale, config.fp16.loss_scale) == (1, 0)
    assert config.zero.ignore_unused_parameters
    assert config.bucket_elements is None
    assert not config.is_sharded


def test_a_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        parsed().zero.stage = 2


@pytest.mark.parametrize(
    ("document", "dtype", "masters", "sharded"),
    [
        ({"fp16": {"enabled": True}}, "float16", True, True),
        ({"bf16": {"enabled": True}}, "bfloat16", True, True),
        ({"bfloat16": {"enabled": True}}, "bfloat16", True, True),
        (
            {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
            "bfloat16",
            False,
            True,
        ),
        ({"zero_optimization": {"stage": 1}}, "float32", False, True),
        ({"zero_optimization": True}, "float32", False, True),
        ({"zero_optimization": {"cpu_offload": True}}, "float32", False, True),
    ],
)
def test_precision_follows_from_the_blocks(document: dict[str, Any], dtype: str, masters: bool, sharded: bool) -> None:
    config = parsed(**document)
    assert (config.dtype, config.has_masters, config.is_sharded) == (dtype, masters, sharded)


def test_sizes_in_scientific_notation_are_ints_and_the_smaller_one_counts() -> None:
    config = parsed(zero_optimization={"stage": 2, "reduce_bucket_size": 5e8, "allgather_bucket_size": 2e8})
    assert (config.zero.reduce_bucket_size, config.bucket_elements) == (500_000_000, 200_000_000)
    assert isinstance(config.bucket_elements, int)


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ({"fp16": {"enabled": True, "hysteresis": 0}}, "fp16.hysteresis: expected an int of at least 1, got 0"),
        ({"fp16": {"enabled": True, "loss_scale": -1}}, "fp16.loss_scale"),
        ({"fp16": {"enabled": True, "loss_scale": True}}, "fp16.loss_scale"),
        ({"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}}, "8 > 2 ** 2"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16 and bf16 both enabled"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "both true or both false"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: expected one of 0, 1, 2, got 4"),
        ({"zero_optimization": {"stage": True}}, "zero_optimization.stage"),
        ({"zero_optimization": {"reduce_bucket_size": 0.5}}, "reduce_bucket_size"),
        ({"zero_optimization": {"contiguous_gradients": "yes"}}, "contiguous_gradients: expected true or false"),
        ({"zero_optimization": {"offload_optimizer": {"device": "disk"}}}, "offload_optimizer.device"),
        ({"zero_optimization": 3}, "zero_optimization: expected a block, got 3"),
        ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type: expected a name"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1}}}, "gradient_clipping"),
        ({"optimizer": {"type": "Adam", "params": [1]}}, "optimizer.params: expected a block"),
        ({"gradient_clipping": -1}, "gradient_clipping: expected a number of at least 0"),
        ({"communication_data_type": "int8"}, "communication_data_type"),
        ({"communication_data_type": "fp32", "bf16": {"enabled": True}}, "stage 0, where DDP sends them"),
        ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor = 2 in stage 0"),
        ({"gradient_predivide_factor": 2.0, "prescale_gradients": True}, "got both"),
        ({"checkpoint": {"tag_validation": "maybe"}}, "Ignore, Warn or Fail"),
        ({"data_types": {"param_dtype": "bf16"}}, "enable that mode"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype = 'bf16' with gradients of float32"),
        ({"torch_autocast": {"enabled": True, "dtype": "int4"}}, "torch_autocast.dtype"),
        ({"zero_optimization.stage": 2}, "expected 'stage' in the block 'zero_optimization', got a key with dots"),
        ({"gradient_allreduce_op": "max"}, "gradient_allreduce_op: expected 'mean', got 'max'"),
        ({"bf16": {"enabled": False}, "bfloat16": {"enabled": True}}, "two names of one block"),
        ({"managed_gradient_accumulation": 0}, "managed_gradient_accumulation: expected true or false, got 0"),
        ({"zero_optimization": {"cpu_offload": "false"}}, "cpu_offload: expected true or false, or null, got 'false'"),
        ({"zero_optimization": {"reduce_scatter": "no"}}, "reduce_scatter: expected true or false"),
        ({"zero_optimization": {"round_robin_gradients": 1}}, "round_robin_gradients: expected true or false"),
        ({"zero_optimization": {"elastic_checkpoint": 1}}, "elastic_checkpoint: expected true or false"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": float("inf")}}}, "got optimizer.params.lr = inf"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": float("nan")}}}, "warmup_min_lr = nan"),
        ({"optimizer": []}, "optimizer: expected a block, got []"),
        ({"scheduler": 0}, "scheduler: expected a block, got 0"),
        ({"checkpoint": 1}, "checkpoint: expected a block, got 1"),
        ({"steps_per_print": 10**5000}, "steps_per_print in the configuration is an int of more than 64 bits"),
    ],
)
def test_values_out_of_range_are_refused_and_named(document: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parsed(**document)
    assert told in str(raised.value)


_TEXTS = ("type", "output_path", "job_name")


@pytest.mark.parametrize("path", [row.path for row in TABLE.values() if row.kind is Kind.HONOURED])
def test_no_honoured_key_takes_nonsense(path: str) -> None:
    """Or it would have no effect."""
    *blocks, name = path.split(".")
    if name in _TEXTS:
        return
    for nonsense in ("nonsense", -2.5, [1, {}]):
        document: dict[str, Any] = {"train_batch_size": 8}
        inner = document
        for block in blocks:
            around = {"enabled": True} if f"{block}.enabled" in TABLE else {}
            inner = inner.setdefault(block, around)
        inner[name] = nonsense
        with pytest.raises(ConfigError):
            Config.parse(document, 1)


def test_all_that_is_wrong_is_listed() -> None:
    with pytest.raises(ConfigError) as raised:
        parsed(fp16={"enabled": 1, "hysteresis": 0}, gradient_clipping="x", zero_optimization={"stage": 7})
    assert str(raised.value).count("- ") == 4


def test_a_document_is_a_dict_a_file_or_base64(tmp_path: Path) -> None:
    content = {"train_batch_size": 4, "fp16": {"enabled": False}}
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(content))
    encoded = base64.urlsafe_b64encode(json.dumps(content).encode()).decode()
    sources: list[Any] = [content, file, str(file), encoded]
    for source in sources:
        assert read(source) == content
    copied = read(content)
    copied["fp16"]["enabled"] = True
    assert content["fp16"] == {"enabled": False}, "what is given is not changed"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"a": 1, "a": 2}', "every key once, got several of 'a'"),
        ("[1]", "Expected a JSON object"),
        ('{"a": 1 /* no */}', "Comments"),
    ],
)
def test_files_that_are_not_a_configuration_are_refused(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=told):
        read(file)


_PLAIN = json.dumps({"train_batch_size": 4, "note": "gr\u00fc\u00df"}, ensure_ascii=False)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (_PLAIN.encode("utf-16"), "text in UTF-16: save it as UTF-8"),
        (_PLAIN.encode("utf-16-le"), "binary data"),
        (_PLAIN.encode("latin-1"), r"a byte that is not UTF-8 at place \d+: save it as UTF-8"),
        (gzip.compress(_PLAIN.encode(), mtime=0), "a gzip archive: unpack it first"),
        (bytes(range(256)), "binary data"),
        (b'{"a": ' * 100_000, "nests hundreds of blocks"),
        (b'{"a": ' + b"9" * 5000 + b"}", "has thousands of digits"),
        (b'{"a": Infinity}', "got a = inf"),
        (b"", "an empty file"),
        (b"\xff", "not UTF-8 at place 0"),
    ],
)
def test_files_that_nobody_can_read_are_refused_by_name(tmp_path: Path, content: bytes, told: str) -> None:
    file = tmp_path / "ds_config.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=told) as raised:
        read(file)
    assert "ds_config.json" in str(raised.value)


def test_folders_and_empty_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"got '.*': a folder"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="got '': no such file"):
        read("")
    with pytest.raises(ConfigError, match="no such file"):
        read("a\0b")
    nested: dict[str, Any] = {}
    for _ in range(100_000):
        nested = {"a": nested}
    with pytest.raises(ConfigError, match="nests hundreds of blocks"):
        read(nested)


def test_keys_that_begin_with__comment_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_bytes(b'\xef\xbb\xbf{"_comment": 1, "_comment": 2, "fp16": {"_comment why": "x", "enabled": false}}')
    assert read(file) == {"fp16": {"enabled": False}}
    assert parsed(**{"_comment": "why", "optimizer": {"type": "SGD", "params": {"_comment": 1, "lr": 1}}}).optimizer


def test_sources_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read("nowhere/ds_config.json")
    with pytest.raises(TypeError, match="Expected a configuration"):
        read(3)  # type: ignore[arg-type]


def test_a_value_is_found_by_its_path() -> None:
    document: Mapping[str, Any] = {"a": {"b": 1}, "c": 2}
    assert [value_at(document, path) for path in ("a.b", "c", "a.x", "c.d", "x")] == [1, 2, None, None, None]
