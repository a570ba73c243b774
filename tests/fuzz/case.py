"""What a case is: frozen data without torch, which prints as a program that a reader can follow."""

from dataclasses import dataclass, fields
from typing import Any

Value = Any
Action = tuple[Value, ...]
"""A name and its arguments, such as ``("set", 0, "lr", 0.5)``."""

LATE_VALUES = ("saved", "tied", "some ranks", "function", "hook", "checkpoint", "reentrant")
"""How backward reads a parameter's value: in tensors that were saved (``"tied"``: the parameter's gradient comes after
it; ``"some ranks"``: where the data say so), in a function or a tensor hook of the loop's own, in a recomputation."""

LeftOut = tuple[int | str, ...]
"""Parts of the model that a pass does not use: layers by position, extras by name."""


@dataclass(frozen=True)
class Model:
    """The network.

    Attributes:
        kind: ``"mlp"``, ``"conv"`` or ``"embedding"``.
        widths: of the layers, the input's first.
        bias: whether layers have one.
        norm: ``"layer"``, ``"batch"`` or None.
        spectral: whether the second layer has a spectral norm.
        tied: whether two layers share one weight.
        dropout: whether there is any.
        dtype: of the parameters.
        second_dtype: of the extra layer, if it has another one.
        extras: parameters besides those of layers: ``"never"`` used, ``"sometimes"``, of ``"zero"`` elements, a
            ``"scalar"``, a ``"layer"`` (of the second dtype).
        frozen: positions of parameters that are frozen before the model is wrapped.
        batch: rows of an input.
        late_value: how backward reads the value of the last layer's weight, one of `LATE_VALUES`, and where: at the
            ``"input"``, whose gradient is asked for, or behind the ``"first"`` layer.
    """

    kind: str = "mlp"
    widths: tuple[int, ...] = (8, 5, 3)
    bias: bool = True
    norm: str | None = None
    spectral: bool = False
    tied: bool = False
    dropout: bool = False
    dtype: str = "float32"
    second_dtype: str | None = None
    extras: tuple[str, ...] = ()
    frozen: tuple[int, ...] = ()
    batch: int = 4
    late_value: tuple[str, str] | None = None

    @property
    def has_low_precision(self) -> bool:
        """Whether any parameter is of 16 bits."""
        return {"bfloat16", "float16"} & {self.dtype, self.second_dtype} != set()

    @property
    def optional(self) -> LeftOut:
        """What a pass can leave out: layers that keep the width, but at the ends, and extras."""
        inner = range(1, len(self.widths) - 2)
        layers = [number for number in inner if self.widths[number] == self.widths[number + 1]]
        return (*layers, *(name for name in self.extras if name != "never"))


@dataclass(frozen=True)
class Ddp:
    """How both models are wrapped; ``hook`` is registered on both, ours around it.

    Attributes:
        caps_first: whether the cap holds for DDP's first buckets, too; else there is a single one.
    """

    bucket_cap_mb: float | None = None
    caps_first: bool = False
    gradient_as_bucket_view: bool = False
    find_unused_parameters: bool = False
    static_graph: bool = False
    broadcast_buffers: bool = True
    hook: str | None = None
    compiled: str | None = None


@dataclass(frozen=True)
class Second:
    """An optimizer over the parameters that the first one leaves out: in stage 2 there is none.

    Attributes:
        name: of the class with its options.
        is_sharded: whether ours shards it; else it is torch's own on both sides.
        leads: whether it steps before the first one.
        zero: who drops gradients: ``"each"`` its own, the ``"model"`` all of them, or only the ``"first"`` its own, so
            that those of the second add up.
    """

    name: str = "SGD"
    is_sharded: bool = True
    leads: bool = False
    zero: str = "each"


@dataclass(frozen=True)
class Optim:
    """The optimizer class, by its name in `tests.multiproc.cases`, and its groups.

    Attributes:
        name: of the class with its options.
        groups: ``"one"``; ``"decay"``, which reorders parameters; ``"alternate"`` with another lr.
        named: whether parameters are given with names.
        held_out: how many parameters are left for ``add_param_group`` or for a second optimizer; one that takes only
            matrices leaves all else to the second.
        second: the optimizer that steps those that are held out, or None.
    """

    name: str = "SGD"
    groups: str = "one"
    named: bool = False
    held_out: int = 0
    second: Second | None = None


