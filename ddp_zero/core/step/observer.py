"""`StepObserver`: follows the steps of a `StepRunner`."""


class StepObserver:
    """Watches the steps of a runner; its methods do nothing unless they are overridden."""

    def step_begins(self, number: int) -> None:
        """A step is about to begin; raises to refuse it.

        Args:
            number: of the step, from 1, the same on every rank.
        """

    def step_ends(self, has_failed: bool) -> None:
        """All buckets were stepped and synced.

        Args:
            has_failed: whether this rank's local step has raised; `StepRunner.raise_errors` will say so on every rank.
        """
