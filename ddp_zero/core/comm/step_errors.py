"""Errors of one rank's local step, which all ranks raise at the end of the step.

A local step may raise only on the owner of a parameter. That rank then stops stepping but still sends its segments, so
that no peer waits for them. After its last segment every rank sends each peer a block of fixed size, with the text of
its error or nothing: receives can be posted before the outcome is known, so this costs no round trip.

Ranks learn of an error in this way only where messages are direct (Gloo, CPU memory). Elsewhere, as on NCCL, reading a
block would mean waiting for the device in every step. There an error is raised where it occurs, and the peers raise
when the group's time-out passes.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ddp_zero.core.comm.communicator import Communicator
from ddp_zero.core.comm.exchange import Exchange
from ddp_zero.core.plan.partition import GroupRank

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

    Args:
        comm: everyone who steps, also the replicas: a parameter that one of them has not stepped would differ.
        tensors: the tensors that are stepped; their devices decide whether errors are shared.
        plan_digest: a number that differs if plans differ.

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
        """Wait for the blocks of the peers.

        Raises:
            RuntimeError: if a peer is gone or the group's time-out passed.
        """
        if self._sent is not None:
            with self._comm.trace.label("wait_errors"):
                self._sent.exchange.wait("the end of the step")

    def raise_any(self) -> None:
        """Wait for the blocks of the peers, and raise the errors once. Does nothing if nothing was shared.

        Raises:
            Exception: this rank's own error.
            StepFailedElsewhereError: a RuntimeError with the errors of other ranks.
        """
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
