"""The text to train on, and each rank's share of it."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor

from gpt.world import World

EVAL_WINDOWS = 256  # over all ranks


@dataclass(frozen=True)
class Corpus:
    """A text, cut in two.

    Attributes:
        train: bytes to train on.
        validation: bytes held out.
        context: input bytes of a window.
        checksum: CRC-32 of the whole text.
    """

    train: Tensor
    validation: Tensor
    context: int
    checksum: int

    @classmethod
    def load(cls, path: Path | None, context: int) -> "Corpus":
        """Read a file, or Python's language reference if there is no path, and hold out the last tenth."""
        data = "\n\n".join(topics[name] for name in sorted(topics)).encode() if path is None else path.read_bytes()
        needed = 10 * (context + 1)
        if len(data) < needed:
            source = "Python's language reference" if path is None else f"--text {path}"
            raise ValueError(
                f"Expected at least {needed} bytes of text for --context {context}, got {len(data)} from {source}."
            )
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        cut = len(data) * 9 // 10
        return cls(tokens[:cut], tokens[cut:], context, zlib.crc32(data))

    def draw(self, windows: int, generator: torch.Generator, world: World) -> tuple[Tensor, Tensor]:
        """Draw random windows, the same on all ranks, and return the inputs and targets of this rank's share."""
        starts = torch.randint(len(self.train) - self.context, (windows,), generator=generator)
        return self._windows(self.train, starts[world.rank :: world.size], world.device)

    def held_out(self, batch_size: int, world: World) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this rank's batches of the validation windows, which are spread evenly over the held-out text."""
        starts = torch.linspace(0, len(self.validation) - self.context - 1, EVAL_WINDOWS).long()
        for batch in starts[world.rank :: world.size].split(batch_size):
            yield self._windows(self.validation, batch, world.device)

    def _windows(self, source: Tensor, starts: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        windows = source[starts[:, None] + torch.arange(self.context + 1)].to(device).long()
        return windows[:, :-1], windows[:, 1:]
