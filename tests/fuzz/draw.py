"""A case from an integer: model, options, optimizer and mode. `draw_program.py` draws what is done with them."""

import random
from dataclasses import replace

from tests.fuzz.case import (
    LATE_VALUES,
    Action,
    Case,
    Ddp,
    Do,
    Fault,
    LeftOut,
    Loop,
    Mode,
    Model,
    Op,
    Optim,
    Second,
    Train,
)
from tests.fuzz.draw_program import (
    draw_program,
    is_frozen,
    is_plain,
    may_accumulate_in_low_precision,
    may_add_up,
    may_change_memory_format,
    may_have_second,
    may_join_unused,
    may_restart,
    refuses_memory_format,
)

OPTIMIZERS = (
    *("SGD", "SGD momentum", "SGD maximize foreach", "Adam", "Adam tensor lr", "AdamW foreach", "AdamW fused"),
    *("Adagrad", "Adadelta", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "Adafactor", "Muon"),
    *("toy LAMB", "toy 8-bit Adam"),
)
OWN_OPTIMIZERS = ("toy coupled", "toy schedule-free", "toy schedule-free", "toy picky")
MATRICES_ONLY = ("Muon",)
SECOND_OPTIMIZERS = ("SGD", "SGD momentum", "Adam", "AdamW foreach", "RMSprop", "AdamW fused")
ELEMENTWISE = (*OPTIMIZERS[: OPTIMIZERS.index("Adafactor")], "toy schedule-free")
KEEPS_WITH_STRIDES = tuple(name for name in ELEMENTWISE if name != "AdamW fused")
"""Those that are right after a change of memory format, in any order of elements: torch's fused step reads state by the
parameter's new strides (torch 2.13.0), Adafactor and LAMB add up a parameter in the order of memory."""
_COMMON = ("SGD momentum", "Adam", "AdamW foreach", "AdamW fused", "Adam tensor lr")
_SCHEDULERS = ("ExponentialLR", "StepLR", "CosineAnnealingLR", "LambdaLR", "OneCycleLR")
_SCALES: tuple[float | str, ...] = (1024.0, 0.25, "dynamic", "dynamic")
_FAULTS = 0.008
_CUT = 0.35
_COMPILED = 0.01


def draw(seed: int, ranks: int) -> Case:
    """The case of a seed; the same for ever, on every machine."""
    rng = random.Random(f"ddp_zero {seed} {ranks}")
    optim = _draw_optim(rng)
    mode = _draw_mode(rng)
    model = _draw_model(rng, optim, mode)
    if optim.name == "Adafactor" and not mode.masters:
        model = replace(model, second_dtype=None)  # its default eps is refused for several dtypes
    ddp = _draw_ddp(rng, model, mode)
    if optim.groups != "one" and rng.random() < 0.06:
        mode = replace(mode, group_clip=rng.choice([0.05, 0.3]))
    mode, loop = _draw_loop(rng, mode, model, optim)
    if mode.stage == 2 or mode.group_clip is not None or loop.scheduler is not None:
        optim = replace(optim, held_out=0)
    if mode.via == "shard_optimizer" and (optim.held_out or mode.group_clip is not None):
        mode = replace(mode, via="hooks")
    case = _with_cuts(Case(seed, ranks, model, ddp, optim, mode, loop, ()))
    chance = rng.random()
    if chance < _FAULTS and optim.name not in ("toy coupled", "toy picky"):  # which raise on their own
        return _with_fault(rng, case)
    if chance < _FAULTS + _COMPILED and model.kind == "mlp":
        compiled = rng.choice(["eager", "aot_eager"])
        case = replace(case, ddp=replace(ddp, compiled=compiled, bucket_cap_mb=None))
    if case.has_hook and mode.via == "hooks" and rng.random() < 0.005:
        case = replace(case, mode=replace(mode, forgets_hook=True))
    case = replace(case, program=draw_program(rng, case))
    return _with_late_value(_with_stale(_with_unused(_with_more(_with_groups(case)))))


