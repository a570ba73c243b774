"""`Config`: a DeepSpeed configuration as a value, read from a dictionary or a file and checked against the table.

`read` gives the document, `Auto` fills ``"auto"`` in it, and `Config.parse` checks it and builds the value:

    auto = Auto("ds_config.json")
    auto.fill_from_trainer(args, ranks)
    auto.fill_from_model(model.config)
    auto.fill_steps(training_steps, warmup_steps)
    config = Config.parse(auto.finish(), ranks)
"""

import base64
import binascii
import copy
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import FrozenInstanceError, dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ddp_zero.deepspeed.config.table import AUTO, COUNT, DTYPES, TABLE, ConfigError, Finding, check, value_at
from ddp_zero.error_codes import coded

Source = Mapping[str, Any] | str | os.PathLike[str]
"""A configuration: a dictionary, the path of a JSON file, or JSON text in URL-safe base64, as launchers pass it."""

_COMMENT = "_comment"  # keys that begin so are for readers only
_LARGEST = 2**63 - 1
_UNREADABLE = {
    b"\xff\xfe": "text in UTF-16: save it as UTF-8",
    b"\xfe\xff": "text in UTF-16: save it as UTF-8",
    b"\x1f\x8b": "a gzip archive: unpack it first",
    b"PK\x03\x04": "a zip archive: unpack it first",
}


# The document


def read(source: Source) -> dict[str, Any]:
    """The configuration as a new dictionary, without comment keys, which begin with ``_comment``.

    Args:
        source: a dictionary, the path of a JSON file, or JSON text in URL-safe base64.

    Raises:
        ConfigError: for a file that is missing or not JSON in UTF-8, blocks that are nested too deeply, numbers that
            are not finite or have too many digits, keys that occur twice, or anything but an object.
        TypeError: for a source of another type.
    """
    if not isinstance(source, Mapping | str | os.PathLike):
        raise TypeError(f"Expected a configuration as a dict or a path, got {type(source).__name__}. [ZERO-701]")
    try:
        if isinstance(source, Mapping):
            return _without_comments(copy.deepcopy(dict(source)), "the configuration")
        return _without_comments(*_load(source))
    except RecursionError:
        raise ConfigError(
            "The configuration nests hundreds of blocks. A DeepSpeed configuration has a few levels. [ZERO-701]"
        ) from None


def _load(source: str | os.PathLike[str]) -> tuple[dict[str, Any], str]:
    path = Path(source)
    if str(source) and _is(path, Path.is_dir):
        raise ConfigError(
            f"Expected the path of a DeepSpeed configuration, got {str(source)!r:.200}: a folder. [ZERO-701]"
        )
    is_file = _is(path, Path.is_file)
    name, text = (str(path), _text(path)) if is_file else ("base64", _decode(source))
    if not text:
        what = "no such file" if text is None or not str(source) else "an empty file"
        raise ConfigError(
            f"Expected the path of a DeepSpeed configuration, got {str(source)!r:.200}: {what}. [ZERO-701]"
        )
    try:
        document = json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"Expected JSON in {name}, got {error}. Comments, which DeepSpeed's reader allows, must be removed, or be "
            "keys that begin with _comment. [ZERO-701]"
        ) from error
    except ConfigError:
        raise
    except ValueError as error:  # of Python, about an int
        raise ConfigError(f"A number in {name} has thousands of digits. [ZERO-701]") from error
    except RecursionError:
        raise ConfigError(
            f"{name} nests hundreds of blocks. A DeepSpeed configuration has a few levels. [ZERO-701]"
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(f"Expected a JSON object in {name}, got {type(document).__name__}. [ZERO-701]")
    return document, name


def _is(path: Path, kind: Callable[[Path], bool]) -> bool:
    try:
        return kind(path)
    except (OSError, ValueError):  # base64 may be too long for a path, and a text may hold a null character
        return False


def _text(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"Expected a DeepSpeed configuration in {path}, got {error.strerror or error}. [ZERO-701]"
        ) from error
    found = next((text for begin, text in _UNREADABLE.items() if content.startswith(begin)), None)
    if found is None and b"\0" in content:
        found = "binary data"
    if found is None:
        try:
            return content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            found = f"a byte that is not UTF-8 at place {error.start}: save it as UTF-8"
    raise ConfigError(f"Expected JSON in UTF-8 in {path}, got {found}. [ZERO-701]")


def _decode(source: str | os.PathLike[str]) -> str | None:
    try:
        return base64.urlsafe_b64decode(str(source).encode()).decode() if isinstance(source, str) else None
    except (binascii.Error, UnicodeError):
        return None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs if not name.startswith(_COMMENT)]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(f"Expected every key once, got several of {', '.join(map(repr, repeated))}. [ZERO-701]")
    return dict(pairs)


