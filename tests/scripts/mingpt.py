"""Training in the manner of minGPT, on several ranks: callbacks, clipping, gradients zeroed before backward."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from tests.scripts.networks import Block

VOCABULARY, WIDTH, CLIP = 10, 16, 1.0


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block = nn.Embedding(VOCABULARY, WIDTH), Block(WIDTH, 2, is_causal=True)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.norm(self.block(self.embed(inputs))))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def configure_optimizers(self) -> Optimizer:
        decay = {
            f"{at}.{name}" if at else name
            for at, module in self.named_modules()
            for name, _ in module.named_parameters(recurse=False)
            if name == "weight" and isinstance(module, nn.Linear)
        }
        named = dict(self.named_parameters())
        groups = [
            {"params": [named[name] for name in sorted(decay)], "weight_decay": 0.1},
            {"params": [named[name] for name in sorted(named.keys() - decay)], "weight_decay": 0.0},
        ]
        return AdamW(groups, lr=5e-3, betas=(0.9, 0.95))


class Trainer:
    def __init__(self, model: GPT, state: dict[str, Any] | None) -> None:
        self.step = 0
        self.optimizer = model.configure_optimizers()
        self.model = DistributedDataParallel(model, bucket_cap_mb=0.003)
        self.schedule = LambdaLR(self.optimizer, lambda step: 0.9**step)
        if state is not None:
            self.step = state["step"]
            model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.schedule.load_state_dict(state["schedule"])

    def run(self, steps: int, on_batch_end: Callable[["Trainer", float], None]) -> None:
        torch.manual_seed(100 * dist.get_rank() + self.step)
        while self.step < steps:
            digits = torch.randint(VOCABULARY, (6, 5))
            row = torch.cat([digits, digits.sort(1).values], 1)
            targets = row[:, 1:].clone()
            targets[:, :4] = -1
            _, loss = self.model(row[:, :-1], targets)
            self.model.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.schedule.step()
            self.step += 1
            on_batch_end(self, loss.item())


def main(folder: Path, steps: int, resume: bool, log: Callable[[float], None]) -> list[nn.Module]:
    torch.manual_seed(3407)
    model = GPT()
    trainer = Trainer(model, torch.load(folder / "model.pt", map_location="cpu") if resume else None)

    def on_batch_end(trainer: Trainer, loss: float) -> None:
        log(loss)
        if trainer.step % 2 == 0:
            model.eval()
            with torch.no_grad():
                log(model(torch.arange(9)[None], torch.arange(1, 10)[None])[1].item())
            model.train()
            if dist.get_rank() == 0:
                states = {"optimizer": trainer.optimizer.state_dict(), "schedule": trainer.schedule.state_dict()}
                torch.save({"model": model.state_dict(), "step": trainer.step, **states}, folder / "model.pt")

    trainer.run(steps, on_batch_end)
    return [model]