def _with_groups(case: Case) -> Case:
    """A part of the cases, except those with Join, which is refused then, has shard groups; of one rank if need be.

    Drawn from numbers of its own, so that nothing else depends on it.
    """
    rng = random.Random(f"ddp_zero groups {case.seed} {case.ranks}")
    sizes = [size for size in range(1, case.ranks) if case.ranks % size == 0]
    joins = any(isinstance(op, Do) and op.name == "join" for op in case.program)
    if joins or rng.random() < (0.6 if len(sizes) > 1 else 0.95):
        return case
    return replace(case, mode=replace(case.mode, shard_ranks=rng.choice(sizes)))


def _with_more(case: Case) -> Case:
    """Perhaps `attach`, forks, restarts with another partition and other ranks, a second optimizer, memory formats.

    Drawn from numbers of its own, so that nothing else depends on it.
    """
    rng = random.Random(f"ddp_zero more {case.seed} {case.ranks}")
    if case.mode.via == "hooks" and not case.mode.forgets_hook and rng.random() < 0.5:
        case = replace(case, mode=replace(case.mode, via="attach"))
    if case.fault is not None or case.ddp.compiled is not None:
        return case
    if rng.random() < 0.15 and may_have_second(case):
        case = _with_second(rng, case)
    program = list(case.program)
    if rng.random() < 0.08:
        _insert(rng, program, Do("fork", compares=False))
    changes_format = rng.random() < 0.5 and case.optim.name in KEEPS_WITH_STRIDES and may_change_memory_format(case)
    if changes_format:
        _insert(rng, program, Do("memory_format", (rng.randrange(2),)))
    elif rng.random() < 0.3 and refuses_memory_format(case) and case.optim.name != "AdamW fused":
        _insert_refused(rng, program, Do("memory_format", (0,), compares=False), "memory format")
    if may_restart(case) and rng.random() < 0.2:
        may_cut = case.optim.name in ELEMENTWISE and not case.takes_norms_of_sums
        partition = rng.choice(["parameters", "elements" if may_cut else "auto", "auto"])
        _insert(
            rng, program, Do("restart", ("parameters" if changes_format else partition, rng.randint(1, case.ranks)))
        )
    if may_accumulate_in_low_precision(case):
        program = [_accumulating(rng, op) for op in program]
    return replace(case, program=tuple(program))


def _with_unused(case: Case) -> Case:
    """Perhaps ends with Join, with passes that leave out parts of the model; with random numbers of its own."""
    rng = random.Random(f"ddp_zero unused {case.seed} {case.ranks}")
    is_special = case.fault is not None or case.ddp.compiled is not None
    if is_special or not may_join_unused(case) or rng.random() < 0.6:
        return case
    passes: list[tuple[LeftOut, ...]] = []
    for _ in range(case.ranks):
        shares = [(part, rng.choice([0, 0.5, 0.5, 1])) for part in case.model.optional]
        count = 1 + rng.randint(0, 4)
        passes.append(tuple(tuple(part for part, share in shares if rng.random() < share) for _ in range(count)))
    *program, finish = case.program
    if is_frozen(case) or rng.random() < 0.5:  # by this pass DDP knows what is frozen
        program.append(Train(left_out=tuple(each[0] for each in passes), compares=False))
    uneven = Do("join_unused", tuple(each[1:] for each in passes))
    return replace(case, program=(*program, uneven, finish))


def _with_stale(case: Case) -> Case:
    """Perhaps changes to state, options and hooks between iterations, after which what was compiled is stale.

    Drawn from numbers of its own, so that nothing else depends on it.
    """
    rng = random.Random(f"ddp_zero stale {case.seed} {case.ranks}")
    is_special = case.fault is not None or not case.loop.calls_step or case.optim.name.startswith("toy")
    if is_special or rng.random() < 0.5:
        return case
    names = {op.name for op in case.program if isinstance(op, Do)}
    kinds = ["state"] * 3 + ["options"] * 2 + ["hooks"]
    if case.optim.name in ("SGD", "SGD momentum", "Adam") and not names & {"restart", "exception"}:
        kinds.append("tensor_lr")
    program = list(case.program)
    for place, op in enumerate(program):
        if is_plain(op) and isinstance(op, Train) and op.before == () and rng.random() < 0.25:
            kind, arguments = rng.choice(kinds), (rng.randrange(64), rng.choice([0.5, 0.9]))
            more = (rng.choice(["in place", "new", "dict"]),) if kind == "state" else ()
            action: Action = (kind, *arguments, *more) if kind in ("state", "options") else (kind,)
            program[place] = replace(op, before=(action,))
    return replace(case, program=tuple(program))


