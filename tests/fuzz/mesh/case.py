"""A case on a mesh: frozen, without torch; and where its ranks stand, who holds what, which tokens go where."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.fuzz.case import text

DIMS = ("data", "pipe", "tensor")
CUTS = {"cut 0": 0, "cut 1": 1, "cut bias": 0}
"""By the role of a group, the dimension of its parameters that is cut."""
ROLES = ("dense", "matrices", "cut 0", "cut 1", "cut bias", "experts", "embedding")
"""Of groups, in their order; each layer of experts has a group of its own."""


@dataclass(frozen=True)
class Layer:
    """A layer; all take and return rows of one width.

    Attributes:
        kind: ``"dense"``, ``"cut"`` (over the tensor dimension), or ``"experts"``.
        hidden: size between its two matrices; for experts, of the first expert, each further one has one more.
        experts: how many there are in all.
        norm: whether it starts with a layer norm, which every rank holds whole.
        bias: whether the matrices have biases; a cut matrix has a cut one.
        buffer: whether it has a buffer that counts its forward passes.
    """

    kind: str = "dense"
    hidden: int = 5
    experts: int = 0
    norm: bool = False
    bias: bool = True
    buffer: bool = False


@dataclass(frozen=True)
class Layout:
    """Ranks, and the parts of the model on them.

    Attributes:
        sizes: of the dimensions `DIMS`.
        order: of the dimensions in the mesh, outermost first.
        is_bare: whether dimensions of one rank are left out of the mesh, and a mesh of data alone altogether.
        stages: how many layers each pipeline stage has.
        experts: for each layer of experts, how many each expert-parallel rank holds; its length divides the
            data-parallel ranks.
        replicas: how many copies of the state of dense parameters the data-parallel ranks keep.
        expert_replicas: the same of experts, where it divides the ranks with the same ones.
        strides: whether ranks that share a copy are not neighbours.
        splits: whether replicas and shards are two dimensions of the mesh.
    """

    sizes: tuple[int, int, int] = (1, 1, 1)
    order: tuple[str, ...] = DIMS
    is_bare: bool = False
    stages: tuple[int, ...] = (1,)
    experts: tuple[tuple[int, ...], ...] = ()
    replicas: int = 1
    expert_replicas: int = 1
    strides: bool = False
    splits: bool = False

    @property
    def data(self) -> int:
        """Number of data-parallel ranks."""
        return self.sizes[0]

    @property
    def pipe(self) -> int:
        """Number of pipeline stages."""
        return self.sizes[1]

    @property
    def tensor(self) -> int:
        """Number of parts of a matrix that is cut."""
        return self.sizes[2]

    def size(self, dim: str) -> int:
        """Of a dimension."""
        return self.sizes[DIMS.index(dim)]

    def shape(self) -> tuple[int, ...]:
        """Of the mesh, in its order."""
        return tuple(self.size(dim) for dim in self.order)

    def place(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank."""
        found = {}
        for dim in reversed(self.order):
            rank, found[dim] = divmod(rank, self.size(dim))
        return found

    def rank(self, **place: int) -> int:
        """The rank at these coordinates."""
        found = 0
        for dim in self.order:
            found = found * self.size(dim) + place[dim]
        return found

    def everyone(self) -> Iterator[dict[str, int]]:
        """All coordinates."""
        for place in itertools.product(*map(range, self.sizes)):
            yield dict(zip(DIMS, place, strict=True))

    def layers_of(self, stage: int) -> range:
        """The numbers of a stage's layers."""
        first = sum(self.stages[:stage])
        return range(first, first + self.stages[stage])

    def experts_of(self, layer: int, data: int) -> range:
        """The experts on a data-parallel rank, of the layer of experts with this number among those."""
        counts = self.experts[layer]
        rank = data % len(counts)
        first = sum(counts[:rank])
        return range(first, first + counts[rank])

    def spread(self, layer: int, data: int) -> range:
        """The data-parallel ranks that hold one copy of all experts of a layer."""
        ranks = len(self.experts[layer])
        return range(data // ranks * ranks, (data // ranks + 1) * ranks)

    def same(self, layer: int, data: int) -> range:
        """The data-parallel ranks with the same experts of a layer."""
        ranks = len(self.experts[layer])
        return range(data % ranks, self.data, ranks)

    def sharers(self, data: int) -> range:
        """The data-parallel ranks that share one copy of the state of dense parameters."""
        return _sharers(range(self.data), data, self.replicas, self.strides)

    def expert_sharers(self, layer: int, data: int) -> range | None:
        """The ranks that share one copy of a layer's experts; None if all of `same` do."""
        same = self.same(layer, data)
        if self.expert_replicas == 1 or len(same) % self.expert_replicas:
            return None
        return _sharers(same, data, self.expert_replicas, strides=False)


def _sharers(ranks: range, rank: int, replicas: int, strides: bool) -> range:
    if strides:
        return ranks[ranks.index(rank) % replicas :: replicas]
    size = len(ranks) // replicas
    first = ranks.index(rank) // size * size
    return ranks[first : first + size]


@dataclass(frozen=True)
class Net:
    """The whole model: an embedding, layers, scores of the next token.

    Attributes:
        tokens: how many there are.
        width: of a row.
        tied: whether scores are taken by the embedding; else by a matrix of their own.
        frozen: parameters that are frozen before anything is built.
        dtype: of all parameters.
        by_tensor: whether cut layers are distributed tensors; else they are cut by hand.
        rows: of a micro-batch.
        starves: in which part of the steps some experts get no token.
        late_value: how backward reads a norm's weight, which is before that in the model; see `Model` in
            `tests.fuzz.case`; None: not at all.
        idle: of a DDP model over experts that get none: ``"unused"``, or ``"empty"`` if they run on no rows.
    """

    layers: tuple[Layer, ...]
    tokens: int = 7
    width: int = 5
    tied: bool = True
    frozen: tuple[str, ...] = ()
    dtype: str = "float64"
    by_tensor: bool = False
    rows: int = 3
    starves: float = 0.0
    late_value: str | None = None
    idle: str = "unused"


@dataclass(frozen=True)
class How:
    """The optimizer, and how ours is built.

    Attributes:
        name: of the optimizer class.
        muon: roles of groups that are stepped by Muon.
        groups: options of their own, by role, see `ROLES`.
        named: whether parameters are given with names.
        has_empty: whether groups of which a rank has nothing are handed over empty; torch takes those without names.
        lists_frozen: whether parameters frozen from the start are in groups.
        ddp: ``"none"``, ``"dense"``, or ``"both"`` for a second DDP model over experts.
        cap: ``bucket_cap_mb`` of DDP.
        stage, overlap, partition, sync, nonfinite, loss_scale: options of ours.
        clip: ``"option"``, ``"loop"``, ``"value"`` or None.
        limit: of the norm, or of values.
        norm_type: of the norm.
        schedule: of the pipeline.
        micro: micro-batches of a pipeline's run.
        renames: whether ranks number their experts from 0, and say which they are.
        inner_cap: ``bucket_cap_mb`` of DDP models over experts.
        scaler: whether a `GradScaler` steps.
        unscales: whether the loop calls its ``unscale_`` without clipping anything.
        masters: whether parameters of low precision have copies in fp32.
        sums_in_fp32: ``accumulate_in_fp32`` of ours.
        offload: whether state is on the host of a stand-in for a device.
        finishes: with ``sync="forward"``, whether the loop waits for parameters after each step.
        added: roles of groups that are added by ``add_param_group``, on all ranks, before the first step.
    """

    name: str = "AdamW foreach"
    muon: tuple[str, ...] = ()
    groups: tuple[tuple[str, str, float], ...] = ()
    named: bool = True
    has_empty: bool = False
    lists_frozen: bool = True
    ddp: str = "none"
    cap: float = 0.0004
    stage: int = 1
    overlap: bool = True
    partition: str = "parameters"
    sync: str = "step"
    nonfinite: str | None = None
    loss_scale: float | str | None = None
    clip: str | None = None
    limit: float = 0.05
    norm_type: float = 2.0
    schedule: str = "1F1B"
    micro: int = 2
    renames: bool = False
    inner_cap: float = 0.0004
    scaler: bool = False
    unscales: bool = False
    masters: bool = False
    sums_in_fp32: bool = False
    offload: bool = False
    finishes: bool = True
    added: tuple[str, ...] = ()

    @property
    def on_nonfinite(self) -> str:
        """What ours does with gradients that are not finite."""
        if self.scaler:
            return "skip"
        default = "skip" if self.clip == "option" or self.loss_scale is not None else "step"
        return self.nonfinite or default


@dataclass(frozen=True)
class Step:
    """An iteration.

    Attributes:
        runs: backward passes, or runs of the schedule, that add up.
        to_none: whether gradients are dropped at its start; else they are zeroed.
        poison: a parameter's name in the whole model, and the data-parallel rank on which its gradient is infinite.
    """

    runs: int = 1
    to_none: bool = True
    poison: tuple[str, int] | None = None


@dataclass(frozen=True)
class Uneven:
    """Iterations under Join.

    Attributes:
        batches: of each data-parallel rank.
        counts_all: whether averages count ranks that have joined.
    """

    batches: tuple[int, ...]
    counts_all: bool = True


@dataclass(frozen=True)
class Refuse:
    """What ours must refuse on all ranks: ``"join"``, or ``"forward"`` for ``sync="forward"``."""

    thing: str


@dataclass(frozen=True)
class Away:
    """State is moved to a file, and back."""


@dataclass(frozen=True)
class Set:
    """A group's option is set."""

    role: str
    key: str
    value: float


@dataclass(frozen=True)
class Freeze:
    """A parameter is frozen, or trains again."""

    name: str
    trains: bool


@dataclass(frozen=True)
class Evaluate:
    """Forward without gradients."""


@dataclass(frozen=True)
class Compare:
    """State dicts are compared; then a new optimizer on a copy of the model loads its own if ``loads``."""

    loads: bool = False


@dataclass(frozen=True)
class Move:
    """A checkpoint is saved, and loaded into a new model at another layout, which goes on from there."""

    layout: Layout


Op = Step | Uneven | Refuse | Away | Set | Freeze | Evaluate | Compare | Move


@dataclass(frozen=True)
class MeshCase:
    """A whole case. ``str()`` prints it."""

    seed: int
    ranks: int
    layout: Layout
    net: Net
    how: How
    program: tuple[Op, ...]

    fault = None
    """These cases have none; the pool asks."""

    def __str__(self) -> str:
        lines = [f"case {self.seed} on a mesh of {self.ranks} ranks"]
        lines += [f"  {text(part)}" for part in (self.layout, self.net, self.how)]
        lines += [f"  {number:2}. {text(op)}" for number, op in enumerate(self.program)]
        return "\n".join(lines)

    def expert_layers(self) -> list[int]:
        """The numbers of the layers of experts."""
        return [number for number, layer in enumerate(self.net.layers) if layer.kind == "experts"]

    def role_of(self, name: str) -> str:
        """Which group a parameter of the whole model is in."""
        if name in ("embedding", "head"):
            return "embedding"
        _, number, end = name.split(".", 2)
        if end.startswith("experts."):
            return "experts"
        if self.net.layers[int(number)].kind == "cut":
            found = {"up.weight": "cut 0", "down.weight": "cut 1", "up.bias": "cut bias"}.get(end)
            if found is not None:
                return found
        return "matrices" if end.endswith("weight") and "norm" not in end else "dense"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The parameters of the whole model, and their shapes."""
        net = self.net
        found: dict[str, tuple[int, ...]] = {"embedding": (net.tokens, net.width)}
        if not net.tied:
            found["head"] = (net.tokens, net.width)
        for number, layer in enumerate(net.layers):
            prefix = f"layers.{number}"
            if layer.kind != "experts":
                if layer.norm:
                    found[f"{prefix}.norm.weight"] = found[f"{prefix}.norm.bias"] = (net.width,)
                found |= _block(prefix, layer.hidden, net.width, layer.bias)
                continue
            found[f"{prefix}.gate.weight"] = (layer.experts, net.width)
            if layer.bias:
                found[f"{prefix}.gate.bias"] = (layer.experts,)
            for expert in range(layer.experts):
                found |= _block(f"{prefix}.experts.local.{expert}", layer.hidden + expert, net.width, layer.bias)
        return found

    def tokens_of(self, step: int, run: int, data: int) -> tuple[list[int], list[int]]:
        """Tokens of a data-parallel rank, and the ones that follow, of all micro-batches of a run."""
        rng = random.Random(f"tokens {self.seed} {step} {run} {data}")
        count = self.net.rows * (self.how.micro if self.pipes else 1)
        return tuple([rng.randrange(self.net.tokens) for _ in range(count)] for _ in range(2))  # type: ignore[return-value]

    @property
    def pipes(self) -> bool:
        """Whether batches are of micro-batches, at every layout of the case."""
        return any(layout.pipe > 1 for layout in self.layouts())

    def refuses_join(self, layout: Layout) -> str | None:
        """The code with which ours refuses Join, if it does."""
        return "ZERO-310" if layout.replicas > 1 else None

    def may_join(self, layout: Layout) -> bool:
        """Whether iterations under Join have a reference, and are not refused in the midst of one."""
        if self.expert_layers() or layout.pipe > 1:
            return False  # not refused, but the reference has none
        return self.refuses_join(layout) is None and self.how.clip in (None, "option") and not self.how.scaler

    def layouts(self) -> list[Layout]:
        """All of the program, in order."""
        return [self.layout, *(op.layout for op in self.program if isinstance(op, Move))]

    def routes(self, layout: Layout, number: int, step: int, run: int, data: int) -> list[int]:
        """The expert of each token of `tokens_of`, in the layer of experts with this number among those."""
        layer = self.net.layers[self.expert_layers()[number]]
        rng = random.Random(f"starves {self.seed} {number} {step}")
        allowed = list(range(layer.experts))
        if rng.random() < self.net.starves:
            allowed = rng.sample(allowed, rng.randint(1, layer.experts))
        rng = random.Random(f"routes {self.seed} {number} {step} {run} {data}")
        if rng.random() < self.net.starves:
            allowed = rng.sample(allowed, rng.randint(1, len(allowed)))
        count = self.net.rows * (self.how.micro if self.pipes else 1)
        found = [rng.choice(allowed) for _ in range(count)]
        if self.how.ddp == "both" and self.net.idle == "unused":
            # DDP alone would wait for a rank that uses nothing of its second model (torch 2.13.0)
            for first in range(0, count, self.net.rows):
                found[first] = layout.experts_of(number, data)[0]
        return found


def _block(prefix: str, hidden: int, width: int, has_bias: bool) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in (("up", hidden, width), ("down", width, hidden)):
        found[f"{prefix}.{name}.weight"] = (rows, columns)
        if has_bias:
            found[f"{prefix}.{name}.bias"] = (rows,)
    return found
