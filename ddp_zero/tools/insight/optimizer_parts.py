"""The parts of an optimizer that this package reads; `ddp_zero.core.engine.engine.Engine` has them."""

from typing import Protocol

from ddp_zero.core.backward.hook import OverlapHook
from ddp_zero.core.step.decision import Decision
from ddp_zero.core.step.sharded_step import ShardedStep


class OptimizerParts(Protocol):
    """The parts of an optimizer that this package reads.

    Attributes:
        sharded: its step.
        decision: whether to step.
        hook: its communication hook, or None.
        overlaps: whether the user asked for steps inside backward.
    """

    sharded: ShardedStep
    decision: Decision
    hook: OverlapHook | None
    overlaps: bool

    @property
    def stage(self) -> int:
        """1: optimizer state is sharded; 2: gradients too."""

    @property
    def joins(self) -> bool:
        """Whether ranks may have run out of inputs."""
