"""Checks in one exchange that every rank succeeded and agrees before training continues, so that misuse never hangs.

A rank that fails while others succeed would leave them waiting in the next collective. So code that can fail on only
some ranks runs inside `Agreement`: at its end every rank reports whether it failed, and a digest of what must be equal.
If a rank failed, it raises its own error and the others raise one that names it; if digests differ, the details are
exchanged and every rank raises the same error, which names the ranks and the parameter.
"""

import hashlib
import json
from collections.abc import Sequence
from types import TracebackType

from ddp_zero.core.comm.peers import Peers
from ddp_zero.core.local.parameters import Fingerprint, ParameterTable
from ddp_zero.core.plan.partition import GroupRank


class Agreement:
    """A block that succeeds on every rank of the group or raises on every rank of it.

    Args:
        comm: the group.
        doing: what the block does, for messages: "building ZeroRedundancyOptimizer".

    Raises:
        RuntimeError: on ranks where the block succeeded, if it failed elsewhere; a failing rank raises its own error.
        ValueError: on every rank, if arguments of `declare` or `declare_parameters` differ between ranks.
    """

    def __init__(self, comm: Peers, doing: str) -> None:
        self._comm = comm
        self._doing = doing
        self._facts = {"operation": doing}
        self._fingerprints: list[Fingerprint] = []

    def declare(self, fact: str, value: object) -> None:
        """Add a fact that must have the same value on every rank."""
        self._facts[fact] = str(value)

    def declare_parameters(self, table: ParameterTable) -> None:
        """Add the parameters, which must be the same, in the same order, on every rank."""
        self._fingerprints = table.fingerprints()

    def __enter__(self) -> "Agreement":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # the user interrupts: do not communicate
        structures = [fingerprint.structure() for fingerprint in self._fingerprints]
        samples = [fingerprint.sample for fingerprint in self._fingerprints]
        statements = [0 if error is None else 1, _digest([self._facts, structures]), _digest(samples)]
        failed, facts, values = zip(*self._comm.all_gather_ints(statements), strict=True)
        if any(failed):
            self._raise_failures(failed, error)
        elif len(set(facts)) > 1:
            self._raise_first_difference(structures)
        elif len(set(values)) > 1:
            self._raise_if_permuted(samples)

    def _raise_failures(self, failed: Sequence[int], error: BaseException | None) -> None:
        mine = "" if error is None else f"{type(error).__name__}: {error}"
        messages = self._comm.all_gather_text(mine)
        if error is None:
            shown = "; ".join(f"rank {rank}: {messages[rank]}" for rank, flag in enumerate(failed) if flag)
            raise RuntimeError(f"Expected every rank to succeed in {self._doing}, got a failure on {shown}")

    def _raise_first_difference(self, structures: Sequence[Sequence[object]]) -> None:
        everyone = [json.loads(text) for text in self._comm.all_gather_text(json.dumps([self._facts, structures]))]
        for rank, statement in enumerate(everyone):
            if statement != everyone[0]:
                what, expected, got = _first_difference(*everyone[0], *statement)
                self._refuse(what, expected, got, rank)

    def _raise_if_permuted(self, samples: Sequence[str]) -> None:
        """Detect a different order of equal shapes, which values show if the ranks hold the same values."""
        everyone = [json.loads(text) for text in self._comm.all_gather_text(json.dumps(samples))]
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0] and sorted(theirs) == sorted(everyone[0]):
                index = next(i for i, sample in enumerate(theirs) if sample != everyone[0][i])
                self._refuse(
                    "the parameters in the same order",
                    "one order",
                    f"a different one from parameter {index} {_describe(self._fingerprints[index].structure())} on",
                    rank,
                )

    def _refuse(self, expected: str, reference: str, got: str, rank: int) -> None:
        names = [self._comm.name(GroupRank(rank)) for rank in (0, rank)]
        raise ValueError(
            f"Expected {expected} on every rank in {self._doing}, got {reference} on {names[0]} and {got} on "
            f"{names[1]}."
        )


def _first_difference(
    expected_facts: dict[str, str],
    expected: Sequence[Sequence[object]],
    facts: dict[str, str],
    structures: Sequence[Sequence[object]],
) -> tuple[str, str, str]:
    """The first difference between two ranks' statements, and its two values."""
    for fact, value in expected_facts.items():
        if facts.get(fact) != value:
            return f"the same {fact}", value, str(facts.get(fact))
    for index, (one, other) in enumerate(zip(expected, structures, strict=False)):
        if one != other:
            return f"the same parameter {index}", _describe(one), _describe(other)
    return "as many parameters", str(len(expected)), str(len(structures))


def _describe(structure: Sequence[object]) -> str:
    name, group, shape, stride, dtype, device, trainable = structure
    named = f"{name!r}, " if name is not None else ""
    frozen = "" if trainable else ", frozen"
    return f"({named}group {group}, shape {list(shape)}, strides {list(stride)}, {dtype} on {device}{frozen})"  # type: ignore[call-overload]


def _digest(facts: object) -> int:
    """A 63-bit hash of a value that `json` can write."""
    return int.from_bytes(hashlib.sha256(json.dumps(facts).encode()).digest()[:8], "big") >> 1
