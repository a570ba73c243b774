"""Checks in one exchange that every rank succeeded and agrees before training continues, so that misuse never hangs.

A rank that fails while others succeed would leave them waiting in the next collective. So code that can fail on only
some ranks runs inside `Agreement`: at its end every rank reports whether it failed, and a digest of what must be equal.
If a rank failed, it raises its own error and the others raise one that names it; if digests differ, the details are
exchanged and every rank raises the same error, which names the ranks and the parameter.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch import Tensor

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.exchange import Exchange
from ddp_zero.core.comm.groups import Peers
from ddp_zero.core.local.parameters import Fingerprint, ParameterTable
from ddp_zero.core.plan.partition import GroupRank


class Agreement:
    """A block that succeeds on every rank of the group or raises on every rank of it.

    Args:
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


_BLOCK_BYTES = 512
_END_OF_STEP = -1  # the subject of these messages; others have the index of a bucket
WHAT_NOW = "Some parameters may have been updated: restart from a checkpoint."


class StepFailedElsewhereError(RuntimeError):
    """A local step has failed on other ranks."""


@dataclass(frozen=True)
class _Sent:
    """A step's blocks in flight."""

    exchange: Exchange
    blocks: dict[GroupRank, Tensor]
    own: Exception | None


class StepErrors:
    """Shares errors of local steps between ranks: `note`, then at the end of the step `share` and `raise_any`.

    A local step may raise only on the owner of a parameter. That rank then stops stepping but still sends its segments,
    so that no peer waits for them. After its last segment every rank sends each peer a block of fixed size, with the
    text of its error or nothing: receives can be posted before the outcome is known, so this costs no round trip.

    Ranks learn of an error in this way only where messages are direct (Gloo, CPU memory). Elsewhere, as on NCCL,
    reading a block would mean waiting for the device in every step. There an error is raised where it occurs, and the
    peers raise when the group's time-out passes.

    Args:
        comm: everyone who steps, also the replicas: a parameter that one of them has not stepped would differ.
        tensors: the tensors that are stepped; their devices decide whether errors are shared.

    Attributes:
        has_own: whether this rank's local step failed in the current step, or in the step that was shared last.
    """

    def __init__(self, comm: Communicator, tensors: Sequence[Tensor], plan_digest: int) -> None:
        self.has_own = False
        self._comm = comm
        self._subject = (plan_digest, _END_OF_STEP)
        self._is_shared = comm.world_size > 1 and all(comm.has_direct_messages(one.device) for one in tensors)
        self._own: Exception | None = None
        self._sent: _Sent | None = None

    def note(self, error: Exception) -> bool:
        """Record that this rank's local step failed. Returns False if errors are not shared: raise it now."""
        if sys.version_info >= (3, 11):
            error.add_note(f"({self._comm.name(self._comm.group_rank)}. {WHAT_NOW})")
        self._own = error if self._is_shared else None
        self.has_own = self._is_shared
        return self._is_shared

    def share(self) -> None:
        """After every bucket was sent: report to the peers how the step went. A collective; waits for nothing."""
        if not self._is_shared:
            return
        own, self._own = self._own, None
        mine = _encode("" if own is None else f"{type(own).__name__}: {own}")
        blocks = {peer: torch.empty_like(mine) for peer in self._comm.peers()}
        exchange = self._comm.start_messages(
            {peer: [mine] for peer in blocks},
            {peer: [block] for peer, block in blocks.items()},
            self._subject,
            is_control=True,
        )
        self._sent = _Sent(exchange, blocks, own)
        self.has_own = own is not None

    def receive(self) -> None:
        """Wait for the blocks of the peers."""
        if self._sent is not None:
            with self._comm.trace.label("wait_errors"):
                self._sent.exchange.wait("the end of the step")

    def raise_any(self) -> None:
        """Wait for the blocks of the peers, and raise the errors once. Does nothing if nothing was shared."""
        sent, self._sent = self._sent, None
        self.has_own = self._own is not None
        if sent is None:
            return
        sent.exchange.wait("the end of the step")
        if sent.own is not None:
            raise sent.own.with_traceback(sent.own.__traceback__)
        texts = {peer: _decode(block) for peer, block in sorted(sent.blocks.items())}
        shown = "; ".join(f"on {self._comm.name(peer)} {text}" for peer, text in texts.items() if text)
        if shown:
            raise StepFailedElsewhereError(f"Expected the local step to succeed on every rank, got {shown}. {WHAT_NOW}")

    def forget(self, sent_too: bool) -> None:
        """Drop the error of the current step.

        Args:
            sent_too: True to also drop blocks that were sent and whose errors were not yet raised.
        """
        self._own = None
        if sent_too:
            self._sent = None
        self.has_own = self._sent is not None and self._sent.own is not None


def _encode(text: str) -> Tensor:
    """A block: the text, truncated if too long, then zeros."""
    block = torch.zeros(_BLOCK_BYTES, dtype=torch.uint8, device="cpu")
    raw = bytearray(text.encode(errors="replace")[:_BLOCK_BYTES])
    if raw:
        block[: len(raw)] = torch.frombuffer(raw, dtype=torch.uint8)
    return block


def _decode(block: Tensor) -> str:
    return bytes(block.tolist()).rstrip(b"\0").decode(errors="ignore")
