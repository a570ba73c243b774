"""A case from an integer, without torch."""

import random
from dataclasses import replace
from typing import Any

from tests.fuzz.before.case import BeforeCase
from tests.fuzz.case import LATE_VALUES

MODES: dict[str, dict[str, Any]] = {
    "1 waiting": {"overlap": False},
    "1": {},
    "1 watched": {"overlap": False, "nonfinite": "skip"},
    "1 clipped": {"max_grad_norm": 1e9},
    "1 summed": {"accumulate_in_fp32": True},
    "2": {"stage": 2},
    "2 waiting": {"stage": 2, "overlap": False},
    "2 clipped": {"stage": 2, "max_grad_norm": 1e9},
    "2 cut": {"stage": 2, "partition": "elements"},
    "2 late": {"stage": 2, "sync": "forward"},
}
STEPS_INSIDE = {"1", "1 summed", "2", "2 cut", "2 late"}
"""Modes with steps inside backward: of a single bucket, as here, when the last gradient is complete."""
_EARLY = ("pass around", "wrap", "pass around, zeroed")
_LATE = (
    *(
        "pass around",
        "no_sync",
        "reduced pass",
        "interrupted, wrapped again",
        "wrap",
        "zero",
        "zeros",
        "keep gradients",
    ),
    *("keep reducer", "forward pass", "backward hooks", "comm hook", "plain optimizer"),
)
_EARLIER = ("dropped", "detached", "kept")


def draw_before(seed: int, ranks: int) -> BeforeCase:
    """The case of a seed."""
    rng = random.Random(f"before {seed}")
    events = [rng.choice(_EARLY) for _ in range(rng.randint(0, 2))] + ["wrap"]
    for _ in range(rng.randint(0, 4)):
        if rng.random() < 0.25:
            events.append(f"{rng.choice(_EARLIER)}:{rng.choice(list(MODES))}")
        else:
            events.append(rng.choice(_LATE))
    case = BeforeCase(
        seed=seed,
        ranks=ranks,
        views=rng.random() < 0.7,
        static=rng.random() < 0.15 and _learns_graph(events),
        unused=rng.random() < 0.25,
        events=tuple(events),
        mode=rng.choice(list(MODES)),
        door=rng.choice(("shard_optimizer", "attach")),
        zeroes=rng.choice(("start", "after", "zeros")),
        late_hook=rng.randrange(4) if rng.random() < 0.15 else None,
    )
    place = rng.choice(("input", "first"))
    kinds = LATE_VALUES if place == "first" or case.modes.isdisjoint(STEPS_INSIDE) else ("saved", "tied")
    return replace(case, late_value=(rng.choice(kinds), place)) if rng.random() < 0.1 else case


def _learns_graph(events: list[str]) -> bool:
    """Whether DDP would learn a static graph: not if it sees no pass, nor if it counts one around it.

    Then it waits for two gradients of each parameter, and averages none (torch 2.13.0); stage 2 averages.
    """
    last = len(events) - events[::-1].index("wrap")
    return "keep reducer" not in events and not any("pass around" in event for event in events[last:])
