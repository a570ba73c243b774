"""One decision and one outcome for several optimizers on a rank, and for ranks with other parts of the model.

*Decisions.* All members look at their own gradients, one after the other. One exchange joins the norms and flags of
all, across the outer ranks. Then all members act by the same numbers, so that all step or none does.

*Errors.* The ranks that share a member's parameters learn of an error at the end of its step (`comm.ranks`). Ranks with
other parameters do not: they would wait for the failed ranks in the next collective, until it times out. So members
hold errors back, also from steps inside backward, which a pipeline schedule or other parts of a layer must be able to
finish. Then all ranks report the outcome to each other, level by level, and all raise.

Torch runs hooks around the ``step()`` of the `ParallelOptimizer`: before the inspections and after the outcome.

Not chosen: one collective over all ranks of the job (a process group that the user has not built); per-parameter norms
over all ranks (the bits of one device, for 8 bytes per parameter of the whole model).
"""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_zero.core.comm import WHAT_NOW, Communicator, StepFailedElsewhereError
from ddp_zero.core.local import digest_of
from ddp_zero.core.plan import GroupRank
from ddp_zero.core.step import GradientStats, NonfiniteGradient, RestOfModel
from ddp_zero.error_codes import coded

_SLOTS = 14  # numbers in the first message besides its subject
_ENDED, _FAILED = -1.0, -2.0  # subjects; a decision's is not negative

# Errors


class HeldErrors:
    """The first error of the members' steps, until it is raised."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Hold back an error of this block; an error of this rank's own step takes precedence."""
        try:
            yield
        except Exception as error:
            if self._error is None or isinstance(self._error, StepFailedElsewhereError):
                self._error = error

    def take(self) -> Exception | None:
        """Return the first error that was held back, or None, and forget it."""
        error, self._error = self._error, None
        return error

    def raise_now(self) -> None:
        """Raise the error on this rank before the next forward pass, for loops that omit ``opt.step()``."""
        error = self.take()
        if error is not None:
            raise error.with_traceback(error.__traceback__)


class ComparedNumbers(Protocol):
    """Numbers, such as digests of options, that ranks of a level compare with each other."""

    def numbers(self, comm: Communicator) -> list[float]:
        """Numbers that are the same on all ranks of the level, or 0 on those that have nothing to compare."""

    def difference(self, comm: Communicator) -> tuple[GroupRank, str]:
        """After numbers have differed: a rank that differs, and the message about it. A collective of the level."""