def _without_comments(document: Mapping[str, Any], name: str, prefix: str = "") -> dict[str, Any]:
    """A block without comments; refuses numbers that no option can have."""
    kept = dict[str, Any]()
    for key, value in document.items():
        if isinstance(key, str) and key.startswith(_COMMENT):
            continue
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"Expected finite numbers in {name}, got {prefix}{key} = {value}. [ZERO-702]")
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise ConfigError(f"{prefix}{key} in {name} is an int of more than 64 bits. [ZERO-702]")
        kept[key] = _without_comments(value, name, f"{prefix}{key}.") if isinstance(value, Mapping) else value
    return kept


# "auto"


_OF_HIDDEN_SIZE: Mapping[str, Callable[[int], int]] = {
    "zero_optimization.reduce_bucket_size": lambda size: size * size,
    "zero_optimization.stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    "zero_optimization.stage3_param_persistence_threshold": lambda size: 10 * size,
}


class Auto:
    """A configuration whose ``"auto"`` values are being filled in, as the Hugging Face integration does.

    Args:
        source: see `read`; it is not changed.

    Attributes:
        document: the configuration so far.
        mismatches: a line for each value that contradicts a value known elsewhere.
    """

    def __init__(self, source: Source) -> None:
        self.document = read(source)
        self.mismatches = list[str]()

    def fill_match(self, path: str, value: Any, name: str) -> None:
        """Fill a key that is ``"auto"``; record a mismatch if it has another value. A missing key stays missing.

        ``name`` is the known value's name in its source, for the message.
        """
        given = value_at(self.document, path)
        if given == AUTO:
            self.fill_only(path, value)
        elif given is not None and given != value:
            self.mismatches.append(f"- {path} = {given!r}, but {name} = {value!r}")

    def fill_only(self, path: str, value: Any) -> None:
        """Fill a key if it is ``"auto"``; any other value stays."""
        if value_at(self.document, path) == AUTO:
            block, _, key = path.rpartition(".")
            holder = value_at(self.document, block) if block else self.document
            holder[key] = value

    def fill_from_trainer(self, args: Any, ranks: int) -> None:
        """Fill values that follow from transformers' training arguments, or any object with the same attributes."""
        micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        self.fill_match("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size")
        self.fill_match("gradient_accumulation_steps", accumulation, "gradient_accumulation_steps")
        self.fill_match("train_batch_size", ranks * micro * accumulation, "train_batch_size (calculated)")
        self.fill_match("gradient_clipping", args.max_grad_norm, "max_grad_norm")
        self.fill_match("optimizer.params.lr", args.learning_rate, "learning_rate")
        self.fill_match("optimizer.params.betas", [args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2")
        self.fill_match("optimizer.params.eps", args.adam_epsilon, "adam_epsilon")
        self.fill_match("optimizer.params.weight_decay", args.weight_decay, "weight_decay")
        self.fill_only("scheduler.params.warmup_min_lr", 0)
        self.fill_match("scheduler.params.warmup_max_lr", args.learning_rate, "learning_rate")
        for name in ("fp16", "bf16"):
            is_on = bool(getattr(args, name) or getattr(args, f"{name}_full_eval", False))
            self.fill_match(f"{name}.enabled", is_on, name)

    def fill_from_model(self, model_config: Any) -> None:
        """Fill sizes that follow from a model's hidden size; ConfigError if one is ``"auto"`` and it is unknown.

        ``model_config`` has ``hidden_size`` or ``hidden_sizes``, itself or in ``text_config``; None if there is none.
        """
        open_keys = [path for path in _OF_HIDDEN_SIZE if value_at(self.document, path) == AUTO]
        if not open_keys:
            return
        size = hidden_size(model_config)
        if size is None:
            raise ConfigError(
                f'{", ".join(open_keys)} = "auto" cannot be filled: the '
                "model's config has no hidden_size or hidden_sizes, itself or in text_config. Write numbers in their "
                "place. [ZERO-705]"
            )
        for path in open_keys:
            self.fill_only(path, _OF_HIDDEN_SIZE[path](size))

    def fill_steps(self, training_steps: int, warmup_steps: int) -> None:
        """Fill values that follow from the numbers of training and warm-up steps; the latter count as at least 1."""
        self.fill_match("scheduler.params.total_num_steps", training_steps, "the number of training steps")
        self.fill_match("scheduler.params.warmup_num_steps", max(1, warmup_steps), "warmup_steps")

    def finish(self) -> dict[str, Any]:
        """The configuration; ConfigError listing all mismatches, if there are any."""
        if self.mismatches:
            first = "Expected a configuration that says the same as the training arguments, got:"
            last = 'Write "auto" in their place, or change one of the two.'
            raise ConfigError("\n".join([first, *self.mismatches, f"{last} [ZERO-707]"]))
        return self.document


def hidden_size(model_config: Any) -> int | None:
    """A model's hidden size; the largest of several; None if its config has none."""
    for config in (model_config, _attribute(model_config, "text_config")):
        single, several = _attribute(config, "hidden_size"), _attribute(config, "hidden_sizes")
        if single is not None:
            return int(single)
        if several:
            return int(max(several))
    return None


def _attribute(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


# Blocks

_BLOCKS = {
    "zero": "zero_optimization",
    "offload": "zero_optimization.offload_optimizer",
    "optimizer": "optimizer",
    "scheduler": "scheduler",
    "fp16": "fp16",
    "bf16": "bf16",
    "autocast": "torch_autocast",
    "data_types": "data_types",
    "tensorboard": "tensorboard",
    "csv_monitor": "csv_monitor",
    "rest": "",
    "checkpoint": "checkpoint",
}
"""By attribute of `Config` the path of its block, or "" for the keys outside of blocks."""


class Section(SimpleNamespace):
    """The values of a block, as attributes that cannot be set."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise FrozenInstanceError(
            f"Expected the configuration to stay as it was read, got a new {name!r}. Build another Config. [ZERO-701]"
        )


def _section(path: str, document: Mapping[str, Any]) -> Section | None:
    """The values of a block, checked by the table, as attributes; ConfigError lists all that break a rule."""
    block = _block_at(path, document)
    if block is not None and not isinstance(block, Mapping):
        raise ConfigError(f"- {path}: expected a block, got {block!r} [ZERO-702]")
    if path in ("optimizer", "scheduler") and not block:
        return None
    given = block or {}
    values = dict[str, Any]()
    wrong = list[str]()
    for row in TABLE.values():
        around, _, name = row.path.rpartition(".")
        if around == path and row.rule is not None:
            value = values[name] = _whole(given[name]) if name in given else copy.copy(row.rule.default)
            if not row.rule.holds(value):
                wrong.append(f"- {row.path}: expected {row.rule.expected}, got {value!r}")
    if wrong:
        raise ConfigError("\n".join(wrong) + " [ZERO-702]")
    return Section(**values)


def _block_at(path: str, document: Mapping[str, Any]) -> Any:
    """A block, possibly by an old name or in an old form."""
    if not path:
        return document
    block = value_at(document, path)
    if path == "zero_optimization" and isinstance(block, bool):
        return {"stage": int(block)}
    if path == "zero_optimization.offload_optimizer" and value_at(document, "zero_optimization.cpu_offload") is True:
        return {"device": "cpu"}
    old = document.get("bfloat16") if path == "bf16" else None
    if block is not None and old is not None:
        raise ConfigError("- bf16 and bfloat16: two names of one block; DeepSpeed reads bf16 only [ZERO-702]")
    return block if old is None else old


def _whole(value: Any) -> Any:
    # 5e8 is a float in JSON, and stands for a number of elements
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) >= 1 else value


_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_EQUATION = f"{_SIZES[0]} = {_SIZES[1]} * {_SIZES[2]} * ranks"


@dataclass(frozen=True)
class Batch:
    """Samples of a step: ``train`` on all ranks, in ``accumulation`` backward passes of ``micro`` on each rank."""

    train: int
    micro: int
    accumulation: int

    @classmethod
    def solve(cls, train: int | None, micro: int | None, accumulation: int | None, ranks: int) -> "Batch":
        """Complete the three numbers from the given ones; ConfigError if they contradict or are too few.

        Two determine the third; ``accumulation`` is 1 if only one of the other two is given.
        """
        given = dict(zip(_SIZES, (train, micro, accumulation), strict=True))
        wrong = [name for name, value in given.items() if value is not None and not COUNT.holds(value)]
        if wrong:
            told = ", ".join(f"{name} = {given[name]!r}" for name in wrong)
            raise ConfigError(f"Expected {_EQUATION}, each an int of at least 1, got {told}. [ZERO-706]")
        if train is None and micro is None:
            raise ConfigError(
                f"The configuration has neither train_batch_size nor train_micro_batch_size_per_gpu. {_EQUATION}: any "
                "two give the third. [ZERO-706]"
            )
        if accumulation is None:
            accumulation = 1 if train is None or micro is None else max(train // (micro * ranks), 1)
        if micro is None:
            assert train is not None, "one of the two is given"
            micro = max(train // (accumulation * ranks), 1)
        product = micro * accumulation * ranks
        if train is not None and train != product:
            raise ConfigError(
                f"Expected {_EQUATION}, got {train} = {micro} * {accumulation} * {ranks}, which is {product}; given "
                f"were {', '.join(f'{name} = {value}' for name, value in given.items() if value is not None)}. "
                "[ZERO-706]"
            )
        return cls(product, micro, accumulation)


@dataclass(frozen=True)
class Config:
    """A valid configuration.

    Attributes:
        batch: samples of a step.
        zero: the stage and its options.
        offload: placement of the optimizer's state.
        optimizer: name and options of the optimizer; None if none is configured.
        scheduler: name and options of the schedule; None if none is configured.
        fp16: options of fp16 parameters.
        bf16: options of bf16 parameters.
        autocast: options of forward passes under `torch.autocast`.
        data_types: dtypes of sums, parameters and buffers.
        tensorboard: options of TensorBoard output.
        csv_monitor: options of CSV output.
        checkpoint: options of checkpoints.
        rest: the keys outside of blocks.
        document: the configuration as given.
        findings: the effect of each of its keys.
    """

    batch: Batch
    zero: Any
    offload: Any
    optimizer: Any
    scheduler: Any
    fp16: Any
    bf16: Any
    autocast: Any
    data_types: Any
    tensorboard: Any
    csv_monitor: Any
    checkpoint: Any
    rest: Any
    document: Mapping[str, Any] = field(repr=False)
    findings: tuple[Finding, ...] = field(repr=False)

    def __post_init__(self) -> None:
        wrong = self._contradictions()
        if wrong:
            raise ConfigError("\n".join(["Expected a consistent configuration, got:", *wrong]) + " [ZERO-702]")

    @classmethod
    def parse(cls, source: Source, ranks: int) -> "Config":
        """Check and read a configuration.

        Args:
            source: a dictionary, the path of a JSON file, or JSON text in URL-safe base64.
            ranks: number of ranks.

        Raises:
            ConfigError: for any key or value that is unknown, refused, still ``"auto"``, out of range or contradictory;
                all of one kind are listed.
        """
        document = read(source)
        findings = tuple(check(document))
        train, micro, accumulation = map(document.get, _SIZES)
        builders: dict[str, Callable[[], Any]] = {
            **{name: partial(_section, path, document) for name, path in _BLOCKS.items()},
            "batch": lambda: Batch.solve(train, micro, accumulation, ranks),
        }
        parts, problems = dict[str, Any](), list[str]()
        for name, build in builders.items():
            try:
                parts[name] = build()
            except ConfigError as error:
                problems.append(str(error))
        if problems:
            message = "\n".join(["Invalid values in the DeepSpeed configuration:", *problems])
            raise ConfigError(coded(message, "[ZERO-702]"))
        return cls(**parts, document=document, findings=findings)

    @property
    def dtype(self) -> str:
        """The dtype of parameters, as an attribute of torch."""
        return "float16" if self.fp16.enabled else "bfloat16" if self.bf16.enabled else "float32"

    @property
    def tag_validation(self) -> str:
        """``"ignore"``, ``"warn"`` or ``"fail"``."""
        return str(self.checkpoint.tag_validation).lower()

    @property
    def bucket_elements(self) -> int | None:
        """Maximum number of elements in a bucket of several parameters; None if not configured."""
        sizes = [size for size in (self.zero.reduce_bucket_size, self.zero.allgather_bucket_size) if size]
        return min(sizes, default=None)

    @property
    def has_low_precision(self) -> bool:
        """True if parameters are fp16 or bf16."""
        return self.dtype != "float32"

    @property
    def has_masters(self) -> bool:
        """True if owners step fp32 masters."""
        return self.fp16.enabled or (self.bf16.enabled and not self.bf16.bf16_optimizer_states)

    @property
    def is_sharded(self) -> bool:
        """True in stages 1 and 2, and in stage 0 with low-precision parameters or offload."""
        return self.zero.stage > 0 or self.has_low_precision or self.offload.device != "none"

    @property
    def sums_in_fp32(self) -> bool:
        """True if averages of low-precision gradients add up in fp32; in stage 2 they always do."""
        sums = self.data_types.grad_accum_dtype
        return sums is not None and DTYPES[sums] == "float32" and self.has_low_precision

    @property
    def max_grad_norm(self) -> float | None:
        """The largest norm: infinite if a norm is wanted without clipping; None if no norm is wanted."""
        norm: float = self.rest.gradient_clipping
        if norm > 0:
            return norm
        return math.inf if self.zero.compute_grad_norm else None

    def _contradictions(self) -> list[str]:
        wrong, fp16, bf16, rest = list[str](), self.fp16, self.bf16, self.rest
        if self.optimizer is not None and "max_grad_norm" in self.optimizer.params:
            wrong.append(
                '- optimizer.params.max_grad_norm: expected "gradient_clipping" instead, outside of "optimizer"'
            )
        if fp16.loss_scale == 0 and 2.0**fp16.initial_scale_power < fp16.min_loss_scale:
            wrong.append(
                f"- fp16: expected min_loss_scale <= 2 ** initial_scale_power, got {fp16.min_loss_scale} > 2 ** "
                f"{fp16.initial_scale_power}"
            )
        if bf16.bf16_master_weights_and_grads != bf16.bf16_optimizer_states:
            wrong.append(
                "- bf16: expected bf16_master_weights_and_grads and bf16_optimizer_states both true or both false, got "
                f"{bf16.bf16_master_weights_and_grads} and {bf16.bf16_optimizer_states}: state has the precision of "
                "what is stepped"
            )
        if rest.prescale_gradients and rest.gradient_predivide_factor not in (None, 1):
            wrong.append(
                "- expected prescale_gradients = true or a gradient_predivide_factor, got both: "
                f"{rest.gradient_predivide_factor}"
            )
        if self.fp16.enabled and self.bf16.enabled:
            wrong.append("- fp16 and bf16 both enabled: use one of them")
        wanted = self.data_types.param_dtype
        if wanted is not None and DTYPES[wanted] != self.dtype:
            wrong.append(f"- data_types.param_dtype = {wanted!r} with parameters of {self.dtype}: enable that mode")
        sums = self.data_types.grad_accum_dtype
        if sums is not None and DTYPES[sums] not in (self.dtype, "float32"):
            wrong.append(
                f"- data_types.grad_accum_dtype = {sums!r} with gradients of {self.dtype}: use fp32, or leave it out"
            )
        if self.zero.stage < 2 and self.rest.gradient_predivide_factor not in (None, 1, 1.0):
            wrong.append(
                f"- gradient_predivide_factor = {self.rest.gradient_predivide_factor} in stage {self.zero.stage}, "
                "where DDP divides by the number of ranks before it sums: leave it out, or use stage 2"
            )
        comm = DTYPES[self.rest.communication_data_type or self.dtype]
        if self.zero.stage < 2 and comm == "float32" and self.dtype != "float32":
            wrong.append(
                f"- communication_data_type = 'fp32' with gradients of {self.dtype} in stage {self.zero.stage}, where "
                "DDP sends them as they are: leave it out, or use stage 2"
            )
        return wrong