def _with_late_value(case: Case) -> Case:
    """Perhaps a parameter's value that backward needs late; with random numbers of its own."""
    rng = random.Random(f"ddp_zero late value {case.seed} {case.ranks}")
    if case.fault is not None or case.ddp.compiled is not None or rng.random() > share_of_late_values(case):
        return case
    names = {op.name for op in case.program if isinstance(op, Do)}
    if case.steps_inside and names & {"join", "join_unused"}:
        return case  # a rank that has joined could not know that the others raise
    return with_late_value(rng, case, completes=not names & {"freeze", "memory_format"})


def share_of_late_values(case: Case) -> float:
    """The part of cases in the mode of a case that have a late value."""
    return 0.25 if case.steps_inside and case.mode.interleaved else 0.06


def with_late_value(rng: random.Random, case: Case, completes: bool) -> Case:
    """The case with a late value; one of which torch cannot tell only where numbers are promised.

    Where the step inside backward may come first, the weight's bucket is most often not the last one.

    Args:
        rng: of random numbers.
        case: with any model.
        completes: whether the first layer's gradients are certain to be complete after all others.
    """
    model = case.model
    completes &= not (model.frozen or case.optim.held_out or model.tied) and len(model.widths) > 2
    place = "input" if model.kind != "embedding" and rng.random() < 0.35 else "first"
    has_numbers = not case.steps_inside or (completes and not case.mode.interleaved and place == "first")
    kind = rng.choice(LATE_VALUES if has_numbers else ("saved", "saved", "saved", "tied"))
    if case.mode.interleaved and rng.random() < 0.7:
        case = replace(case, ddp=replace(case.ddp, bucket_cap_mb=0.0001, caps_first=True))
    return replace(case, model=replace(model, late_value=(kind, place)))


def _with_second(rng: random.Random, case: Case) -> Case:
    """A second optimizer over what the first leaves out."""
    scales, refuses = case.loop.scaler, any(op.expects is not None for op in case.program)
    adds_up = may_add_up(case) and not scales
    second = Second(
        name=rng.choice(SECOND_OPTIMIZERS[: -1 if scales else None]),
        is_sharded=rng.random() < 0.7,
        leads=scales or (rng.random() < 0.4 and not refuses),  # scaler.update() comes after both
        zero=rng.choice(["each", "each", "model", "first" if adds_up else "each"]),
    )
    if scales:  # which refuses an optimizer without any gradient
        extras = tuple(extra for extra in case.model.extras if extra != "never")
        program = tuple(op for op in case.program if not (isinstance(op, Do) and op.name in ("freeze", "unfreeze")))
        case = replace(case, model=replace(case.model, extras=extras), program=program)
    if case.optim.name in MATRICES_ONLY and rng.random() < 0.8:
        case = replace(case, model=replace(case.model, bias=True, norm="layer" if not case.model.norm else None))
    optim = replace(case.optim, held_out=rng.choice([1, 2]), second=second)
    return replace(case, optim=optim)


def _accumulating(rng: random.Random, op: Op) -> Op:
    """A plain iteration, perhaps with `accumulate`."""
    if not (is_plain(op) and isinstance(op, Train)) or op.passes != ("last",) or op.closure or rng.random() > 0.2:
        return op
    return replace(op, passes=("accumulate",) * rng.choice([1, 2]) + ("last",))


def _insert(rng: random.Random, program: list[Op], op: Op) -> None:
    """Put an operation between two plain iterations, if there are such."""
    places = [place for place in range(1, len(program)) if is_plain(program[place - 1]) and is_plain(program[place])]
    if places:
        program.insert(rng.choice(places), op)


def _insert_refused(rng: random.Random, program: list[Op], op: Op, expects: str) -> None:
    """The same; the iteration after the operation is refused."""
    _insert(rng, program, op)
    if op in program:
        after = program.index(op) + 1
        following = program[after]
        assert isinstance(following, Train), "between two iterations"
        program[after] = replace(following, expects=expects, before=())  # nothing changes before it is refused


