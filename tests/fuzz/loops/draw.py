"""A loop from an integer."""

import random
from dataclasses import replace
from typing import TypeVar

from tests.fuzz.case import Case, Ddp, Loop, Mode, Model, Optim
from tests.fuzz.draw import ELEMENTWISE, share_of_late_values, with_late_value
from tests.fuzz.loops.case import Do, Iteration, LoopCase
from tests.fuzz.loops.idioms import BODIES, COPIES, EDITS, FAILURES, INCIDENTS, OWN_EDITS, REPLACEMENTS, Style, Writer

CLASSES = tuple(name for name in ELEMENTWISE if not name.startswith("toy"))
_ONE_MODEL = ("supervised", "two forwards", "accumulating", "every second", "closure")
_SCALES: tuple[float | str, ...] = (1024.0, 0.25, "dynamic")
_T = TypeVar("_T")


def draw_loop(seed: int, ranks: int) -> LoopCase:
    """The case of a seed; the same for ever, on every machine."""
    return _with_late_value(_Draw(seed, ranks).case())


def _with_late_value(case: LoopCase) -> LoopCase:
    """Perhaps a parameter's value that backward needs late; with random numbers of its own."""
    rng = random.Random(f"loops late value {case.seed} {case.ranks}")
    unit = case.units[0]
    # a rank that has joined could not know that the others raise
    if (
        rng.random() > share_of_late_values(unit)
        or len(case.units) > 1
        or (unit.steps_inside and "Join" in case.idioms)
    ):
        return case
    changes = any(idiom.startswith(("freezes", "replaces")) for idiom in case.idioms)
    return replace(case, units=(with_late_value(rng, unit, not changes),), idioms=(*case.idioms, "late value"))


def _weighted(rng: random.Random, weights: dict[str, tuple[float, _T]]) -> str:
    return rng.choices(list(weights), [weight for weight, _ in weights.values()])[0]


