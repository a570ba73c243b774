"""A case, frozen and without torch."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class BeforeCase:
    """What happens before the optimizer is built, and how it is.

    Attributes:
        seed: it was drawn from.
        ranks: of the job.
        views, static, unused: options of DDP.
        events: names of `tests.fuzz.before.run_case.EVENTS`, with the mode of an earlier optimizer after a colon.
        mode: of the optimizer, in `tests.fuzz.before.draw.MODES`.
        door: how it comes to the model: ``"shard_optimizer"`` or ``"attach"``.
        late_hook: the step before which a communication hook is registered; None: none is.
        cap: MiB at which buckets are closed; None: DDP's own.
        late_value: as that of `tests.fuzz.case.Model`, of the last layer.
        zeroes: where the loop zeroes: ``"start"``, ``"after"`` the step, or at the start to ``"zeros"``.
        fault: none; cases of other kinds have it.
    """

    seed: int
    ranks: int
    views: bool
    static: bool
    unused: bool
    events: tuple[str, ...]
    mode: str
    door: str
    zeroes: str
    late_hook: int | None = None
    cap: float | None = None
    late_value: tuple[str, str] | None = None
    fault: None = field(default=None, repr=False)

    @property
    def modes(self) -> set[str]:
        """Of the optimizer and of the earlier ones."""
        return {self.mode, *(event.partition(":")[2] for event in self.events)}