class GlobalErrorCheck:
    """Raises an error of one rank on all ranks that hold parts of a model.

    A rank that has learnt of an error in one of its levels, ``comms``, reports it to the next level.
    """

    def __init__(self, comms: Sequence[Communicator]) -> None:
        self._comms = comms
        self._known: dict[int, str] = {}  # errors by global rank
        self._told = 0  # how many levels know of them

    def gather(self, comm: Communicator, mine: Tensor, subject: float) -> Tensor:
        """Every rank's 1-D fp64 numbers, a row each, if all have one nonnegative subject. A collective of one level.

        Raises StepFailedElsewhereError on every rank if another has failed, RuntimeError if subjects differ.
        """
        first_numbers = self._gather_first(comm, mine[:_SLOTS], subject)
        further = [torch.stack(comm.all_gather_tensor(mine[_SLOTS:]))] if mine.numel() > _SLOTS else []
        return torch.cat([first_numbers[:, : min(_SLOTS, mine.numel())], *further], dim=1)

    def check(
        self,
        error: Exception | None,
        doing: str,
        scale: float = 0.0,
        decision: object = None,
        alike: ComparedNumbers | None = None,
    ) -> None:
        """Before any decision: raise on every rank if one has failed; 120 bytes for each level otherwise.

        Here ranks compare the coming decision. In the decision itself a difference would only show to the
        ranks of one group of a later level, and all others would wait for these.

        A failed rank raises its own error, all other ranks a RuntimeError with the errors and their ranks.

        Args:
            error: this rank's.
            doing: for messages.
            scale: of a `GradScaler`, the same on all ranks; 0 without one.
            decision: the decision that follows, as values that JSON knows; the same on all ranks.
            alike: what else ranks compare.
        """
        self._known, self._told = {}, 0
        self._end(error, doing, "", scale, decision, alike)

    def conclude(self, error: Exception | None) -> None:
        """As `check`, at the end of a step, which may have changed parameters."""
        self._end(error, "the step", WHAT_NOW)

    def tell(self, error: Exception) -> None:
        """Before this rank raises an error: report it to the remaining levels, whose next message meets this one."""
        if not isinstance(error, StepFailedElsewhereError):
            self._known[dist.get_rank()] = f"{type(error).__name__}: {error}"
        with suppress(RuntimeError):  # of a lost peer
            self._tell(has_failed=True)

    def _end(
        self,
        error: Exception | None,
        doing: str,
        remedy: str,
        scale: float = 0.0,
        decision: object = None,
        alike: ComparedNumbers | None = None,
    ) -> None:
        """Raise on every rank if any has failed; for the arguments see `check`."""
        is_own = error is not None and not isinstance(error, StepFailedElsewhereError)
        if is_own:
            self._known[dist.get_rank()] = f"{type(error).__name__}: {error}"
        try:
            has_failed = self._tell(error is not None, scale, decision, alike)
        except RuntimeError:
            if error is not None:
                # the reason on this rank: a peer that is lost is lost here, too
                raise error.with_traceback(error.__traceback__) from None
            raise
        known, self._known, self._told = self._known, {}, 0
        if error is not None and (is_own or not known):
            raise error.with_traceback(error.__traceback__)
        if has_failed:
            message = f"Expected {doing} to succeed on every rank, got {describe_errors(known)}. {remedy}".strip()
            raise RuntimeError(coded(message, "[ZERO-505]")) from error

    def _tell(
        self, has_failed: bool, scale: float = 0.0, decision: object = None, alike: ComparedNumbers | None = None
    ) -> bool:
        """Report to the remaining levels; returns True if any rank has failed."""
        # inner levels first, on every rank: an error found in one is reported to the next in the same pass. Scales and
        # decisions that differ anywhere differ within a level that all ranks have a part in, or are told by the next
        for comm in self._comms[self._told :]:
            try:
                numbers = [] if alike is None else alike.numbers(comm)
                head = torch.tensor([scale, digest_of(decision), *numbers], dtype=torch.float64)
                gathered = self._gather_first(comm, head, _FAILED if has_failed else _ENDED)
                has_failed |= self._has_other_scale(comm, gathered[:, 0].tolist())
                has_failed |= self._has_other_decision(comm, gathered[:, 1].tolist(), decision)
                has_failed |= self._are_unlike(comm, gathered[:, 2:], alike)
            except StepFailedElsewhereError:
                has_failed = True
        return has_failed

    def _has_other_scale(self, comm: Communicator, scales: Sequence[float]) -> bool:
        """True, with an error noted, if ranks of a level have different loss scales of a `GradScaler`."""
        other = next((rank for rank, scale in enumerate(scales) if scale != scales[0]), None)
        if other is None:
            return False
        self._known[comm.global_rank(GroupRank(other))] = (
            f"a torch.amp.GradScaler of scale {scales[other]:g} and of {scales[0]:g} on {comm.name(GroupRank(0))} (0: "
            "none); build and call scalers alike on all ranks"
        )
        return True

    def _has_other_decision(self, comm: Communicator, digests: Sequence[float], decision: object) -> bool:
        """True, with an error noted, if ranks of a level are about to decide different things. A collective if so."""
        other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
        if other is None:
            return False
        texts = comm.all_gather_text(json.dumps(decision))  # all ranks of the level have seen the difference
        error = RuntimeError(
            f"Expected one decision on all ranks that hold a part of the model, got {texts[0]} on "
            f"{comm.name(GroupRank(0))} and {texts[other]} on {comm.name(GroupRank(other))}. Call opt.step() and "
            "opt.clip_grad_norm_(), and set max_grad_norm of groups, alike on all of them. [ZERO-820]"
        )
        self._known[comm.global_rank(GroupRank(other))] = f"RuntimeError: {error}"
        return True

    def _are_unlike(self, comm: Communicator, numbers: Tensor, alike: ComparedNumbers | None) -> bool:
        decision = [{number for number in column if number} for column in numbers.T.tolist()]
        if alike is None or all(len(different) <= 1 for different in decision):
            return False
        rank, message = alike.difference(comm)
        self._known.setdefault(comm.global_rank(rank), f"RuntimeError: {message}")  # a decision about them says more
        return True

    def _gather_first(self, comm: Communicator, head: Tensor, subject: float) -> Tensor:
        """Gather the first message of a level: every rank's subject, and the numbers of ``head``. See `gather`."""
        # one size for every first message: a rank that has failed meets its peers in the message of their decision,
        # which tells them, instead of leaving them in a collective that it never enters
        first = torch.zeros(_SLOTS + 1, dtype=torch.float64)
        first[0] = subject
        first[1 : 1 + head.numel()] = head
        gathered = torch.stack(comm.all_gather_tensor(first))
        subjects = gathered[:, 0].tolist()
        if any(other_subject != subject for other_subject in subjects) or subject == _FAILED:
            self._told = 1 + next(place for place, level_comm in enumerate(self._comms) if level_comm is comm)
        if _FAILED in subjects:
            # all ranks of the level have seen `_FAILED`, so all take part
            for text in comm.all_gather_text(json.dumps(self._known)):
                self._known.update({int(rank): message for rank, message in json.loads(text).items()})
            message = f"Expected every rank to decide, got {describe_errors(self._known)}."
            raise StepFailedElsewhereError(coded(message, "[ZERO-505]"))
        other = next((rank for rank, other_subject in enumerate(subjects) if other_subject != subjects[0]), None)
        if other is not None:
            raise RuntimeError(
                f"The limits or parameter groups of a decision differ between {comm.name(GroupRank(0))} and "
                f"{comm.name(GroupRank(other))}. Set max_grad_norm of groups, and call opt.step() and "
                "opt.clip_grad_norm_(), alike on all ranks that hold a part of the model. [ZERO-820]"
            )
        return gathered[:, 1:]


