"""What is done in a case: mostly legal operations, and at most one near the end that may have to be refused."""

import random
from itertools import takewhile
from typing import Any

from tests.fuzz.case import Action, Case, Do, Op, Train

_WEIGHT_DECAY = {"SGD", "SGD momentum", "Adam", "AdamW foreach", "AdamW fused", "toy LAMB", "RMSprop"}
_LOADS = ("load_optimizer", "restore", "checkpoint_load")  # of the optimizer
_SETTLED = 3  # iterations after which DDP's buckets are final in every mode


class _Drawing:
    """What is known of a run while its program is drawn."""

    def __init__(self, rng: random.Random, case: Case) -> None:
        self.rng = rng
        self.case = case
        self.ops: list[Op] = []
        self.settled = 0
        self.has_trained = False
        self.remembers = False
        self.saved = False
        self.held_out = case.optim.held_out
        self.frozen = False
        self.has_prehook = False

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def add(self, name: str, *args: Any, **options: Any) -> None:
        self.ops.append(Do(name, args, **options))


def draw_program(rng: random.Random, case: Case) -> tuple[Op, ...]:
    """The operations of a case."""
    drawing = _Drawing(rng, case)
    if drawing.chance(0.03) and not case.mode.masters:  # which are part of it
        drawing.add("state_dict_before_the_first_step")
    if case.mode.forgets_hook or case.optim.name == "toy coupled":
        key = "no hook" if case.mode.forgets_hook else "coupled"
        for number in range(8):
            # until it is noticed, an evaluation would show what is not compared yet
            quiet = {} if number > 3 else {"before": (), "middle": (), "after": ()}
            _train(drawing, passes=("last",), compares=number > 3, expects=key, **quiet)
        drawing.add("finish", expects=key)
        return tuple(drawing.ops)
    uses_all = "sometimes" not in case.model.extras
    length = 5 if case.ddp.compiled else rng.randint(10, 15)
    while len(drawing.ops) < length:
        if drawing.has_trained and not case.ddp.compiled and drawing.chance(0.28):
            _between(drawing)
        else:
            _train(drawing)
    if drawing.chance(0.4) and not case.ddp.compiled:
        _dangerous(drawing)
        _train(drawing)
        _train(drawing)
    elif not (case.ddp.compiled or drawing.frozen) and uses_all and _can_join(case) and drawing.chance(0.12):
        drawing.add("join", *(rng.randint(0, 4) for _ in range(case.ranks)))
    drawing.add("finish")
    return tuple(drawing.ops)


# Iterations


def _train(drawing: _Drawing, **given: Any) -> None:
    case, rng = drawing.case, drawing.rng
    facts: dict[str, Any] = {}
    if "sometimes" in case.model.extras:
        facts["uses"] = tuple(rng.random() < 0.6 for _ in range(case.ranks))
    facts["passes"] = _passes(drawing)
    facts["zero"] = _zero(drawing, facts["passes"])
    facts["compares"] = case.mode.sync == "step" or drawing.chance(0.5)
    if case.loop.scheduler is not None:
        facts["schedules"] = drawing.chance(0.8)
    is_simple = facts["passes"] == ("last",)
    if is_simple and _may_have_closure(case) and drawing.chance(0.05):
        facts["closure"] = True
    elif not drawing.has_prehook and _may_overflow(drawing) and drawing.chance(0.12):
        facts["nonfinite"] = (rng.randrange(case.ranks), rng.choice(["inf", "nan"]))
    if drawing.chance(0.12):
        facts["before"] = (_harmless(drawing),)
    if drawing.chance(0.15):
        facts["after"] = (_harmless(drawing),)
    may_reach_between = case.loop.calls_step and not case.steps_inside and not facts.get("closure")
    if may_reach_between and drawing.has_trained:
        if drawing.chance(0.15):
            facts["middle"] = (_harmless(drawing),)
        elif drawing.chance(0.06) and not (case.mode.masters or case.loop.scaler or case.mode.loss_scale):
            facts["middle"] = (("full_grad", rng.randrange(64)),)
        elif drawing.chance(0.05) and facts["zero"] == "none":
            facts["steps"] = False
    if not case.loop.calls_step and case.mode.overlap and drawing.settled == 0:
        _first_of_a_loop_without_step(drawing, facts, given.get("expects"))
    if drawing.has_prehook and case.steps_inside:
        facts["expects"] = "middle"  # an lr of 0 hides it for one step
    drawing.ops.append(Train(**{**facts, **given}))
    drawing.settled += len(facts["passes"]) - facts["passes"].count("no_sync")
    drawing.has_trained = True


