"""The sharded variants of the scripts, as changed lines of the plain scripts, and what each mode is expected to do."""

import linecache
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from torch import nn

MODES: dict[str, dict[str, Any]] = {
    "stage 1": {"stage": 1},
    "stage 1, late": {"stage": 1, "sync": "forward"},
    "stage 1, clipped": {"stage": 1, "max_grad_norm": 1e9},
    "stage 1, after backward": {"stage": 1, "overlap": False},
    "class": {},
    "stage 2": {"stage": 2},
    "stage 2, late": {"stage": 2, "sync": "forward"},
    "stage 2, elements": {"stage": 2, "partition": "elements"},
    "stage 2, clipped": {"stage": 2, "max_grad_norm": 1e9},
    "stage 2, after backward": {"stage": 2, "overlap": False},
}
INSIDE = ("stage 1", "stage 1, late", "stage 2", "stage 2, late", "stage 2, elements")
"""Modes that step inside backward."""
STAGE_2 = tuple(mode for mode in MODES if mode.startswith("stage 2"))

Main = Callable[[Path, int, bool, Callable[[float], None]], Iterable[nn.Module]]
Refusals = dict[str, tuple[str | None, str | None]]


@dataclass(frozen=True)
class Script:
    """A plain script, and the lines by which users shard its optimizer.

    Attributes:
        file: its name.
        one_line: the changes for `shard_optimizer`, parts of lines by what takes their place; ``OPTIONS`` are those of
            the mode.
        by_class: the same for `ZeroRedundancyOptimizer` alone.
        clip: the line that clips by the norm, and what stage 2 has for it; without either where the optimizer clips.
        max_norm: of that line.
        stage_2: further changes in stage 2.
        in_all: changes of all variants, the plain script too.
        imports: what is imported for the one line.
        overlap: the name of that option there.
        ends_at: the step at which the first life ends, and the last step.
        modes: those that it can have.
        refused: what the message matches, by mode, in the first life and in the resumed one; None: that one is equal.
        close: modes whose last bits may differ, as docs/numerics.md says.
        simplest: the modes that change the fewest lines, in stages 1 and 2.
        has_plain_files: whether what is saved is what the plain script saves.
    """

    file: str
    one_line: dict[str, str]
    by_class: dict[str, str]
    clip: tuple[str, str] | None = None
    max_norm: float = 1e9
    stage_2: dict[str, str] = field(default_factory=dict)
    in_all: dict[str, str] = field(default_factory=dict)
    imports: str = "from ddp_zero import shard_optimizer"
    overlap: str = "overlap"
    ends_at: tuple[int, int] = (4, 8)
    modes: tuple[str, ...] = tuple(MODES)
    refused: Refusals = field(default_factory=dict)
    close: tuple[str, ...] = ()
    simplest: tuple[str, str] = ("stage 1", "stage 2")
    has_plain_files: bool = True

    def source(self, mode: str | None = None) -> str:
        """The text of a variant; None: the plain script."""
        text = (Path(__file__).parent / f"{self.file}.py").read_text()
        for old, new in self.in_all.items():
            text = _replaced(text, old, new)
        if mode is None:
            return text
        options, by_class = dict(MODES[mode]), mode == "class"
        changes = dict(self.by_class if by_class else self.one_line)
        is_partitioned = options.get("stage") == 2
        if self.clip is not None and ("max_grad_norm" in options or is_partitioned):
            changes[self.clip[0]] = "" if "max_grad_norm" in options else self.clip[1]
        if "max_grad_norm" in options:
            options["max_grad_norm"] = self.max_norm
        if is_partitioned:
            changes |= self.stage_2
            text = re.sub(r"(Parallel\(.*bucket_cap_mb=[\d.]+)\)", r"\1, gradient_as_bucket_view=True)", text)
        else:
            options.pop("stage", None)  # the default
        imports = "from ddp_zero import ZeroRedundancyOptimizer" if by_class else self.imports
        text = _replaced(text, "\nimport torch\n", f"\nimport torch\n{imports}\n")
        if "overlap" in options:
            options[self.overlap] = options.pop("overlap")
        given = "".join(f", {name}={value!r}" for name, value in options.items())
        for old, new in changes.items():
            text = _replaced(text, old, new.replace("(OPTIONS", f"({given[2:]}").replace("OPTIONS", given))
        return text

    def load(self, mode: str | None = None) -> Main:
        """The ``main`` of a variant, whose lines messages can quote."""
        source, name = self.source(mode), f"<{self.file}, {mode or 'plain'}>"
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        names: dict[str, Any] = {"__name__": name}
        exec(compile(source, name, "exec"), names)
        main: Main = names["main"]
        return main

    def changed_lines(self, mode: str) -> int:
        """How many lines a user changes, adds or removes."""
        plain, sharded = self.source().splitlines(), self.source(mode).splitlines()
        blocks = SequenceMatcher(None, plain, sharded, autojunk=False).get_opcodes()
        return sum(max(end - start, new_end - new) for kind, start, end, new, new_end in blocks if kind != "equal")


