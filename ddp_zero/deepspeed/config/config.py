"""`Config`: a whole configuration, checked against the table, its batch sizes worked out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from ddp_zero.deepspeed.config.document import Source, read, value_at
from ddp_zero.deepspeed.config.keys import ConfigError, Finding
from ddp_zero.deepspeed.config.sections import (
    AMOUNT,
    COUNT,
    DTYPE,
    DTYPES,
    FLAG,
    POSITIVE,
    AutocastSection,
    Bf16Section,
    DataTypesSection,
    Fp16Section,
    OffloadSection,
    OptimizerSection,
    Rule,
    SchedulerSection,
    Section,
    SectionType,
    WriterSection,
    ZeroSection,
    one_of,
    optional,
)
from ddp_zero.deepspeed.config.table import check

Value = TypeVar("Value")

EQUATION = "train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks"


@dataclass(frozen=True)
class Batch:
    """How many samples make a step.

    Attributes:
        train: of a step, on all ranks.
        micro: of a forward pass, on a rank.
        accumulation: backward passes of a step.
    """

    train: int
    micro: int
    accumulation: int

    @classmethod
    def solve(cls, train: int | None, micro: int | None, accumulation: int | None, ranks: int) -> "Batch":
        """The three numbers from those that are given.

        Two give the third; without the number of backward passes and one of the others, that number is 1.

        Raises:
            ConfigError: if they contradict each other, or too few are given, with the equation.
        """
        given = dict(
            train_batch_size=train, train_micro_batch_size_per_gpu=micro, gradient_accumulation_steps=accumulation
        )
        wrong = [name for name, value in given.items() if value is not None and not COUNT.holds(value)]
        if wrong:
            told = ", ".join(f"{name} = {given[name]!r}" for name in wrong)
            raise ConfigError(f"Expected {EQUATION}, each an int of at least 1, got {told}.")
        if train is None and micro is None:
            raise ConfigError(
                f"Expected train_batch_size or train_micro_batch_size_per_gpu, got neither. {EQUATION}: any two give "
                "the third."
            )
        if accumulation is None:
            accumulation = 1 if train is None or micro is None else max(train // (micro * ranks), 1)
        if micro is None:
            assert train is not None, "one of the two is given"
            micro = max(train // (accumulation * ranks), 1)
        product = micro * accumulation * ranks
        if train is not None and train != product:
            raise ConfigError(
                f"Expected {EQUATION}, got {train} = {micro} * {accumulation} * {ranks}, which is {product}; given "
                f"were {', '.join(f'{name} = {value}' for name, value in given.items() if value is not None)}."
            )
        return cls(product, micro, accumulation)


@dataclass(frozen=True)
class Rest(Section):
    """The keys outside of blocks."""

    gradient_clipping: float = 1.0
    managed_gradient_accumulation: bool = True
    gradient_allreduce_op: str = "mean"
    communication_data_type: str | None = None
    prescale_gradients: bool = False
    gradient_predivide_factor: float | None = None
    steps_per_print: int | None = None
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    dump_state: bool = False
    dataloader_drop_last: bool = False
    log_level: str | None = None

    RULES: ClassVar[Mapping[str, Rule]] = {
        "gradient_clipping": AMOUNT,
        "managed_gradient_accumulation": FLAG,
        "gradient_allreduce_op": Rule("'mean'", lambda value: isinstance(value, str) and value.lower() == "mean"),
        "communication_data_type": optional(DTYPE),
        "prescale_gradients": FLAG,
        "gradient_predivide_factor": optional(POSITIVE),
        "steps_per_print": optional(COUNT),
        "wall_clock_breakdown": FLAG,
        "memory_breakdown": FLAG,
        "dump_state": FLAG,
        "dataloader_drop_last": FLAG,
        "log_level": optional(one_of("debug", "info", "warning", "error", "critical")),
    }

    def contradictions(self) -> list[str]:
        """Gradients are divided before they are summed, or partly after."""
        if self.prescale_gradients and self.gradient_predivide_factor not in (None, 1, 1.0):
            return [
                "- expected prescale_gradients = true or a gradient_predivide_factor, got both: "
                f"{self.gradient_predivide_factor}"
            ]
        return []


@dataclass(frozen=True)
class Config:
    """A configuration that can be used.

    Attributes:
        batch: how many samples make a step.
        zero: the stage and its options.
        offload: where the optimizer's state is.
        optimizer: by name; None if none is configured.
        scheduler: by name; None if none is configured.
        fp16: parameters in fp16.
        bf16: parameters in bf16.
        autocast: forward passes under `torch.autocast`.
        data_types: of sums, parameters and buffers.
        tensorboard: what to write for it.
        csv_monitor: what to write as CSV.
        tag_validation: ``"ignore"``, ``"warn"`` or ``"fail"``.
        rest: what is not in a block.
        document: the configuration as it was given.
        findings: what becomes of each of its keys.
    """

    batch: Batch
    zero: ZeroSection = field(default_factory=ZeroSection)
    offload: OffloadSection = field(default_factory=OffloadSection)
    optimizer: OptimizerSection | None = None
    scheduler: SchedulerSection | None = None
    fp16: Fp16Section = field(default_factory=Fp16Section)
    bf16: Bf16Section = field(default_factory=Bf16Section)
    autocast: AutocastSection = field(default_factory=AutocastSection)
    data_types: DataTypesSection = field(default_factory=DataTypesSection)
    tensorboard: WriterSection = field(default_factory=WriterSection)
    csv_monitor: WriterSection = field(default_factory=WriterSection)
    tag_validation: str = "warn"
    rest: Rest = field(default_factory=Rest)
    document: Mapping[str, Any] = field(default_factory=dict, repr=False)
    findings: tuple[Finding, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        wrong = self._contradictions()
        if wrong:
            raise ConfigError("\n".join(["Expected a consistent configuration, got:", *wrong]))

    @classmethod
    def parse(cls, source: Source, ranks: int) -> "Config":
        """Check and read a configuration.

        Args:
            source: see `ddp_zero.deepspeed.config.document.read`.
            ranks: the number of ranks.

        Raises:
            ConfigError: for anything that is unknown, refused, still ``"auto"``, out of range or contradictory; all of
                one kind are listed.
        """
        document = read(source)
        findings = check(document)
        problems = list[str]()

        def take(build: Callable[[], Value]) -> Value | None:
            """What a function builds; None, and its message among the problems, if it raises."""
            try:
                return build()
            except ConfigError as error:
                problems.append(str(error))
                return None

        zero = document.get("zero_optimization")
        parts: dict[str, Any] = {
            "zero": take(lambda: ZeroSection.parse({"stage": int(zero)} if isinstance(zero, bool) else zero)),
            "offload": take(lambda: OffloadSection.parse(_offload(document))),
            "optimizer": take(lambda: _named(OptimizerSection, document.get("optimizer"))),
            "scheduler": take(lambda: _named(SchedulerSection, document.get("scheduler"))),
            "fp16": take(lambda: Fp16Section.parse(document.get("fp16"))),
            "bf16": take(lambda: Bf16Section.parse(_bf16(document))),
            "autocast": take(lambda: AutocastSection.parse(document.get("torch_autocast"))),
            "data_types": take(lambda: DataTypesSection.parse(document.get("data_types"))),
            "tensorboard": take(lambda: WriterSection.parse(document.get("tensorboard"))),
            "csv_monitor": take(lambda: WriterSection.parse(document.get("csv_monitor"))),
            "rest": take(lambda: Rest.parse(document)),
            "tag_validation": take(lambda: _tag_validation(document)),
            "batch": take(lambda: _batch(document, ranks)),
        }
        if problems:
            raise ConfigError("\n".join(["Invalid values in the DeepSpeed configuration:", *problems]))
        return cls(**parts, document=document, findings=tuple(findings))

    @property
    def dtype(self) -> str:
        """The dtype of parameters, as an attribute of torch."""
        return "float16" if self.fp16.enabled else "bfloat16" if self.bf16.enabled else "float32"

    @property
    def has_low_precision(self) -> bool:
        """Whether parameters are fp16 or bf16."""
        return self.fp16.enabled or self.bf16.enabled

    @property
    def has_masters(self) -> bool:
        """Whether owners step fp32 masters."""
        return self.fp16.enabled or (self.bf16.enabled and not self.bf16.bf16_optimizer_states)

    @property
    def is_sharded(self) -> bool:
        """Whether there is a sharded optimizer: in stages 1 and 2, and in stage 0 if there are masters."""
        return self.zero.stage > 0 or self.has_low_precision or self.offload.device != "none"

    def _contradictions(self) -> list[str]:
        wrong = list[str]()
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
        if self.zero.stage < 2 and comm == "float32" != self.dtype:
            wrong.append(
                f"- communication_data_type = 'fp32' with gradients of {self.dtype} in stage {self.zero.stage}, where "
                "DDP sends them as they are: leave it out, or use stage 2"
            )
        return wrong


def _named(kind: type[SectionType], block: Mapping[str, Any] | None) -> SectionType | None:
    """A block that names a class, if there is one."""
    return None if block is None or block == {} else kind.parse(block)


def _bf16(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The block, by its name or its old name."""
    block: Mapping[str, Any] | None = document.get("bf16")
    old: Mapping[str, Any] | None = document.get("bfloat16")
    if block is not None and old is not None:
        raise ConfigError("- bf16 and bfloat16: expected one of them, got both, of which DeepSpeed reads bf16 only")
    return old if block is None else block


def _offload(document: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The block, or what its old form means."""
    if value_at(document, "zero_optimization.cpu_offload") is True:
        return {"device": "cpu"}
    block: Mapping[str, Any] | None = value_at(document, "zero_optimization.offload_optimizer")
    return block


def _tag_validation(document: Mapping[str, Any]) -> str:
    if not isinstance(document.get("checkpoint", {}), Mapping):
        raise ConfigError(f"- checkpoint: expected a block, got {document['checkpoint']!r}")
    given = value_at(document, "checkpoint.tag_validation", "Warn")
    if not isinstance(given, str) or given.lower() not in ("ignore", "warn", "fail"):
        raise ConfigError(f"- checkpoint.tag_validation: expected Ignore, Warn or Fail, got {given!r}")
    return given.lower()


def _batch(document: Mapping[str, Any], ranks: int) -> Batch:
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, accumulation = (document.get(name) for name in names)
    return Batch.solve(train, micro, accumulation, ranks)