def _first_of_a_loop_without_step(drawing: _Drawing, second: dict[str, Any], expects: str | None) -> None:
    """The first step is taken before the second forward pass: until then nothing is compared, or written."""
    schedules = {"schedules": second["schedules"]} if "schedules" in second else {}
    uses = {"uses": second["uses"]} if "uses" in second else {}
    drawing.ops.append(Train(compares=False, expects=expects, **schedules, **uses))
    second.update(before=(), zero="none")
    drawing.settled += 1


def _may_have_closure(case: Case) -> bool:
    """Whether the loop does nothing between backward and step, and the optimizer evaluates closures."""
    is_bare = case.loop.clip is None and not case.loop.scaler and case.mode.loss_scale is None
    return is_bare and case.loop.calls_step and not case.optim.name.startswith("toy")


def _may_overflow(drawing: _Drawing) -> bool:
    """Whether a gradient that is not finite makes a step that is not taken, on both sides."""
    case, mode = drawing.case, drawing.case.mode
    if case.loop.scaler:
        makes_state = "fused" in case.optim.name  # also in a step that it does not take
        return not makes_state or (drawing.has_trained and not case.optim.held_out)
    if mode.nonfinite in ("skip", "raise"):
        return case.loop.clip is None
    return mode.nonfinite is None and (mode.clips or mode.loss_scale is not None)


def _passes(drawing: _Drawing) -> tuple[str, ...]:
    case = drawing.case
    if rounds_otherwise(case) or case.ddp.static_graph or case.ddp.compiled:
        return ("last",)
    if drawing.chance(0.06):
        return ("no_sync", "last") if drawing.chance(0.7) else ("no_sync", "no_sync", "last")
    in_low_precision = case.model.has_low_precision or case.mode.masters
    if not in_low_precision and drawing.chance(0.08):
        passes = ("accumulate",) * drawing.rng.choice([1, 2]) + ("last",)
        leaves_over = case.mode.overlap and case.loop.calls_step and drawing.has_trained and drawing.chance(0.2)
        return passes[:-1] if leaves_over else passes
    return ("last",)


def rounds_otherwise(case: Case) -> bool:
    """DDP without a hook rounds otherwise where gradients are kept in its buckets: see docs/limits.md."""
    is_power = case.ranks & (case.ranks - 1) == 0
    ours_has_hook = case.mode.stage == 1 and case.ddp.hook is None
    return not is_power and ours_has_hook and case.ddp.gradient_as_bucket_view


def _zero(drawing: _Drawing, passes: tuple[str, ...]) -> str:
    case = drawing.case
    if case.mode.stage == 2 or rounds_otherwise(case) or not drawing.has_trained or passes != ("last",):
        return "none"
    if drawing.chance(0.12):
        return "zeros"
    changes = case.loop.scaler or case.loop.clip is not None or case.mode.loss_scale is not None
    if drawing.chance(0.04) and not changes and not case.mode.clips and not case.mode.masters:
        return "keep"
    return "none"