def _replaced(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
    return text.replace(old, new)


def _sharded_before(line: str, call: str) -> dict[str, str]:
    """A line of its own, before this line."""
    indentation = line[: len(line) - len(line.lstrip())]
    return {line: f"{indentation}{call}\n{line}"}


def _handed_over(optimizer: str) -> dict[str, str]:
    return {optimizer: f"ZeroRedundancyOptimizer({optimizer})"}


def _refused(modes: Iterable[str], match: str, resumed: str | None = None) -> Refusals:
    return {mode: (match, resumed) for mode in modes}


NORM = r"opt\.clip_grad_norm_\(max_norm\).*The line to change: .*clip_grad_norm_\(ddp.*, CLIP\)\. \[ZERO-401\]$"
NORMS = r"opt\.owned_gradients\(\).*The line to change: .*param\.grad\.data\.norm\(2\).*\[ZERO-401\]$"
SQUARES = (
    r"opt\.clip_grad_norm_\(float\('inf'\)\), from the first.*The line to change: .*param\.grad\*\*2.*\[ZERO-401\]$"
)
ANNEALED = r"'lr' of parameter group 0.*before backward\(\) or after opt\.step\(\).*overlap=False.*\[ZERO-304\]$"
TWO_PASSES = r"opt\.accumulate\(\).*overlap=False.*\[ZERO-307\]$"
THROUGH = r"got a second backward pass.*freeze it by requires_grad_\(False\) before its forward pass\. \[ZERO-307\]$"
STOPS = r"got opt\.zero_grad\(\).*overlap=False.*nonfinite='skip'.*\[ZERO-307\]$"
FREEZING, ZEROING = "        set_requires_grad(judge, False)\n", "        judge.zero_grad()\n        log(maker"
CLIPS = {
    "gpt": "            torch.nn.utils.clip_grad_norm_(ddp.parameters(), CLIP)\n",
    "ppo": "                nn.utils.clip_grad_norm_(ddp.parameters(), CLIP)\n",
    "speech": "        nn.utils.clip_grad_norm_(model.parameters(), CLIP)\n",
    "mingpt": "            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)\n",
}

GPT = Script(
    "gpt",
    one_line=_sharded_before("    scaler = ", "optimizer = shard_optimizer(ddp, optimizerOPTIONS)"),
    by_class=_handed_over("model.configure_optimizers(0.1, LR)"),
    clip=(CLIPS["gpt"], "            optimizer.clip_grad_norm_(CLIP)\n"),
    max_norm=1.0,
    close=("stage 2, elements",),
)
DIFFUSION = Script(
    "diffusion",
    one_line=_sharded_before("    averaged = AveragedModel", "optimizer = shard_optimizer(ddp, optimizerOPTIONS)"),
    by_class=_handed_over("AdamW(params, lr=LR, weight_decay=0.01)"),
    stage_2={
        "        zero_grad(params)\n": "        optimizer.zero_grad()\n",  # torch refuses its detach_() with views
        # from the first step on, so that steps wait
        "grad_norm(params), 3": 'float(optimizer.clip_grad_norm_(float("inf"))), 3',
    },
    refused=_refused(INSIDE[:2], ANNEALED),
    simplest=("stage 1, after backward", "stage 2"),
)
DINO = Script(
    "dino",
    one_line={"AdamW(param_groups(student))": "shard_optimizer(student, AdamW(param_groups(student))OPTIONS)"},
    by_class=_handed_over("AdamW(param_groups(student))"),
    stage_2={
        "            clip_gradients(student, CLIP)\n": (
            "            for grad in optimizer.owned_gradients().values():\n"
            "                grad.mul_((CLIP / (grad.norm(2) + 1e-6)).clamp(max=1))\n"
        )
    },
    ends_at=(6, 9),
    modes=tuple(mode for mode in MODES if mode != "stage 2, elements"),  # the norm of a part is not that of a parameter
    simplest=("stage 1", "stage 2, after backward"),
)
_RATES = {"judge": "1e-2", "maker": "5e-3"}
GAN = Script(
    "gan",
    one_line={
        f"Adam({one}.parameters(), lr={rate}": f"shard_optimizer({one}, AdamOPTIONS, lr={rate}"
        for one, rate in _RATES.items()
    },
    by_class={f"Adam({one}.parameters()": f"ZeroRedundancyOptimizer({one}.parameters(), Adam" for one in _RATES},
    refused=_refused(INSIDE, TWO_PASSES, TWO_PASSES),
    close=("stage 2, clipped", "stage 2, after backward"),
    simplest=("stage 1, after backward", "stage 2, after backward"),
)
GAN_ACCUMULATED = replace(
    GAN,
    one_line=GAN.one_line
    | {
        "        real_loss.backward()\n": (
            "        with judge_optimizer.accumulate():\n            real_loss.backward()\n"
        )
    },
    modes=INSIDE,
    refused={},
    close=INSIDE[2:],
    simplest=("stage 1", "stage 2"),
)
_JUDGE = next(iter(GAN.one_line))
GAN_LATE_JUDGE = replace(
    GAN,
    one_line=GAN.one_line | {_JUDGE: GAN.one_line[_JUDGE].replace("OPTIONS", "OPTIONS, overlap=False")},
    modes=INSIDE,
    refused={},
    close=INSIDE[2:],
    simplest=("stage 1", "stage 2"),
)
PPO = Script(
    "ppo",
    one_line={"Adam(ddp.parameters(), lr=LR, eps=1e-5)": "shard_optimizer(ddp, AdamOPTIONS, lr=LR, eps=1e-5)"},
    by_class={"Adam(ddp.parameters()": "ZeroRedundancyOptimizer(ddp.parameters(), Adam"},
    clip=(CLIPS["ppo"], "                optimizer.clip_grad_norm_(CLIP)\n"),
    max_norm=0.5,
    ends_at=(2, 4),
    close=("stage 2, elements",),
)
TIMM = Script(
    "timm",
    one_line=_sharded_before("    schedule = Schedule(", "optimizer = shard_optimizer(ddp, optimizerOPTIONS)"),
    by_class=_handed_over("create_optimizer(model, lr=1e-3, weight_decay=0.05)"),
)
TIMM_ATTACHED = replace(
    TIMM,
    one_line={
        "create_optimizer(model, lr=1e-3, weight_decay=0.05)": (
            "ZeroRedundancyOptimizer(create_optimizer(model, lr=1e-3, weight_decay=0.05)OPTIONS, overlap_with_ddp=True)"
        )
    }
    | _sharded_before("    schedule = Schedule(", "optimizer.attach(ddp)"),
    imports="from ddp_zero import ZeroRedundancyOptimizer",
    modes=("stage 1", "stage 2", "stage 2, clipped", "stage 2, elements"),
)
IMAGENET = Script(
    "imagenet",
    one_line={"SGD(model.parameters(), 0.1": "shard_optimizer(model, SGDOPTIONS, lr=0.1"},
    by_class={"SGD(model.parameters(), 0.1": "ZeroRedundancyOptimizer(model.parameters(), SGD, lr=0.1"},
)
MINGPT = Script(
    "mingpt",
    one_line=_sharded_before(
        "        self.schedule = ", "self.optimizer = shard_optimizer(self.model, self.optimizerOPTIONS)"
    ),
    by_class=_handed_over("model.configure_optimizers()"),
    clip=(CLIPS["mingpt"], "            self.optimizer.clip_grad_norm_(CLIP)\n"),
    max_norm=1.0,
    close=("stage 2, elements",),
)
_AFTER_DDP = "\n    def _load_snapshot("
TUTORIAL = Script(
    "tutorial",
    one_line={_AFTER_DDP: f"        self.optimizer = shard_optimizer(self.model, self.optimizerOPTIONS)\n{_AFTER_DDP}"},
    by_class={"SGD(model.parameters(), lr": "ZeroRedundancyOptimizer(model.parameters(), SGD, lr"},
)
DETECTION = Script(
    "detection",
    one_line={"SGD(params, lr=0.02": "shard_optimizer(model, SGDOPTIONS, params=params, lr=0.02"},
    by_class={"SGD(params, lr=0.02": "ZeroRedundancyOptimizer(params, SGD, lr=0.02"},
)
SPEECH = Script(
    "speech",
    one_line={"AdamW(model.parameters(), lr": "shard_optimizer(model, AdamWOPTIONS, lr"},
    by_class={"AdamW(model.parameters(), lr": "ZeroRedundancyOptimizer(model.parameters(), AdamW, lr"},
    clip=(CLIPS["speech"], "        optimizer.clip_grad_norm_(CLIP)\n"),
    max_norm=0.5,
    close=("stage 2, elements",),
)
SFT = Script(
    "sft",
    one_line={"trainer = Trainer(": "trainer = ZeroTrainer(zero=dict(OPTIONS), "},
    by_class={},
    imports="from ddp_zero.integrations.transformers import ZeroTrainer",
    overlap="overlap_with_ddp",
    max_norm=1.0,
    modes=tuple(mode for mode in MODES if mode != "class"),
    close=("stage 2, elements",),
    has_plain_files=False,
)
ACCELERATE = Script(
    "accelerate",
    one_line={
        "    optimizer: Any = AdamW(model.parameters(), lr=1e-2)\n": "",
        "scheduler: Any = LambdaLR(optimizer, rate)": "scheduler: Any = lambda optimizer: LambdaLR(optimizer, rate)",
        "accelerator.prepare(model, optimizer, loader, scheduler)": (
            "prepare(accelerator, model, AdamW, loader, schedulerOPTIONS, lr=1e-2)"
        ),
    },
    by_class={"AdamW(model.parameters()": "ZeroRedundancyOptimizer(model.parameters(), AdamW"},
    imports="from ddp_zero.integrations.accelerate import prepare",
    simplest=("class", "stage 2"),
    close=("stage 2, elements",),
    has_plain_files=False,
)

SCRIPTS = {
    "gpt": GPT,
    "gpt without clipping": replace(GPT, in_all={CLIPS["gpt"]: ""}, clip=None, max_norm=1e9, close=()),
    "gpt with torch's clipping": replace(GPT, clip=None, modes=STAGE_2[:2], refused=_refused(STAGE_2, NORM, NORM)),
    "gpt with a scaler": replace(GPT, in_all={"enabled=False": "init_scale=1024.0, growth_interval=3"}),
    "diffusion": DIFFUSION,
    "diffusion without the norm": replace(
        DIFFUSION,
        in_all={"        log(round(grad_norm(params), 3))\n": ""},
        stage_2={"        zero_grad(params)\n": "        optimizer.zero_grad()\n"},
        refused=_refused(INSIDE, ANNEALED),
        simplest=("stage 1, after backward", "stage 2, after backward"),
    ),
    "diffusion with the norm by hand": replace(
        DIFFUSION,
        stage_2={"        zero_grad(params)\n": "        optimizer.zero_grad()\n"},
        modes=STAGE_2,
        refused=_refused(STAGE_2, SQUARES, SQUARES),
    ),
    "dino": DINO,
    "dino with its own clipping": replace(DINO, stage_2={}, modes=STAGE_2, refused=_refused(STAGE_2, NORMS, NORMS)),
    "gan": GAN,
    "gan whose generator overlaps": GAN_LATE_JUDGE,
    "gan with accumulate": GAN_ACCUMULATED,
    "gan with accumulate and an open discriminator": replace(
        GAN_ACCUMULATED, in_all={FREEZING: ""}, refused=_refused(INSIDE, THROUGH, THROUGH)
    ),
    "gan that saves an open discriminator": replace(GAN, in_all={FREEZING: ""}),
    "gan that zeroes an open discriminator": replace(GAN, in_all={FREEZING: "", "        log(maker": ZEROING}),
    "ppo": PPO,
    "ppo without clipping": replace(
        PPO, in_all={CLIPS["ppo"]: ""}, clip=None, max_norm=1e9, close=(), refused=_refused(INSIDE, STOPS, STOPS)
    ),
    "timm": TIMM,
    "timm by attach": TIMM_ATTACHED,
    "imagenet": IMAGENET,
    "mingpt": MINGPT,
    "tutorial": TUTORIAL,
    "detection": DETECTION,
    "speech": SPEECH,
}
_INSIDE_THE_TRAINER = {
    "max_grad_norm=1.0": "max_grad_norm=0.0,\n        ddp_find_unused_parameters=False",
    '"grad_norm", ': "",  # ZeroTrainer computes no norm where nothing is clipped
}
IN_FRAMEWORKS = {
    "sft": SFT,
    "sft without clipping": replace(SFT, in_all=_INSIDE_THE_TRAINER, max_norm=1e9, close=()),
    "accelerate": ACCELERATE,
}
