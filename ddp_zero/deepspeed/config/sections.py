"""The blocks of a configuration as frozen dataclasses, which are valid or cannot be built."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from ddp_zero.deepspeed.config.keys import ConfigError

SectionType = TypeVar("SectionType", bound="Section")

DTYPES = {
    "fp16": "float16",
    "float16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
}
"""DeepSpeed's names of dtypes, as attributes of torch."""


@dataclass(frozen=True)
class Rule:
    """What a value must be.

    Attributes:
        expected: in words.
        holds: whether a value is.
    """

    expected: str
    holds: Callable[[Any], bool]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


FLAG = Rule("true or false", lambda value: isinstance(value, bool))
COUNT = Rule("an int of at least 1", lambda value: _is_int(value) and value >= 1)
WHOLE = Rule("an int of at least 0", lambda value: _is_int(value) and value >= 0)
AMOUNT = Rule("a number of at least 0", lambda value: _is_number(value) and 0 <= value < float("inf"))
POSITIVE = Rule("a number above 0", lambda value: _is_number(value) and 0 < value < float("inf"))
TEXT = Rule("a string", lambda value: isinstance(value, str))
OPTIONS = Rule("a block", lambda value: isinstance(value, Mapping) and all(isinstance(name, str) for name in value))
DTYPE = Rule(f"one of {', '.join(DTYPES)}", lambda value: isinstance(value, str) and value in DTYPES)


def one_of(*values: object) -> Rule:
    """One of a few values."""
    return Rule(f"one of {', '.join(map(repr, values))}", lambda value: type(value) is not bool and value in values)


def optional(rule: Rule) -> Rule:
    """The same, or null."""
    return Rule(f"{rule.expected}, or null", lambda value: value is None or rule.holds(value))


@dataclass(frozen=True)
class Section:
    """A block: each field has a rule, and blocks may exclude combinations.

    Raises:
        ConfigError: listing every value that breaks a rule.
    """

    BLOCK: ClassVar[str] = ""
    RULES: ClassVar[Mapping[str, Rule]] = {}

    def __post_init__(self) -> None:
        prefix = f"{self.BLOCK}." if self.BLOCK else ""
        wrong = [
            f"- {prefix}{name}: expected {rule.expected}, got {getattr(self, name)!r}"
            for name, rule in self.RULES.items()
            if not rule.holds(getattr(self, name))
        ]
        wrong = wrong or self.contradictions()
        if wrong:
            raise ConfigError("\n".join(wrong))

    def contradictions(self) -> list[str]:
        """Values that are fine by themselves and not together, a line each."""
        return []

    @classmethod
    def parse(cls: type[SectionType], block: Mapping[str, Any] | None) -> SectionType:
        """The section of a block; keys that it has no field for are left to others.

        Raises:
            ConfigError: listing every value that breaks a rule.
        """
        known = {one.name for one in fields(cls)}
        if block is not None and not isinstance(block, Mapping):
            raise ConfigError(f"- {cls.BLOCK}: expected a block, got {block!r}")
        return cls(**{name: _whole(value) for name, value in (block or {}).items() if name in known})


def _whole(value: Any) -> Any:
    """5e8 is a float in JSON, and stands for a number of elements."""
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) >= 1 else value


@dataclass(frozen=True)
class OptimizerSection(Section):
    """``optimizer``: a class by its name, and its options."""

    type: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)

    BLOCK: ClassVar[str] = "optimizer"
    RULES: ClassVar[Mapping[str, Rule]] = {"type": Rule("a name", lambda value: isinstance(value, str) and bool(value))}

    def contradictions(self) -> list[str]:
        """Clipping is not an option of an optimizer."""
        if not OPTIONS.holds(self.params):
            return [f"- optimizer.params: expected a block, got {self.params!r}"]
        if "max_grad_norm" in self.params:
            return ['- optimizer.params.max_grad_norm: expected "gradient_clipping" instead, outside of "optimizer"']
        return []


@dataclass(frozen=True)
class SchedulerSection(Section):
    """``scheduler``: a schedule by its name, and its options."""

    type: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)

    BLOCK: ClassVar[str] = "scheduler"
    RULES: ClassVar[Mapping[str, Rule]] = {
        "type": Rule("a name", lambda value: isinstance(value, str) and bool(value)),
        "params": OPTIONS,
    }


@dataclass(frozen=True)
class Fp16Section(Section):
    """``fp16``: parameters in fp16, and a loss scale."""

    enabled: bool = False
    auto_cast: bool = False
    loss_scale: float = 0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: float = 1

    BLOCK: ClassVar[str] = "fp16"
    RULES: ClassVar[Mapping[str, Rule]] = {
        "enabled": FLAG,
        "auto_cast": FLAG,
        "loss_scale": AMOUNT,
        "initial_scale_power": Rule("an int from 0 to 127", lambda value: WHOLE.holds(value) and value <= 127),
        "loss_scale_window": COUNT,
        "hysteresis": COUNT,
        "consecutive_hysteresis": FLAG,
        "min_loss_scale": POSITIVE,
    }

    @property
    def is_dynamic(self) -> bool:
        """Whether the scale follows the gradients."""
        return self.loss_scale == 0

    def contradictions(self) -> list[str]:
        """The first scale is not below the smallest."""
        if self.is_dynamic and 2.0**self.initial_scale_power < self.min_loss_scale:
            return [
                "- fp16: expected min_loss_scale <= 2 ** initial_scale_power, got "
                f"{self.min_loss_scale} > 2 ** {self.initial_scale_power}"
            ]
        return []


