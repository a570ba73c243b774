"""One decision for several optimizers on a rank, and for the ranks that hold other parts of the model.

Each member looks at its own gradients when its step begins. Instead of deciding, it lets the next member begin; the
last one joins what all have found, over the ranks beyond, in one exchange. Then every member goes on with the same
numbers, innermost first, so that all step or none does.
"""

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.step.clipping import Beyond, Culprit, Share
from ddp_zero.parallel.errors import GlobalErrorCheck


@dataclass(frozen=True)
class _Joined:
    """The numbers of all ranks; ``dtype``: the widest of their norms, float32 or float64."""

    totals: Mapping[int, float]
    flag: float
    dtype: torch.dtype


@dataclass(frozen=True)
class NormLevel:
    """Ranks that join what they have found.

    Attributes:
        comm: the ranks.
        counted: by member and rank, whether what the rank adds to a norm counts, or others add the same; None: all do.
    """

    comm: Communicator
    counted: Sequence[Sequence[bool]] | None = None


class JointDecision:
    """Takes decisions of all members together.

    Args:
        levels: one after the other; what the ranks of one have joined, one rank of each brings to the next. Of several
            members the first level makes one.
        assembly: of their ranks, who learn here if one has failed before it could decide.
    """

    def __init__(self, levels: Sequence[NormLevel], assembly: GlobalErrorCheck) -> None:
        self._levels = levels
        self._assembly = assembly
        self._waiting: deque[Callable[[], None]] = deque()
        self._shares: dict[int, Share] = {}
        self._joined: _Joined | None = None
        self._culprit: tuple[Culprit | None] | None = None
        self._is_open = False

    def run(self, actions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run an action of each member, in order, and return the results. A collective.

        An action that needs a decision waits in it until the others have begun.
        """
        results: dict[int, Any] = {}

        def begin(number: int) -> None:
            results[number] = actions[number]()

        self._waiting = deque((lambda number=number: begin(number)) for number in range(len(actions)))  # type: ignore[misc]
        self._is_open = True
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            self._waiting.clear()
            self._shares.clear()
            self._joined = self._culprit = None
            self._is_open = False
        return [results[number] for number in range(len(actions))]

    def join(self, member: int, share: Share) -> Share:
        """What all members, here and beyond, have found together."""
        if not self._is_open:
            raise RuntimeError(
                "Expected a step of the ParallelOptimizer, got one of its members alone, which cannot know the rest of "
                "the model. Call opt.step() and opt.clip_grad_norm_() of the ParallelOptimizer."
            )
        self._shares[member] = share
        while self._waiting:
            self._waiting.popleft()()
        if self._joined is None:
            self._joined = self._exchange()
        joined, known = self._joined, [one for one in share.totals.values() if one is not None]
        device = known[0].device if known else None
        totals = {key: torch.tensor(joined.totals[key], dtype=joined.dtype, device=device) for key in share.totals}
        return replace(share, totals=totals, flag=joined.flag)

    def culprit(self) -> Culprit | None:
        """The first culprit that any member has found, here or beyond. A collective, once for all members."""
        if self._culprit is None:
            found = [share.find() for _, share in sorted(self._shares.items())]
            first = next((culprit for culprit in found if culprit is not None), None)
            text = "" if first is None else json.dumps([first.parameter, first.rank, first.found])
            for level in self._levels:
                text = next(filter(None, level.comm.all_gather_text(text)), "")
            self._culprit = (Culprit(*json.loads(text)) if text else None,)
        return self._culprit[0]

    def _exchange(self) -> _Joined:
        """Join totals and add up flags, level by level."""
        members = sorted(self._shares)
        shares = [self._shares[member] for member in members]
        keys = sorted({key for share in shares for key in share.totals})
        norm_types = {share.norm_type for share in shares if share.totals} or {2.0}
        assert len(norm_types) == 1, "members have the options of one optimizer"
        norm_type = norm_types.pop()
        rows = torch.stack([_numbers([share.totals.get(key) for key in keys]) for share in shares])
        flag = sum(float(share.flag) for share in shares) + (not rows.isfinite().all())  # also where it does not count
        is_wide = any(_is_wide(total) for share in shares for total in share.totals.values())
        for level in self._levels:
            mine = torch.cat([torch.tensor([flag, is_wide], dtype=torch.float64), rows.flatten()])
            # once joined, members do not matter: pipeline stages may have different ones
            every = self._assembly.gather(level.comm, mine, _digest([keys, norm_type, members]))
            flag, is_wide = float(every[:, 0].sum()), bool(every[:, 1].any())
            table = every[:, 2:].reshape(len(every), *rows.shape)  # ranks, members, keys
            if level.counted is not None:
                counts = torch.tensor([level.counted[member] for member in members]).T
                table = torch.where(counts[:, :, None], table, 0.0)
            rows = torch.linalg.vector_norm(table.flatten(0, 1), norm_type, dim=0)[None]
            members = members[:1]
        dtype = torch.float64 if is_wide else torch.float32
        return _Joined(dict(zip(keys, rows[0].tolist(), strict=True)), flag, dtype)


class MemberBeyond(Beyond):
    """What one member's decisions see of the others.

    Args:
        council: of all members.
        member: this one's number.
        counted: whether each of its parameters adds to norms on this rank.
        positions: the position of each of its groups among all groups.
    """

    def __init__(self, council: JointDecision, member: int, counted: Sequence[bool], positions: Sequence[int]) -> None:
        self._council = council
        self._member = member
        self._counted = counted
        self._positions = positions

    def counts(self, index: int) -> bool:
        """Whether no rank before this one holds the same parameter."""
        return self._counted[index]

    def join(self, share: Share) -> Share:
        """See `JointDecision.join`; limits of groups go by the positions that users see."""
        outside = {key: key if key < 0 else self._positions[key] for key in share.totals}
        joined = self._council.join(
            self._member, replace(share, totals={outside[key]: total for key, total in share.totals.items()})
        )
        return replace(joined, totals={key: joined.totals[outside[key]] for key in share.totals})

    def culprit(self, share: Share) -> Culprit | None:
        """See `JointDecision.culprit`."""
        return self._council.culprit()


def _numbers(totals: Sequence[Tensor | None]) -> Tensor:
    return torch.tensor([0.0 if total is None else float(total) for total in totals], dtype=torch.float64)


def _is_wide(total: Tensor | None) -> bool:
    return total is not None and total.dtype == torch.float64


def _digest(facts: object) -> float:
    """48 bits, which a 64-bit float holds."""
    return float(int.from_bytes(hashlib.sha256(json.dumps(facts).encode()).digest()[:6], "big"))