def _harmless(drawing: _Drawing) -> Action:
    """Something that a loop may do at any time when no step is under way."""
    rng, case = drawing.rng, drawing.case
    kinds = ["set", "set", "decay", "data_decay", "write", "copy", "average"]
    if not case.mode.masters and case.ddp.compiled is None:
        kinds += ["repoint", "eval"]
    if case.mode.sync == "forward" and drawing.chance(0.2):
        kinds += ["construct"]
    kind = rng.choice(kinds)
    position = rng.randrange(64)
    if kind == "set":
        option = "weight_decay" if case.optim.name in _WEIGHT_DECAY and drawing.chance(0.4) else "lr"
        return ("set", position, option, rng.choice([0.5, 0.9, 1.3]))
    return (kind, position, rng.choice([0.9, 0.99]))


# Between iterations


def _between(drawing: _Drawing) -> None:
    case, rng = drawing.case, drawing.rng
    kinds = ["eval", "zero_grad", "owned"]
    if not case.mode.masters:
        kinds += ["consolidate", "load_optimizer", "remember", "checkpoint_save", "load_model", "deepcopy_state"]
        if drawing.remembers:
            kinds += ["restore"]
        if drawing.saved:
            kinds += ["checkpoint_load", "checkpoint_load"]
        if drawing.held_out and drawing.case.mode.stage == 1:
            kinds += ["add_param_group"] * 3
        if case.ddp.find_unused_parameters:
            kinds += ["unfreeze" if drawing.frozen else "freeze"] * 3
        if rng.random() < 0.25:
            kinds += ["exception", "deepcopy"]
    if case.optim.name == "toy schedule-free":
        kinds += ["schedule_free_eval"] * 6
    if case.mode.loss_scale == "dynamic":
        kinds = [
            kind for kind in kinds if kind not in ("exception", "checkpoint_load")
        ]  # the reference keeps its scale
    kind = rng.choice(kinds)
    if kind == "exception":
        _exception(drawing)
        return
    last = next((op for op in reversed(drawing.ops) if isinstance(op, Train)), None)
    if kind == "checkpoint_save" and last is not None and not (last.steps and case.loop.calls_step):
        return  # gradients may wait for opt.step(), which the message asks for
    if kind == "deepcopy" and drawing.frozen:
        return  # DDP would not reduce what is unfrozen later
    if kind == "deepcopy":
        drawing.add("deepcopy")
        drawing.settled = 0
        return
    drawing.add(kind, rng.randrange(64), compares=case.mode.sync == "step" or drawing.chance(0.3))
    drawing.remembers |= kind == "remember"
    drawing.saved |= kind == "checkpoint_save"
    drawing.held_out = 0 if kind == "add_param_group" else drawing.held_out
    if kind in _LOADS and not case.loop.calls_step:
        drawing.settled = 0  # the first step with a loaded state waits for the next forward pass
    if kind in ("freeze", "unfreeze"):
        drawing.frozen = kind == "freeze"
        drawing.settled = min(drawing.settled, _SETTLED - 2)
    if kind == "add_param_group":
        drawing.remembers = drawing.saved = False  # what was kept has fewer groups
        drawing.settled = min(drawing.settled, _SETTLED - 2)


def _exception(drawing: _Drawing) -> None:
    """In forward or backward on every rank, and how the user goes on."""
    where = drawing.rng.choice(["forward", "backward"])
    ways = ["wrap_again", "drop"] if where == "backward" else ["reset", "nothing", "wrap_again", "drop"]
    if drawing.case.optim.held_out or drawing.frozen or drawing.case.mode.masters:
        return
    way = drawing.rng.choice(ways)
    drawing.add("exception", where, way)
    if way in ("wrap_again", "drop") or (way == "reset" and not drawing.case.loop.calls_step):
        drawing.settled = 0  # after a reset, too, the first step waits for the next forward pass


def _can_join(case: Case) -> bool:
    mode, loop = case.mode, case.loop
    if loop.scaler or (loop.clip is not None and mode.stage == 2) or case.ddp.static_graph:
        return False
    return not mode.masters and mode.nonfinite is None