def _with_cuts(case: Case) -> Case:
    """Perhaps cut parameters, made larger, or the choice left to ``"auto"``; with random numbers of its own."""
    rng = random.Random(f"cuts {case.seed} {case.ranks}")
    # norms of parts round otherwise
    if rng.random() >= _CUT or case.optim.name not in ELEMENTWISE or case.takes_norms_of_sums:
        partition = rng.choice(["parameters", "parameters", "auto"])
        return replace(case, mode=replace(case.mode, partition=partition))
    inner = tuple(4 * width for width in case.model.widths[1:-1])
    widths = (case.model.widths[0], *inner, case.model.widths[-1])
    return replace(case, mode=replace(case.mode, partition="elements"), model=replace(case.model, widths=widths))


def _draw_optim(rng: random.Random) -> Optim:
    name = rng.choice(_COMMON if rng.random() < 0.4 else OPTIMIZERS)
    if rng.random() < 0.03:
        name = rng.choice(OWN_OPTIMIZERS)
    groups = rng.choices(["one", "decay", "alternate"], [5, 3, 2])[0]
    held_out = rng.choice([1, 2]) if rng.random() < 0.12 else 0
    return Optim(name, groups, rng.random() < 0.15, held_out)


def _draw_mode(rng: random.Random) -> Mode:
    kind = rng.choices(["standalone", "overlap", "stage 2", "stage 2 outside"], [26, 34, 30, 10])[0]
    stage = 2 if kind.startswith("stage 2") else 1
    overlap = kind in ("overlap", "stage 2")
    views = rng.random() < 0.75
    mode = Mode(
        stage=stage,
        overlap=overlap,
        interleaved=overlap and rng.random() < 0.5,
        split=rng.random() < 0.8,
        views=views,
        sync="forward" if views and rng.random() < 0.3 else "step",
        via=rng.choice(["shard_optimizer", "hooks"]),
    )
    if rng.random() < 0.2:
        mode = replace(mode, max_grad_norm=rng.choice([0.05, 0.3, 1.0]), norm_type=rng.choice([2.0, 2.0, 2.0, 3.0]))
    if rng.random() < 0.12:
        mode = replace(mode, nonfinite=rng.choice(["skip", "skip", "raise", "step"]))
    if rng.random() < 0.08:
        mode = replace(mode, masters=True)
    if rng.random() < 0.08:
        scale: float | str = rng.choice(_SCALES)
        nonfinite = mode.nonfinite if scale != "dynamic" or mode.nonfinite == "skip" else None
        mode = replace(mode, loss_scale=scale, nonfinite=nonfinite)
    return mode


def _draw_model(rng: random.Random, optim: Optim, mode: Mode) -> Model:
    if rng.random() < 0.06:  # fewer parameters than ranks
        return Model(widths=(rng.choice([8, 13]), rng.choice([1, 3])), bias=False, batch=rng.choice([1, 4]))
    only_matrices = optim.name in MATRICES_ONLY
    kind = "mlp" if only_matrices else rng.choices(["mlp", "conv", "embedding"], [7, 1.5, 1.5])[0]
    depth = rng.choice([1, 2, 2, 3, 3, 4, 7])
    width = rng.choice([None, 6, 9])
    widths = (8, *(width or rng.choice([1, 2, 3, 5, 7, 8, 13, 16, 17, 31, 33]) for _ in range(depth)), 3)
    if kind == "conv":
        widths = (3, *(rng.choice([1, 3, 4, 5]) for _ in range(min(depth, 3))), 3)
    norm = None if only_matrices else rng.choice([None, None, None, "layer", "batch"])
    if kind == "conv" and norm == "layer":
        norm = "batch"  # torch 2.13 dies of a frozen weight of a GroupNorm in channels-last memory
    extras = [name for name in ("never", "sometimes", "zero", "scalar", "layer") if rng.random() < 0.09]
    if only_matrices:
        extras = [name for name in extras if name in ("never", "sometimes", "layer")]
    dtype = rng.choices(["float32", "float64", "bfloat16"], [9, 1, 0.6])[0]
    second = rng.choice(["float64", "bfloat16"]) if "layer" in extras else None
    if mode.masters:
        dtype = rng.choice(["bfloat16", "bfloat16", "float16"])
        second = "float32"
    if dtype == "float16":
        kind, norm = "mlp", None
        widths = widths if widths[0] == 8 else (8, 5, 3)
    is_low = dtype in ("bfloat16", "float16")
    return Model(
        kind=kind,
        widths=widths,
        bias=not only_matrices and rng.random() < 0.8,
        norm=norm if not (is_low and norm == "batch") else None,
        spectral=kind == "mlp" and not is_low and rng.random() < 0.08,
        tied=kind != "conv" and rng.random() < 0.15,
        dropout=rng.random() < 0.1,
        dtype=dtype,
        second_dtype=second,
        extras=tuple(extras),
        frozen=tuple(rng.randrange(8) for _ in range(rng.choice([1, 2]))) if rng.random() < 0.1 else (),
        batch=rng.choice([1, 2, 3, 4, 6]) if norm != "batch" else rng.choice([2, 4]),
    )


