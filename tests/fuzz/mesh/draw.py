"""A mesh case from an integer."""

import math
import random
from dataclasses import replace

from tests.fuzz.case import LATE_VALUES
from tests.fuzz.mesh.case import (
    CUTS,
    DIMS,
    ROLES,
    Away,
    Compare,
    Evaluate,
    Freeze,
    How,
    Layer,
    Layout,
    MeshCase,
    Move,
    Net,
    Op,
    Refuse,
    Set,
    Step,
    Uneven,
)

OPTIMIZERS = (
    *("AdamW foreach", "AdamW fused", "Adam", "SGD", "SGD momentum", "SGD maximize foreach", "Adagrad"),
    *("Adadelta", "Adamax", "NAdam", "RAdam", "toy LAMB"),
)
"""Without those whose steps amplify the last bits of gradients, as centered RMSprop and 8-bit states do: the
comparison with one device would say nothing."""
_MUON = ("matrices", "cut 0", "cut 1")
_CAPS = (0.0001, 0.00023, 0.0004, 0.002, 25.0)


def draw_mesh(seed: int, ranks: int) -> MeshCase:
    """The case of a seed; the same for ever, on every machine."""
    rng = random.Random(f"ddp_zero mesh {seed} {ranks}")
    grids = [_sizes(rng, ranks)]
    moves = rng.random() < 0.45
    while moves and len(grids) < 3 and (len(grids) == 1 or rng.random() < 0.3):
        grids.append(grids[0] if rng.random() < 0.25 else _sizes(rng, ranks))
    net = _net(rng, grids)
    how = _how(rng, net, grids)
    if how.ddp == "both":
        net = replace(net, idle=rng.choice(["unused", "empty"]))
    if how.masters:
        net = replace(net, dtype=rng.choice(["bfloat16", "bfloat16", "float16"]))
    layouts = [_layout(rng, net, sizes) for sizes in grids]
    case = MeshCase(seed, ranks, layouts[0], net, how, ())
    case = replace(case, net=replace(net, frozen=_frozen(rng, case)))
    if len(layouts) > 1 and any(case.role_of(name) in CUTS for name in case.net.frozen):
        # in no group, ranks would hold different values under one name, which checkpoints refuse
        case = replace(case, how=replace(how, lists_frozen=True))
    case = replace(case, how=replace(case.how, added=_added(case)))
    case = replace(case, net=replace(case.net, late_value=_late_value(case)))
    pipes = any(layout.pipe > 1 for layout in layouts)
    return replace(case, program=_program(rng, case, layouts[1:], pipes))


def _late_value(case: MeshCase) -> str | None:
    rng = random.Random(f"ddp_zero mesh late value {case.seed} {case.ranks}")
    has_norm = any(layer.norm for layer in case.net.layers)
    # one device has the rows of all ranks: what the rows decide is decided for all of them
    kinds = [kind for kind in LATE_VALUES if kind != "some ranks"]
    if case.how.ddp != "none" and case.how.overlap:  # a stage before waits for the gradient of this one's input
        kinds = ["tied"]
    kind = rng.choice(kinds)
    return kind if has_norm and rng.random() < 0.15 else None


def _added(case: MeshCase) -> tuple[str, ...]:
    rng = random.Random(f"ddp_zero mesh added {case.seed} {case.ranks}")
    roles = [role for role in ("experts", "embedding") if rng.random() < 0.25]
    if case.how.stage == 2 and case.how.ddp != "none":
        roles = [role for role in roles if role != "embedding"]  # the optimizer must have all that DDP reduces
    # torch's class has a state from the start only of what it was built with, which an added group is not on our side
    return () if case.how.name == "Adagrad" else tuple(roles)


