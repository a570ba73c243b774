"""Speech recognition: a recurrent network over utterances of many lengths, CTC, one cycle of the rate, clipping."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

CHARACTERS, BANDS, WIDTH, CLIP, TOTAL = 6, 10, 12, 0.5, 12


class Recognizer(nn.Module):
    """Spectrograms (batch, time, bands) to log probabilities of characters (time, batch, characters)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(BANDS, WIDTH, 3, padding=1)
        self.norm = nn.LayerNorm(WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True, batch_first=True)
        self.output = nn.Linear(2 * WIDTH, CHARACTERS)

    def forward(self, spectrograms: Tensor, lengths: Tensor) -> Tensor:
        features = F.gelu(self.norm(self.conv(spectrograms.transpose(1, 2)).transpose(1, 2)))
        packed = pack_padded_sequence(features, lengths, batch_first=True, enforce_sorted=False)
        outputs, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)
        log_probabilities: Tensor = self.output(outputs).log_softmax(-1).transpose(0, 1)
        return log_probabilities


def utterances(step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Spectrograms and transcripts of this rank, each with its lengths."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    lengths = torch.randint(10, 16, (3,), generator=generator)
    spectrograms = torch.randn(3, int(lengths.max()), BANDS, generator=generator)
    sizes = torch.randint(2, 5, (3,), generator=generator)
    return spectrograms, lengths, torch.randint(1, CHARACTERS, (3, 4), generator=generator), sizes


def main(folder: Path, steps: int, resume: bool, log: Callable[[float], None]) -> list[nn.Module]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Recognizer(), bucket_cap_mb=0.004)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=TOTAL, anneal_strategy="linear")
    first = 0
    if resume:
        checkpoint = torch.load(folder / "last.pt", map_location="cpu")
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        first = checkpoint["step"]
    for step in range(first, steps):
        spectrograms, lengths, transcripts, sizes = utterances(step)
        optimizer.zero_grad()
        log_probabilities = model(spectrograms, lengths)
        loss = F.ctc_loss(log_probabilities, transcripts, lengths, sizes, zero_infinity=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        scheduler.step()
        log(loss.item())
    if dist.get_rank() == 0:
        states = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        torch.save({"model": model.state_dict(), "step": steps, **states}, folder / "last.pt")
    return [model.module]