# What may have to be refused


def _dangerous(drawing: _Drawing) -> None:
    case, rng = drawing.case, drawing.rng
    kinds = []
    if case.steps_inside and case.loop.calls_step:
        kinds += ["middle"] * 4 + ["prehook", "late clip"]
        kinds += ["skipped"] if drawing.settled else []  # a new optimizer takes it for a loop without opt.step()
    elif case.loop.calls_step and not case.mode.masters:
        kinds += ["prehook"]
    # DDP itself fails at a first pass of a static graph that it does not reduce
    if case.loop.calls_step and not case.loop.scaler and (drawing.settled or not case.ddp.static_graph):
        kinds += ["leftover", "leftover"]
    is_large = len(case.model.widths) > case.ranks + 2 and not case.model.frozen
    is_spread = case.mode.stage == 2 and case.mode.split and is_large  # else one rank may have all gradients
    if is_spread and case.loop.calls_step and case.loop.clip is None and not case.loop.scaler:
        kinds += ["torch clip"]
    steps_by_bucket = case.steps_inside and drawing.settled >= _SETTLED
    if case.mode.stage == 2 and steps_by_bucket and not (case.ddp.find_unused_parameters or case.ddp.static_graph):
        kinds += ["kept"]  # elsewhere averages add up, whose last bits differ
    if not kinds:
        return
    kind = rng.choice(kinds)
    if kind == "middle":
        action = rng.choice(["set", "set", "decay", "data_decay", "repoint", "load_optimizer", "write"])
        arguments: tuple[Any, ...] = (rng.randrange(64), rng.choice([0.5, 0.9]))
        middle = (action, arguments[0], "lr", arguments[1]) if action == "set" else (action, *arguments)
        _train(drawing, middle=(middle,), passes=("last",), closure=False, expects="middle", compares=True)
    elif kind == "prehook":
        drawing.add("prehook", 0.9)
        drawing.has_prehook = True  # ours calls it for a step that is not taken, too
        expects = "middle" if case.steps_inside else None
        _train(drawing, expects=expects, compares=True, closure=False)
    elif kind == "late clip":
        _train(drawing, middle=(("clip_own", 0, 0.1),), passes=("last",), closure=False, expects="late clip")
    elif kind == "torch clip":
        _train(drawing, middle=(("clip_torch", 0, 0.1),), passes=("last",), closure=False, expects="absent")
    elif kind == "skipped":
        _train(drawing, steps=False, passes=("last",), closure=False, after=(), middle=(), compares=False)
        _train(drawing, expects="skipped", zero="none", before=(), passes=("last",), closure=False)
    elif kind == "leftover":
        passes = ("no_sync",) * rng.choice([1, 2])
        given = {"zero": "none", "closure": False, "nonfinite": None, "compares": True, "before": (), "middle": ()}
        if case.ddp.find_unused_parameters:  # DDP fails where a dropped pass has used what the next one does not
            given["steps"] = True
        _train(drawing, passes=passes, expects="leftover", **given)
    elif kind == "kept":
        zero = rng.choice(["keep", "zeros"])
        zero = "zeros" if _last_step_waited(drawing) else zero  # averages would add up, whose last bits differ
        _train(drawing, zero=zero, passes=("last",), closure=False, before=(), expects="kept")


def _last_step_waited(drawing: _Drawing) -> bool:
    """Whether the last iteration left a step that backward takes else to ``opt.step()`` or to the next forward pass."""
    backwards = drawing.ops[::-1]
    last = next(op for op in backwards if isinstance(op, Train))
    between = takewhile(lambda op: isinstance(op, Do), backwards[backwards.index(last) + 1 :])
    is_first = any(op.name in _LOADS or op.args[1:] == ("reset",) for op in between if isinstance(op, Do))
    return is_first or last.passes[-1] == "accumulate"