def _sizes(rng: random.Random, ranks: int) -> tuple[int, int, int]:
    every = [
        (ranks // (pipe * tensor), pipe, tensor)
        for pipe in range(1, min(ranks, 4) + 1)
        for tensor in range(1, min(ranks, 4) + 1)
        if ranks % (pipe * tensor) == 0
    ]
    spread = [sizes for sizes in every if max(sizes) < ranks]
    return rng.choice(spread if rng.random() < 0.8 and spread else every)


def _net(rng: random.Random, grids: list[tuple[int, int, int]]) -> Net:
    stages, tensor = max(sizes[1] for sizes in grids), math.lcm(*(sizes[2] for sizes in grids))
    by_tensor = tensor > 1 and rng.random() < 0.25
    is_even, may_be_empty = by_tensor or rng.random() < 0.6, rng.random() < 0.3
    layers = []
    for _ in range(max(stages, rng.randint(1, 3))):
        chances = {"dense": 2.0, "cut": 4.0 if tensor > 1 else 0.5, "experts": 3.0 if grids[0][0] > 1 else 0.7}
        (kind,) = rng.choices(list(chances), list(chances.values()))
        hidden = rng.randint(1, 9)
        if kind == "cut":
            hidden = tensor * rng.randint(1, 3) if is_even else max(hidden, 1 if may_be_empty else tensor)
        experts = rng.randint(1, 6) if kind == "experts" else 0
        norm, buffer = (kind != "experts" and rng.random() < chance for chance in (0.4, 0.2))
        layers.append(Layer(kind, hidden, experts, norm, rng.random() < 0.7, buffer))
    return Net(
        tuple(layers),
        tokens=rng.randint(3, 11),
        width=rng.choice([1, 3, 5, 7, 8]),
        tied=rng.random() < 0.6,
        dtype="float64" if rng.random() < 0.75 else "float32",
        by_tensor=by_tensor,
        rows=rng.randint(1, 4),
        starves=rng.choice([0.0, 0.3, 0.8]),
    )


def _how(rng: random.Random, net: Net, grids: list[tuple[int, int, int]]) -> How:
    pipes = any(sizes[1] > 1 for sizes in grids)
    num_mixtures = sum(layer.kind == "experts" for layer in net.layers)
    ddp = "none" if net.by_tensor or rng.random() < 0.35 else "dense"
    if ddp == "dense" and num_mixtures == 1 and not pipes and rng.random() < 0.5:
        ddp = "both"
    name, named = rng.choice(OPTIMIZERS), rng.random() < 0.6
    muon: tuple[str, ...] = ()
    if rng.random() < 0.15:
        muon = tuple(role for role in _MUON if rng.random() < 0.6)
    how = How(
        name,
        muon,
        groups=_groups(rng),
        named=named,
        has_empty=not named and rng.random() < 0.6,
        lists_frozen=rng.random() < 0.6,
        ddp=ddp,
        cap=rng.choice(_CAPS),
        stage=rng.choice([1, 2]),
        overlap=rng.random() < 0.7,
        partition="elements" if name != "toy LAMB" and not muon and rng.random() < 0.2 else "parameters",
        sync="forward" if not net.by_tensor and rng.random() < 0.2 else "step",
        nonfinite=rng.choice([None, None, "skip", "raise", "step"]),
        clip=rng.choice([None, None, None, "option", "option", "option", "loop", "loop", "value"]),
        limit=rng.choice([0.01, 0.05, 0.5, 1e6]),
        norm_type=rng.choice([2.0, 2.0, 2.0, 1.0, 3.0, math.inf]),
        schedule=rng.choice(["1F1B", "GPipe"]),
        micro=rng.randint(max(2, *(sizes[1] for sizes in grids)), 4),
        renames=rng.random() < 0.5,
        inner_cap=rng.choice(_CAPS),
        offload=rng.random() < 0.2,
        finishes=rng.random() < 0.5,
    )
    if how.clip in (None, "option") and rng.random() < 0.25:
        scales: list[float | str] = [0.25, 1024.0, "dynamic", "dynamic"]
        how = replace(how, loss_scale=rng.choice(scales), nonfinite=None)
    elif rng.random() < 0.2:
        how = replace(how, scaler=True, unscales=rng.random() < 0.4, nonfinite=None)
    may_have_masters = name != "toy LAMB" and not muon and how.clip in (None, "option") and not how.scaler
    if may_have_masters and rng.random() < 0.2:
        how = replace(how, masters=True, sums_in_fp32=ddp != "none" and how.stage == 1 and rng.random() < 0.4)
    return how


def _groups(rng: random.Random) -> tuple[tuple[str, str, float], ...]:
    found = []
    for role in ROLES:
        if rng.random() < 0.35:
            found.append((role, "lr", rng.choice([1e-3, 3e-3, 2e-2])))
        if rng.random() < 0.2:
            found.append((role, "weight_decay", rng.choice([0.0, 0.1])))
    return tuple(found)


def _layout(rng: random.Random, net: Net, sizes: tuple[int, int, int]) -> Layout:
    data, pipe, _ = sizes
    order = list(DIMS)
    if rng.random() < 0.4:
        rng.shuffle(order)
    experts = []
    for layer in net.layers:
        if layer.kind == "experts":
            allowed = [ranks for ranks in range(1, min(data, layer.experts) + 1) if data % ranks == 0]
            experts.append(_split(rng, layer.experts, allowed[-1] if rng.random() < 0.6 else rng.choice(allowed)))
    stages = _split(rng, len(net.layers), pipe)
    replicas = expert_replicas = 1
    if data > 1 and rng.random() < 0.3:
        replicas = rng.choice([count for count in range(2, data + 1) if data % count == 0])
    if experts and rng.random() < 0.3:
        expert_replicas = rng.choice([2, 2, 4])
    strides, splits = rng.random() < 0.4, replicas > 1 and rng.random() < 0.5
    is_bare = rng.random() < 0.5
    return Layout(sizes, tuple(order), is_bare, stages, tuple(experts), replicas, expert_replicas, strides, splits)


def _split(rng: random.Random, count: int, parts: int) -> tuple[int, ...]:
    """So many positive parts of a number."""
    cuts = [0, *sorted(rng.sample(range(1, count), parts - 1)), count]
    return tuple(cuts[place + 1] - cuts[place] for place in range(parts))


def _frozen(rng: random.Random, case: MeshCase) -> tuple[str, ...]:
    if rng.random() < 0.7:
        return ()
    # embeddings and gates train, so that every stage and every DDP model has something to
    names = [name for name in case.shapes() if "layers." in name and ".gate." not in name]
    if case.how.ddp == "both":
        names = [name for name in names if ".down." not in name]
    if case.how.ddp != "none":
        names = [name for name in names if not name.endswith(("up.weight", "norm.weight"))]
    return tuple(sorted(rng.sample(names, min(len(names), rng.randint(1, 2)))))


def _program(rng: random.Random, case: MeshCase, layouts: list[Layout], pipes: bool) -> tuple[Op, ...]:
    layout, ops, frozen = case.layout, list[Op](), set(case.net.frozen)
    waiting = list(layouts)
    for number in range(rng.randint(3, 5) + 2 * len(layouts)):
        chance = rng.random()
        if chance < 0.12:
            ops.append(Set(rng.choice(ROLES), rng.choice(["lr", "lr", "weight_decay"]), rng.choice([2e-3, 0.02])))
        elif chance < 0.24:
            ops += _freeze(rng, case, frozen)
        elif chance < 0.3:
            ops.append(Evaluate())
        elif chance < 0.42 and number:
            ops.append(Compare(loads=rng.random() < 0.6))
        elif chance < 0.46 and not case.how.offload:
            ops.append(Away())
        elif chance < 0.5 and case.refuses_join(layout) is not None:
            ops.append(Refuse("join"))
        elif chance < 0.54 and _has_distributed(case, layout):
            ops.append(Refuse("forward"))
        elif chance < 0.75 and case.may_join(layout):
            ops.append(_uneven(rng, case, layout))
        if waiting and number and rng.random() < 0.5:
            layout = waiting.pop()
            ops.append(Move(layout))
        ops.append(_step(rng, case, layout, frozen, pipes))
    if waiting:
        layout = waiting.pop()
        ops += [Move(layout), _step(rng, case, layout, frozen, pipes)]
    ops.append(Step())
    return tuple(ops)


def _has_distributed(case: MeshCase, layout: Layout) -> bool:
    return case.net.by_tensor and layout.tensor > 1 and any(layer.kind == "cut" for layer in case.net.layers)


def _uneven(rng: random.Random, case: MeshCase, layout: Layout) -> Uneven:
    batches = [rng.randint(0, 3) for _ in range(layout.data)]
    batches[rng.randrange(layout.data)] += 1
    if case.how.ddp != "none" and case.how.stage == 1:
        # DDP takes its later buckets, and so the order of its sums, from the first rank: if that joins at once, it has
        # seen no gradients, and names them in another order than in the plain run, where it has zeros (torch 2.13.0)
        batches[0] = max(1, batches[0])
    return Uneven(tuple(batches), case.how.ddp != "none" or rng.random() < 0.6)


def _freeze(rng: random.Random, case: MeshCase, frozen: set[str]) -> list[Op]:
    names = [name for name in case.shapes() if "layers." in name and name not in case.net.frozen]
    if case.how.ddp != "none":  # which waits for the gradients of all that it reduces
        names = [name for name in names if case.role_of(name) == "experts" and case.how.ddp == "dense"]
    if not names:
        return []
    name = rng.choice(sorted(frozen.intersection(names)) or names)
    trains = name in frozen
    (frozen.discard if trains else frozen.add)(name)
    return [Freeze(name, trains)]


def _step(rng: random.Random, case: MeshCase, layout: Layout, frozen: set[str], pipes: bool) -> Step:
    how, runs = case.how, rng.choice([1, 1, 1, 2, 3])
    if pipes and how.ddp != "none":
        runs = 1  # DDP would average every run of a schedule
    if how.ddp == "both" and case.net.idle == "unused":
        runs = 1  # DDP leaves sums that only earlier passes have made as they are, on each rank its own
    poison = None
    if how.on_nonfinite != "step" and rng.random() < 0.2:
        names = [name for name in case.shapes() if name not in frozen]
        names = [name for name in names if not (case.net.by_tensor and case.role_of(name) in CUTS)]
        poison = _poison(rng, case, layout, rng.choice(names))
    return Step(runs, rng.random() < 0.8 or how.stage == 2, poison)


def _poison(rng: random.Random, case: MeshCase, layout: Layout, name: str) -> tuple[str, int]:
    if case.role_of(name) != "experts":
        return name, rng.randrange(layout.data)
    _, layer, _, _, expert, _ = name.split(".", 5)
    among = case.expert_layers().index(int(layer))
    holders = [rank for rank in range(layout.data) if int(expert) in layout.experts_of(among, rank)]
    return name, rng.choice(holders)