@dataclass(frozen=True)
class Bf16Section(Section):
    """``bf16``: parameters in bf16, and fp32 masters unless both are said to be kept in bf16."""

    enabled: bool = False
    check_grad_overflow: bool = True
    bf16_master_weights_and_grads: bool = False
    bf16_optimizer_states: bool = False

    BLOCK: ClassVar[str] = "bf16"
    RULES: ClassVar[Mapping[str, Rule]] = dict.fromkeys(
        ("enabled", "check_grad_overflow", "bf16_master_weights_and_grads", "bf16_optimizer_states"), FLAG
    )

    def contradictions(self) -> list[str]:
        """Masters and state have one precision."""
        if self.bf16_master_weights_and_grads != self.bf16_optimizer_states:
            return [
                "- bf16: expected bf16_master_weights_and_grads and bf16_optimizer_states both true or both false, got "
                f"{self.bf16_master_weights_and_grads} and {self.bf16_optimizer_states}: state has the precision of "
                "what is stepped"
            ]
        return []


@dataclass(frozen=True)
class AutocastSection(Section):
    """``torch_autocast``: forward passes under `torch.autocast`."""

    enabled: bool = False
    dtype: str = "bfloat16"

    BLOCK: ClassVar[str] = "torch_autocast"
    RULES: ClassVar[Mapping[str, Rule]] = {
        "enabled": FLAG,
        "dtype": one_of("bfloat16", "bf16", "torch.bfloat16"),
    }


@dataclass(frozen=True)
class DataTypesSection(Section):
    """``data_types``."""

    grad_accum_dtype: str | None = None
    param_dtype: str | None = None
    buffer_dtype: str | None = None
    keep_in_fp32_modules: Any = "auto"

    BLOCK: ClassVar[str] = "data_types"
    RULES: ClassVar[Mapping[str, Rule]] = {
        "grad_accum_dtype": optional(DTYPE),
        "param_dtype": optional(DTYPE),
        "buffer_dtype": optional(DTYPE),
        "keep_in_fp32_modules": Rule(
            '"auto" or a list of patterns',
            lambda value: value == "auto" or (isinstance(value, list) and all(isinstance(one, str) for one in value)),
        ),
    }


@dataclass(frozen=True)
class OffloadSection(Section):
    """``zero_optimization.offload_optimizer``."""

    device: str = "none"

    BLOCK: ClassVar[str] = "zero_optimization.offload_optimizer"
    RULES: ClassVar[Mapping[str, Rule]] = {"device": one_of("none", "cpu")}


@dataclass(frozen=True)
class ZeroSection(Section):
    """``zero_optimization``."""

    stage: int = 0
    reduce_bucket_size: int | None = None
    allgather_bucket_size: int | None = None
    overlap_comm: bool | None = False
    contiguous_gradients: bool = True
    ignore_unused_parameters: bool = True
    load_from_fp32_weights: bool = True
    compute_grad_norm: bool = True
    reduce_scatter: bool = True
    round_robin_gradients: bool = False
    elastic_checkpoint: bool = False
    cpu_offload: bool | None = None

    BLOCK: ClassVar[str] = "zero_optimization"
    RULES: ClassVar[Mapping[str, Rule]] = {
        "stage": one_of(0, 1, 2),
        "reduce_bucket_size": optional(COUNT),
        "allgather_bucket_size": optional(WHOLE),
        "overlap_comm": optional(FLAG),
        "contiguous_gradients": FLAG,
        "ignore_unused_parameters": FLAG,
        "load_from_fp32_weights": FLAG,
        "compute_grad_norm": FLAG,
        "reduce_scatter": FLAG,
        "round_robin_gradients": FLAG,
        "elastic_checkpoint": FLAG,
        "cpu_offload": optional(FLAG),
    }

    @property
    def bucket_elements(self) -> int | None:
        """The most elements in a bucket of several parameters; None if nothing was said."""
        sizes = [size for size in (self.reduce_bucket_size, self.allgather_bucket_size) if size]
        return min(sizes, default=None)


@dataclass(frozen=True)
class WriterSection(Section):
    """``tensorboard`` or ``csv_monitor``."""

    enabled: bool = False
    output_path: str = ""
    job_name: str = "DeepSpeedJobName"

    RULES: ClassVar[Mapping[str, Rule]] = {"enabled": FLAG, "output_path": TEXT, "job_name": TEXT}
