"""Errors of one rank's step, raised on every rank that holds a part of the model, at once.

The ranks that share a member's parameters learn of an error at the end of its step (`comm.agreement`). Ranks with
other parameters do not: they would wait for those in the next collective, until it times out. So members hold errors
back, also of steps inside backward, which a pipeline schedule or other parts of a layer must be able to finish. Then
all ranks tell each other how it went, level by level, and all raise.

The first message of everything that levels exchange has one size. So a rank that has failed before a decision is taken
meets the others in the message of that decision, which tells them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_zero.core.comm.agreement import WHAT_NOW, StepFailedElsewhereError
from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.plan.partition import GroupRank

_SLOTS = 14  # numbers in the first message besides its subject
_ENDED, _FAILED = -1.0, -2.0  # subjects; those of decisions are not negative


class HeldErrors:
    """The first error of the members' steps, until it is raised."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Hold back an error of this block; of several, that of this rank's own step."""
        try:
            yield
        except Exception as error:
            if self._error is None or isinstance(self._error, StepFailedElsewhereError):
                self._error = error

    def take(self) -> Exception | None:
        """The error, which is forgotten."""
        error, self._error = self._error, None
        return error

    def raise_now(self) -> None:
        """Raise the error on this rank, in loops that leave ``opt.step()`` out: before the next forward pass."""
        error = self.take()
        if error is not None:
            raise error.with_traceback(error.__traceback__)


class GlobalErrorCheck:
    """All ranks that hold parts of a model, level by level; who has learnt of an error in one tells those of the next.

    Args:
        comms: this rank's levels.
    """

    def __init__(self, comms: Sequence[Communicator]) -> None:
        self._comms = comms
        self._known: dict[int, str] = {}  # errors by global rank
        self._told = 0  # how many levels know of them

    def gather(self, comm: Communicator, mine: Tensor, subject: float) -> Tensor:
        """Every rank's numbers, a row each, if they stand for the same things. A collective of one level.

        Args:
            comm: the level.
            mine: 1-D, fp64; as many on every rank.
            subject: a number for what they stand for, not negative.

        Raises:
            StepFailedElsewhereError: on every rank, if another has failed.
            RuntimeError: on every rank, if they stand for other things.
        """
        every = self._gather_first(comm, mine[:_SLOTS], subject)
        rest = [torch.stack(comm.all_gather_tensor(mine[_SLOTS:]))] if mine.numel() > _SLOTS else []
        return torch.cat([every[:, : min(_SLOTS, mine.numel())], *rest], dim=1)

    def check(self, error: Exception | None, doing: str) -> None:
        """Before anything is decided: raise on every rank if one has failed; 120 bytes for each level if all is well.

        Args:
            error: this rank's, or None.
            doing: what was done, for messages.

        Raises:
            Exception: this rank's own error.
            RuntimeError: on the others, with the errors and the ranks that they come from.
        """
        self._known, self._told = {}, 0
        self._end(error, doing, "")

    def conclude(self, error: Exception | None) -> None:
        """As `check`, at the end of a step, which may have changed parameters."""
        self._end(error, "the step", WHAT_NOW)

    def tell(self, error: Exception) -> None:
        """Before this rank raises an error: tell the levels that do not know yet, whose next message meets this one."""
        if not isinstance(error, StepFailedElsewhereError):
            self._known[dist.get_rank()] = f"{type(error).__name__}: {error}"
        with suppress(RuntimeError):  # of a lost peer
            self._tell(has_failed=True)

    def _end(self, error: Exception | None, doing: str, remedy: str) -> None:
        is_own = error is not None and not isinstance(error, StepFailedElsewhereError)
        if is_own:
            self._known[dist.get_rank()] = f"{type(error).__name__}: {error}"
        try:
            has_failed = self._tell(error is not None)
        except RuntimeError:
            if error is not None:
                raise error.with_traceback(
                    error.__traceback__
                ) from None  # why this rank has failed: a peer that is lost is lost here, too
            raise
        known, self._known, self._told = self._known, {}, 0
        if error is not None and (is_own or not known):
            raise error.with_traceback(error.__traceback__)
        if has_failed:
            message = f"Expected {doing} to succeed on every rank, got {shown(known)}. {remedy}".strip()
            raise RuntimeError(message) from error

    def _tell(self, has_failed: bool) -> bool:
        """Tell the levels that do not know yet; returns whether any rank has failed."""
        for comm in self._comms[self._told :]:
            try:
                self._gather_first(comm, torch.zeros(0), _FAILED if has_failed else _ENDED)
            except StepFailedElsewhereError:
                has_failed = True
        return has_failed

    def _gather_first(self, comm: Communicator, head: Tensor, subject: float) -> Tensor:
        first = torch.zeros(_SLOTS + 1, dtype=torch.float64)
        first[0] = subject
        first[1 : 1 + head.numel()] = head
        every = torch.stack(comm.all_gather_tensor(first))
        subjects = every[:, 0].tolist()
        if any(one != subject for one in subjects) or subject == _FAILED:
            self._told = 1 + next(place for place, one in enumerate(self._comms) if one is comm)
        if _FAILED in subjects:
            for text in comm.all_gather_text(json.dumps(self._known)):
                self._known.update({int(rank): message for rank, message in json.loads(text).items()})
            raise StepFailedElsewhereError(f"Expected every rank to decide, got {shown(self._known)}.")
        other = next((rank for rank, one in enumerate(subjects) if one != subjects[0]), None)
        if other is not None:
            raise RuntimeError(
                "Expected the same decision on every rank that holds a part of the model, got one about other limits "
                f"or parameter groups on {comm.name(GroupRank(other))} than on {comm.name(GroupRank(0))}. Set "
                "max_grad_norm of groups, and call opt.step() and opt.clip_grad_norm_(), alike on all of them."
            )
        return every[:, 1:]


def shown(errors: Mapping[int, str]) -> str:
    """Errors by global rank in words; one that several ranks have is shown once."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(errors.items()):
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(
        f"{text} (global rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"
        for text, ranks in ranks_of.items()
    )