@dataclass(frozen=True)
class Mode:
    """How ours is built.

    Attributes:
        via: ``"shard_optimizer"``, or the class and ``"hooks"`` or ``"attach"``.
        loss_scale: a number, ``"dynamic"`` or None.
        group_clip: ``max_grad_norm`` of the last group.
        forgets_hook: whether the hook that overlap and stage 2 need is not registered.
        partition: ``"parameters"``, ``"elements"``, or ``"auto"``, which must not change a bit either way.
        shard_ranks: of a shard group; None: no groups.
        sums_in_fp32: ``accumulate_in_fp32``, for stage 1.
    """

    stage: int = 1
    overlap: bool = False
    interleaved: bool = False
    split: bool = True
    views: bool = True
    sync: str = "step"
    via: str = "shard_optimizer"
    max_grad_norm: float | None = None
    norm_type: float = 2.0
    nonfinite: str | None = None
    loss_scale: float | str | None = None
    masters: bool = False
    group_clip: float | None = None
    forgets_hook: bool = False
    partition: str = "parameters"
    shard_ranks: int | None = None
    sums_in_fp32: bool = False

    @property
    def clips(self) -> bool:
        """Whether the optimizer clips by itself."""
        return self.max_grad_norm is not None or self.group_clip is not None


@dataclass(frozen=True)
class Loop:
    """What is the same in every iteration of the loop.

    Attributes:
        calls_step: whether ``opt.step()`` is in it.
        clip: in the loop: ``"torch"``, ``"own"`` or None.
        clip_norm: the largest norm.
        scaler: whether a `GradScaler` is used.
        unscales: whether ``scaler.unscale_`` is called.
        scheduler: the class, or None.
    """

    calls_step: bool = True
    clip: str | None = None
    clip_norm: float = 0.5
    scaler: bool = False
    unscales: bool = False
    scheduler: str | None = None


@dataclass(frozen=True)
class Train:
    """One iteration.

    Attributes:
        passes: one of ``"last"``, ``"no_sync"``, ``"accumulate"`` for each backward pass.
        zero: at its start: ``"none"``, ``"zeros"``, or ``"keep"``.
        before: actions before forward.
        middle: actions between backward and step.
        after: actions after the step.
        closure: whether forward and backward are in a closure.
        steps: whether ``step()`` is called.
        nonfinite: the rank whose loss is not finite and the factor, or None.
        uses: for each rank whether it uses the parameters that are used ``"sometimes"``.
        left_out: for each rank what it leaves out, of `Model.optional`.
        schedules: whether the scheduler steps.
        compares: whether models are compared after it, which waits for all parameters.
        expects: None, or why an error is expected: the key of `refusals.py`.
    """

    passes: tuple[str, ...] = ("last",)
    zero: str = "none"
    before: tuple[Action, ...] = ()
    middle: tuple[Action, ...] = ()
    after: tuple[Action, ...] = ()
    closure: bool = False
    steps: bool = True
    nonfinite: tuple[int, str] | None = None
    uses: tuple[bool, ...] = ()
    left_out: tuple[LeftOut, ...] = ()
    schedules: bool = True
    compares: bool = True
    expects: str | None = None


@dataclass(frozen=True)
class Do:
    """An operation between iterations: ``name`` of `operations.py`, its arguments, and whether an error is expected."""

    name: str
    args: Action = ()
    compares: bool = True
    expects: str | None = None


Op = Train | Do


@dataclass(frozen=True)
class Fault:
    """One rank fails: ``how`` is ``"raise"``, ``"kill"`` or ``"stop"``, before or inside operation ``at``."""

    how: str
    rank: int
    at: int
    where: str


@dataclass(frozen=True)
class Case:
    """A whole case. ``str()`` prints it."""

    seed: int
    ranks: int
    model: Model
    ddp: Ddp
    optim: Optim
    mode: Mode
    loop: Loop
    program: tuple[Op, ...]
    fault: Fault | None = None

    @property
    def waits(self) -> bool:
        """Whether with overlap every step waits for ``opt.step()``."""
        mode, loop = self.mode, self.loop
        decides = mode.clips or mode.loss_scale is not None or mode.nonfinite in ("skip", "raise")
        return decides or loop.clip is not None or loop.scaler

    @property
    def takes_norms_of_sums(self) -> bool:
        """Whether norms are taken of stage 2's own sums, which lie in memory as stage 2 lays them out."""
        return self.mode.stage == 2 and (self.mode.clips or self.loop.clip is not None)

    @property
    def steps_inside(self) -> bool:
        """Whether steps are taken inside backward."""
        return self.mode.overlap and not self.waits

    @property
    def has_hook(self) -> bool:
        """Whether ours registers a hook that takes steps or reduces."""
        return self.mode.overlap or self.mode.stage == 2

    def __str__(self) -> str:
        lines = [f"case {self.seed} on {self.ranks} ranks"]
        for part in (self.model, self.ddp, self.optim, self.mode, self.loop):
            lines.append(f"  {text(part)}")
        lines += [f"  {number:2}. {text(op)}" for number, op in enumerate(self.program)]
        if self.fault is not None:
            lines.append(f"  {text(self.fault)}")
        return "\n".join(lines)


def text(part: Any) -> str:
    """A dataclass as text, without what is as by default."""
    shown = [
        f"{field.name}={getattr(part, field.name)!r}"
        for field in fields(part)
        if getattr(part, field.name) != field.default
    ]
    return f"{type(part).__name__}({', '.join(shown)})"