def _draw_ddp(rng: random.Random, model: Model, mode: Mode) -> Ddp:
    find_unused = "sometimes" in model.extras or rng.random() < 0.12
    static = not find_unused and (rng.random() < 0.1 or ("never" in model.extras and rng.random() < 0.5))
    if "never" in model.extras and not static:
        find_unused = True
    hook = None
    if mode.stage == 1 and rng.random() < 0.15:
        hook = rng.choice(["allreduce", "fp16", "bf16"])
    return Ddp(
        bucket_cap_mb=rng.choice([None, 0.0001, 0.0005, 0.0015]),
        gradient_as_bucket_view=mode.stage == 2 or rng.random() < 0.3,
        find_unused_parameters=find_unused,
        static_graph=static,
        broadcast_buffers=rng.random() < 0.8,
        hook=hook,
        caps_first=rng.random() < 0.4,
    )


def _draw_loop(rng: random.Random, mode: Mode, model: Model, optim: Optim) -> tuple[Mode, Loop]:
    """The loop, and the mode without what has no exact reference beside it."""
    loop = Loop()
    low = model.has_low_precision
    if low and not mode.masters:
        mode = replace(mode, loss_scale=None)
    if rng.random() < 0.3:
        loop = replace(loop, scheduler=rng.choice(_SCHEDULERS))
    if rng.random() < 0.12 and not mode.clips and not mode.masters:
        clip = "own" if mode.stage == 2 or rng.random() < 0.4 else "torch"
        loop = replace(loop, clip=clip, clip_norm=rng.choice([0.05, 0.3, 1.0]))
        if mode.loss_scale is not None:
            mode = replace(mode, loss_scale=None)
    if rng.random() < 0.08 and not low and mode.loss_scale is None:
        loop = replace(loop, scaler=True, unscales=loop.clip is not None or rng.random() < 0.5)
        mode = replace(mode, nonfinite=None)
    is_plain = not mode.clips and mode.loss_scale is None and mode.nonfinite is None
    if mode.overlap and is_plain and loop.clip is None and not loop.scaler and rng.random() < 0.15:
        loop = replace(loop, calls_step=False)
    if optim.name.startswith("toy") and optim.name != "toy LAMB" and mode.masters:
        mode = replace(mode, masters=False, loss_scale=None)
    return mode, loop


def _with_fault(rng: random.Random, case: Case) -> Case:
    """One rank raises, dies or stops; the rest of the case is simple."""
    program = tuple(Train(uses=(True,) * case.ranks) for _ in range(8))
    if not case.loop.calls_step:
        program = (replace(program[0], compares=False), *program[1:])  # stepped before the second forward pass
    fault = Fault(
        how=rng.choice(["raise", "kill", "stop"]),
        rank=rng.randrange(case.ranks),
        at=rng.randrange(0, 6),
        where=rng.choice(["before", "forward", "backward", "step"]),
    )
    loop = Loop(calls_step=case.loop.calls_step)
    return replace(case, loop=loop, program=program, fault=fault)