class _Draw:
    """A case while it is drawn."""

    def __init__(self, seed: int, ranks: int) -> None:
        self.seed, self.ranks = seed, ranks
        self.rng = random.Random(f"loops {seed} {ranks}")
        self.kind = _weighted(self.rng, BODIES)
        self.is_static = self.kind == "supervised" and self.chance(0.06)
        self.finds_unused = not self.is_static and self.chance(0.25)
        self.idioms = [self.kind] + ["static graph"] * self.is_static
        count = 2 if self.kind in ("GAN", "chain") else 1
        self.units = tuple(self._unit(number, count) for number in range(count))
        self.first = self.units[0]
        self.is_bare = not (self.first.mode.loss_scale or self.first.loop.scaler or self.first.mode.masters)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def case(self) -> LoopCase:
        writer = Writer(self.rng, self._style(), self.units)
        program = self._program(writer)
        delay = self.rng.choice([0.0, 0.0, 2.0, 10.0])
        return LoopCase(self.seed, self.ranks, self.units, program, tuple(self.idioms), delay)

    # Models and modes

    def _unit(self, number: int, count: int) -> Case:
        rng, mode = self.rng, self._mode()
        if count > 1 or self.kind not in _ONE_MODEL or self.kind == "every second":  # averages add up in fp32
            mode = replace(mode, masters=False, loss_scale=None)
        if self.kind == "closure":
            mode = replace(mode, loss_scale=None, nonfinite=None)
        scaled = self.kind == "supervised" and not (mode.masters or mode.loss_scale) and self.chance(0.05)
        if scaled:
            mode = replace(mode, nonfinite=None)
        inner = [rng.choice([5, 9, 13, 17, 33]) for _ in range(rng.choice([2, 2, 3]))]
        if mode.partition == "elements":
            inner = [4 * width for width in inner]
        ends = (8, 3) if count == 1 else ((6, 2), (8, 6))[number]
        norm = rng.choice([None, None, "layer", "batch" if count == 1 else None]) if not mode.masters else None
        model = Model(
            widths=(ends[0], *inner, ends[1]),
            bias=self.chance(0.8),
            norm=norm,
            tied=self.chance(0.1) and count == 1,
            dropout=self.chance(0.1),
            dtype="bfloat16" if mode.masters else "float32",
        )
        is_power = self.ranks & (self.ranks - 1) == 0
        ddp = Ddp(
            bucket_cap_mb=rng.choice([None, 0.0005, 0.0015]),
            caps_first=self.chance(0.4),
            gradient_as_bucket_view=mode.stage == 2 or (is_power and self.chance(0.5)),
            find_unused_parameters=self.finds_unused,
            static_graph=self.is_static,
        )
        scheduler = rng.choice([None, None, "ExponentialLR", "StepLR", "LambdaLR", "OneCycleLR"])
        optim = Optim(rng.choice(CLASSES), rng.choice(["one", "one", "decay", "alternate"]), self.chance(0.1))
        loop = Loop(scaler=scaled, unscales=scaled and self.chance(0.5), scheduler=scheduler)
        return Case(1000 * self.seed + rng.randrange(500) * 2 + number, self.ranks, model, ddp, optim, mode, loop, ())

    def _mode(self) -> Mode:
        rng = self.rng
        stage, overlap = rng.choices([(1, False), (1, True), (2, True), (2, False)], [25, 35, 28, 12])[0]
        views = self.chance(0.85)
        vias = ["shard_optimizer", "shard_optimizer", "attach", "hooks"] if overlap or stage == 2 else ["hooks"] * 2
        mode = Mode(
            stage=stage,
            overlap=overlap,
            interleaved=overlap and self.chance(0.5),
            split=stage == 2 or self.chance(0.8),  # else one rank may have all gradients, and miss that others raise
            views=views,
            sync="forward" if views and self.chance(0.2) else "step",
            via=rng.choice([*vias, "shard_optimizer"]),
            partition=rng.choices(["parameters", "elements", "auto"], [4, 2, 4])[0],
        )
        if self.chance(0.18):
            mode = replace(mode, max_grad_norm=rng.choice([0.05, 0.3, 1e9]))
        if self.chance(0.08):
            mode = replace(mode, nonfinite=rng.choice(["skip", "raise", "step"]))
        if self.chance(0.06):
            mode = replace(mode, masters=True)
        if self.chance(0.06):
            mode = replace(mode, loss_scale=rng.choice(_SCALES))
            if mode.loss_scale == "dynamic" and mode.nonfinite != "skip":
                mode = replace(mode, nonfinite=None)
        if stage == 1 and mode.via == "shard_optimizer" and self.chance(0.08):
            mode = replace(mode, sums_in_fp32=True)
        if stage == 2 and mode.max_grad_norm is not None and mode.partition == "elements":
            mode = replace(mode, partition="parameters")  # norms of parts differ in their last bits
        if self.chance(0.08):
            mode = replace(mode, shard_ranks=rng.choice([n for n in range(1, self.ranks) if self.ranks % n == 0]))
        return mode

    # The form of the loop

    def _style(self) -> Style:
        rng, mode, first = self.rng, self.first.mode, self.first
        style = Style(
            zero=self._zero(),
            zero_at=rng.choice(["start", "start", "after", "between"]),
            copies=rng.choice(COPIES) if self.chance(0.07) else None,
            save=(rng.choice([0.0, 0.2, 0.5, 1.0]), *self._save()),
            evaluates=rng.choice([0.0, 0.0, 0.2, 0.6]),
            compares=1.0 if mode.sync == "step" and self.chance(0.7) else 0.4,
        )
        if self.kind in ("closure", "SAM", "surgery", "GAN"):
            style.zero_at = "start"
        if self.kind == "every second":
            style.zero_at = "after"
        elif self.kind == "accumulating" and style.zero_at == "between":
            style.zero_at = "after"
        if self.kind == "supervised" and self.is_bare and not mode.clips and self.chance(0.04):
            style.zero_at = "never"
        if style.copies is not None:
            self.idioms.append(f"copy: {style.copies}")
        if self.kind in ("supervised", "two forwards", "accumulating", "SAM", "GAN", "chain") and self.is_bare:
            self._draw_middle(style)
        if self.chance(0.4) and style.rate is None:
            style.rate = rng.choice(["before", "after"])
        style.scheduler = style.rate is not None and first.loop.scheduler is not None
        self.idioms += [f"zero: {' '.join(style.zero)} {style.zero_at}"]
        self.idioms += [f"rate: {style.rate}"] if style.rate else []
        self.idioms += [f"save: {style.save[2]} {'all' if style.save[1] is None else 'one'}"] if style.save[0] else []
        return style

    def _draw_middle(self, style: Style) -> None:
        rng, mode = self.rng, self.first.mode
        cuts = mode.stage == 2 and mode.partition == "elements"
        if self.chance(0.28):
            foreign = EDITS if mode.stage == 1 or self.chance(0.3) else ()
            own = OWN_EDITS[1:] if cuts or self.first.mode.shard_ranks else OWN_EDITS
            style.edit = rng.choice([*foreign, *own * 2])
            self.idioms.append(f"edit: {style.edit}")
        elif self.chance(0.15):
            style.rate = "middle"
        if self.chance(0.1 if mode.stage == 1 else 0.02):
            style.logs_norm = True
            self.idioms.append("norm logged")

    def _zero(self) -> tuple[str, str]:
        by, form = self.rng.choice(["opt", "opt", "opt", "model", "ddp", "hand"]), self.rng.choice(["none", "zeros"])
        if by == "hand":
            views = any(unit.ddp.gradient_as_bucket_view for unit in self.units)  # of which torch cannot detach
            form = self.rng.choice(["none", "none", "zero_", "zero_" if views else "detach_"])
        return by, form

    def _save(self) -> tuple[int | None, str]:
        if self.chance(0.6):
            return self.rng.choice([0, 0, self.ranks - 1]), self.rng.choice(["state_dict", "torch.save", "deepcopy"])
        return None, self.rng.choice(["state_dict", "torch.save", "deepcopy", "consolidate", "checkpoint"])

    # Statements

    def _program(self, writer: Writer) -> tuple[Iteration, ...]:
        rng, length = self.rng, self.rng.randint(5, 9)
        body, incidents = BODIES[self.kind][1], self._incidents(length)
        program: list[Iteration] = []
        for iteration in range(length):
            found: list[Do] = []
            if iteration == 0:
                found += self._first(writer)
            name = incidents.get(iteration)
            if name is not None and name not in INCIDENTS:
                found += self._between(writer, name)
            found += writer.before(iteration)
            found += (INCIDENTS[name][1] if name in INCIDENTS else body)(writer, iteration)
            is_open = name in ("dropped", "step left out") or (self.kind == "every second" and iteration % 2 == 0)
            if is_open:
                if name == "dropped" and self.chance(0.5):
                    found += [writer.save()] if self.chance(0.3) else []
            else:
                found += writer.after(iteration, is_last=iteration == length - 1)
            program.append(tuple(found))
        program.append(tuple(self._last(writer)))
        del rng
        return tuple(program)

    def _incidents(self, length: int) -> dict[int, str]:
        found: dict[int, str] = {}
        if self.chance(0.4):
            others = ["fails", "load", "write", "option", "evaluated"]
            others += ["freeze", "freeze"] if self.finds_unused else []
            clips = any(unit.mode.max_grad_norm is not None for unit in self.units)  # plain clipping: in place
            others += ["replace"] if self.chance(0.15) and not clips else []
            for name in self.rng.sample(others, self.rng.choice([1, 1, 2])):
                found[self.rng.randrange(1, length)] = name
        if self.kind == "supervised" and not self.is_static and self.chance(0.3):
            allowed = {name: pair for name, pair in INCIDENTS.items() if self._allows(name)}
            found[self.rng.randrange(length)] = _weighted(self.rng, allowed)
        self.idioms += [f"{name} at {iteration}" for iteration, name in sorted(found.items())]
        return found

    def _allows(self, name: str) -> bool:
        mode, edit = self.first.mode, name.removeprefix("late ")
        bare = ("parameter written late", "two steps", "rate set late", "step left out", "around DDP first")
        if name.startswith("late ") or name in bare:
            if not self.is_bare:
                return False
        if name == "two steps" and mode.max_grad_norm is not None:
            return False  # plain clipping changes gradients in place: the second norm is that of clipped ones
        if edit == "own_norm":
            return not (mode.stage == 2 and (mode.partition == "elements" or mode.shard_ranks))
        return True

    def _first(self, writer: Writer) -> list[Do]:
        found: list[Do] = []
        if writer.style.copies is not None:
            found.append(Do("copy_ddp", (writer.style.copies,)))
        may_step = self.first.mode.loss_scale is None and not self.first.loop.scaler
        if may_step and self.chance(0.06):
            self.idioms.append("step before the first backward")
            found += [Do("step")]
        # masters are no parameters of the plain loop's model yet when its optimizer has stepped them
        if may_step and len(self.units) == 1 and self.chance(0.1) and not self.first.mode.masters:
            self.idioms.append("global step hook")
            found.append(Do("observe"))
        if self.chance(0.05):
            self.idioms.append("saved before the first backward")
            found.append(Do("save", ("state_dict", False, 1000)))
        return found

    def _between(self, writer: Writer, name: str) -> list[Do]:
        """Incidents before an iteration."""
        rng, is_low = self.rng, self.first.mode.masters
        if name == "fails":
            local = self.kind in (
                "accumulating",
                "SAM",
                "surgery",
                "GAN",
            )  # DDP averages no_sync() after a bare forward
            where = "forward" if local else rng.choices(FAILURES, [4, 4, 3, 1])[0]
            then = rng.choice(["reset", "reset", "zero"])
            self.idioms.append(f"fails in {where}, {then}")
            return [Do("fails", (where, then))]
        if name == "load" and writer.labels and not is_low:
            label = rng.choice(writer.labels)
            return [Do("load", (label, rng.choice([None, 0, self.ranks - 1])))] if len(self.units) == 1 else []
        if name == "write" and not is_low:
            return [Do("write", (rng.choice(["data", "in place"]), rng.randrange(8), 0.9))]
        if name == "option":
            return [Do("set", (rng.choice(["lr", "lr", "weight_decay"]), 0.5))]
        if name == "evaluated":
            return [writer.evaluation()]
        if name == "freeze":
            freezes = not any(idiom.startswith("freezes") for idiom in self.idioms) or self.chance(0.5)
            position = rng.randrange(8)
            self.idioms.append(f"freezes {position}" if freezes else "thaws")
            return [Do("freeze", (position, freezes))]
        if name == "replace":
            how = rng.choice(REPLACEMENTS)
            self.idioms.append(f"replaces: {how}")
            return [Do("replace", (how, rng.randrange(8)))]
        return []

    def _last(self, writer: Writer) -> list[Do]:
        found: list[Do] = []
        if writer.style.copies not in (None, "pickle"):
            found.append(Do("show_average"))
        if self._may_join() and self.chance(0.12):
            self.idioms.append("Join")
            counts = tuple(self.rng.randint(0, 3) for _ in range(self.ranks))
            found += [Do("zero", ("opt", "none")), Do("join", (counts,))]
        return [*found, Do("finish")]

    def _may_join(self) -> bool:
        mode = self.first.mode
        is_calm = len(self.idioms) < 6 and not any("freezes" in idiom or "replaces" in idiom for idiom in self.idioms)
        is_plain = mode.nonfinite is None and self.is_bare and mode.shard_ranks is None and not self.is_static
        return self.kind == "supervised" and is_plain and is_calm