# What may be put between iterations, or at the end, afterwards


def is_plain(op: Op) -> bool:
    """Whether it is an iteration that begins and ends without gradients and is not refused."""
    return isinstance(op, Train) and (op.passes[-1], op.zero, op.expects) == ("last", "none", None) and op.steps


def may_have_second(case: Case) -> bool:
    """Whether a second optimizer may step some of the parameters, on either side alike.

    Not where stage 2 wants every parameter, and not where the first decides for itself what the second would have to
    follow: the loss is scaled by it, or it skips a step.
    """
    mode, scales = case.mode, case.mode.loss_scale is not None
    skips = any(isinstance(op, Train) and op.nonfinite is not None for op in case.program)
    refuses = any(op.expects is not None for op in case.program)
    alone = (refuses and case.loop.scaler) or (skips and not case.loop.scaler)
    return mode.stage == 1 and not (case.optim.held_out or scales or alone)


def is_frozen(case: Case) -> bool:
    """Whether a parameter is frozen at the end of the program."""
    names = [op.name for op in case.program if isinstance(op, Do) and op.name in ("freeze", "unfreeze")]
    return names[-1:] == ["freeze"]


def may_join_unused(case: Case) -> bool:
    """Whether passes under Join may leave out parts of the model."""
    names = {op.name for op in case.program if isinstance(op, Do)}
    refuses = any(op.expects is not None for op in case.program)
    is_apt = case.ddp.find_unused_parameters and case.model.optional and case.mode.shard_ranks is None
    return bool(is_apt) and _can_join(case) and not (refuses or "join" in names)


def may_add_up(case: Case) -> bool:
    """Whether some gradients may stay from one iteration to the next, on either side alike."""
    blows = any(isinstance(op, Do) and op.name == "exception" for op in case.program)
    return not (blows or rounds_otherwise(case))


def may_change_memory_format(case: Case) -> bool:
    """Whether there is a right reference after a change.

    Plain DDP is wrong after it without views, and with a hook: then the reference is wrapped again, as it is for norms
    of stage 2. Cut parameters refuse a change. Overlap has DDP build its final buckets a little earlier, so that three
    ranks and more may add up elements in another order.
    """
    mode, ddp = case.mode, case.ddp
    is_right = ddp.gradient_as_bucket_view and ddp.hook is None and not rounds_otherwise(case)
    places_count = case.ranks > 2 and mode.stage == 1 and mode.overlap
    return case.model.kind == "conv" and is_right and not places_count and mode.partition == "parameters"


def refuses_memory_format(case: Case) -> bool:
    """Whether iterations after a change to contiguous memory are refused: DDP, or the parts, would mix up elements."""
    mode, ddp = case.mode, case.ddp
    mixes = mode.partition == "elements" or (not ddp.gradient_as_bucket_view and case.has_hook)
    leads = case.optim.second is not None and case.optim.second.leads  # it would step before the first one raises
    is_calm = not (leads or any(op.expects is not None for op in case.program))
    return case.model.kind == "conv" and max(case.model.widths) > 1 and mixes and is_calm


def may_accumulate_in_low_precision(case: Case) -> bool:
    """Whether the reference can add up averages as stage 2 does, and stage 1 rounds as DDP does."""
    is_scaled = case.mode.loss_scale is not None or case.loop.scaler
    in_low_precision = case.model.has_low_precision or case.mode.masters
    return in_low_precision and not (is_scaled or case.ddp.static_graph or rounds_otherwise(case))


def may_restart(case: Case) -> bool:
    """Whether a new optimizer can go on from a checkpoint in the middle, and the reference beside it."""
    gains_group = case.optim.held_out and case.optim.second is None
    names = {op.name for op in case.program if isinstance(op, Do)}
    refuses = any(op.expects is not None for op in case.program)
    return case.loop.calls_step and not gains_group and not refuses and not names & {"freeze", "prehook", "join"}