def describe_errors(errors: Mapping[int, str]) -> str:
    """Errors by global rank in words; an error of several ranks is shown once."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(errors.items()):
        ranks_of.setdefault(text, []).append(rank)
    return "; ".join(
        f"{text} (global rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"
        for text, ranks in ranks_of.items()
    )


# Decisions


@dataclass(frozen=True)
class NormLevel:
    """Ranks that join their norms."""

    comm: Communicator
    # by member and rank, True if the rank's norms count, False if another rank adds the same; None if all count
    counted: Sequence[Sequence[bool]] | None = None


class JointDecision:
    """Takes the decisions of all members together.

    ``levels`` come one after the other; one rank of each brings its joined norms to the next. The first reduces several
    members to one. Their ranks learn from ``errors`` if one has failed before it could decide. ``positions`` are those
    of each member's groups among all, by which limits are joined.
    """

    def __init__(
        self, levels: Sequence[NormLevel], errors: GlobalErrorCheck, positions: Sequence[Sequence[int]]
    ) -> None:
        self._levels = levels
        self._errors = errors
        self._positions = positions
        self._stats_of_member: dict[int, GradientStats] = {}
        self._nonfinite: tuple[NonfiniteGradient | None] | None = None

    def run(self, parts: Sequence[Generator[GradientStats, GradientStats, Any]]) -> list[Any]:
        """Run a step or a clip of each member: all inspect, then all act. A collective. Returns the results."""
        results: dict[int, Any] = {}
        try:
            for member, part in enumerate(parts):
                try:
                    self._stats_of_member[member] = next(part)
                except StopIteration as ended:
                    results[member] = ended.value
            joined = self._exchange() if self._stats_of_member and self._levels else None
            for member, stats in self._stats_of_member.items():
                try:
                    parts[member].send(stats if joined is None else self._stats_for(member, stats, joined))
                except StopIteration as ended:
                    results[member] = ended.value
        finally:
            for part in parts:
                part.close()
            self._stats_of_member = {}
            self._nonfinite = None
        return [results[member] for member in range(len(parts))]

    def _place(self, member: int, key: int) -> int:
        """The place of a limit among all members' limits."""
        return key if key < 0 else self._positions[member][key]

    def _stats_for(self, member: int, stats: GradientStats, joined: GradientStats) -> GradientStats:
        device = next((total.device for total in stats.totals.values() if total is not None), None)
        whole = {key: joined.totals[self._place(member, key)] for key in stats.totals}
        totals = {key: None if total is None else total.to(device, copy=True) for key, total in whole.items()}
        return replace(stats, totals=totals, flag=joined.flag)

    def find_nonfinite(self) -> NonfiniteGradient | None:
        """The first non-finite gradient of any member, here or on outer ranks. A collective, once for all members."""
        if self._nonfinite is None:
            of_members = [stats.find() for _, stats in sorted(self._stats_of_member.items())]
            first = next((gradient for gradient in of_members if gradient is not None), None)
            text = "" if first is None else json.dumps([first.parameter, first.rank, first.description])
            # all ranks enter: `find_nonfinite` is called after a joint flag, which is equal on all of them
            for level in self._levels:
                text = next(filter(None, level.comm.all_gather_text(text)), "")
            self._nonfinite = (NonfiniteGradient(*json.loads(text)) if text else None,)
        return self._nonfinite[0]

    def _exchange(self) -> GradientStats:
        """Join totals and add up flags, level by level, in the widest precision of any rank."""
        members = sorted(self._stats_of_member)
        all_stats = [
            replace(stats, totals={self._place(member, key): total for key, total in stats.totals.items()})
            for member, stats in sorted(self._stats_of_member.items())
        ]
        keys = sorted({key for stats in all_stats for key in stats.totals})
        totals = [total for stats in all_stats for total in stats.totals.values() if total is not None]
        norm_types = {stats.norm_type for stats in all_stats if stats.totals} or {2.0}
        assert len(norm_types) == 1, "members have the options of one optimizer"
        norm_type = norm_types.pop()
        table = [[stats.totals.get(key) for key in keys] for stats in all_stats]
        numbers = [[0.0 if total is None else float(total) for total in row] for row in table]
        rows = torch.tensor(numbers, dtype=torch.float64).reshape(len(all_stats), len(keys))
        # also where a total does not count
        flag = sum(float(stats.flag) for stats in all_stats) + (not rows.isfinite().all())
        is_wide = any(total.dtype == torch.float64 for total in totals)
        for level in self._levels:
            numbers_of_rank = torch.cat([torch.tensor([flag, is_wide], dtype=torch.float64), rows.flatten()])
            # once joined, members do not matter: pipeline stages may have different ones
            gathered = self._errors.gather(level.comm, numbers_of_rank, digest_of([keys, norm_type, members]))
            flag = float(gathered[:, 0].sum())
            is_wide = bool(gathered[:, 1].any())
            norms = gathered[:, 2:].reshape(len(gathered), *rows.shape)
            counted = None if level.counted is None else [level.counted[member] for member in members]
            rows = join_norms(norms, counted, norm_type)[None]
            members = members[:1]
        joined = rows[0].to(torch.float64 if is_wide else torch.float32)
        return GradientStats(dict(zip(keys, joined, strict=True)), norm_type, flag)


def join_norms(table: Tensor, counted: Sequence[Sequence[bool]] | None, norm_type: float) -> Tensor:
    """Norms over ranks and members, of a [rank, member, key] table of norms; ``counted`` as in `NormLevel`."""
    if counted is not None:
        table = torch.where(torch.tensor(counted).T[:, :, None], table, 0.0)
    norms: Tensor = torch.linalg.vector_norm(table.flatten(0, 1), norm_type, dim=0)
    return norms


@dataclass(frozen=True)
class OtherMembers(RestOfModel):
    """A member's view of the other members in its decisions."""

    joint: JointDecision
    adds_up: Sequence[bool]  # for each of its parameters, True if it adds to norms on this rank

    def counted(self, norms: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        return {index: norm for index, norm in norms.items() if self.adds_up[index]}

    def stats_of_whole_model(self, stats: GradientStats) -> GradientStats:
        raise RuntimeError(
            "A member of the ParallelOptimizer was stepped alone, but does not know the rest of the model. Call "
            "opt.step() and opt.clip_grad_norm_() of the ParallelOptimizer. [ZERO-131]"
        )

    def find_nonfinite(self, stats: GradientStats) -> NonfiniteGradient | None:
        return self.joint.find_nonfinite()
