"""Training of a diffusion model in the manner of guided-diffusion, with one more average as in DiT."""

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.scripts.networks import Block

LR, ANNEAL_STEPS, NOISE_STEPS, WIDTH = 1e-2, 12, 100, 24


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.times, self.encode = nn.Embedding(NOISE_STEPS, WIDTH), nn.Linear(4, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, 2) for _ in range(2)))
        self.decode = nn.Linear(WIDTH, 4)

    def forward(self, noisy: Tensor, times: Tensor) -> Tensor:
        noise: Tensor = self.decode(self.blocks(self.encode(noisy) + self.times(times)[:, None]))
        return noise


def zero_grad(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        if param.grad is not None:
            param.grad.detach_()
            param.grad.zero_()


def anneal_lr(optimizer: Optimizer, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = LR * (1 - step / ANNEAL_STEPS)


def grad_norm(params: Iterable[nn.Parameter]) -> float:
    squares = [(param.grad**2).sum() for param in params if param.grad is not None]
    return torch.stack(squares).sum().sqrt().item()


def main(folder: Path, steps: int, resume: bool, log: Callable[[float], None]) -> list[nn.Module]:
    torch.manual_seed(0)
    model, first = Denoiser(), 0
    if resume:
        model.load_state_dict(torch.load(folder / "model.pt"))
    params = list(model.parameters())
    optimizer = AdamW(params, lr=LR, weight_decay=0.01)
    ema = copy.deepcopy(params)
    if resume:
        first = int(torch.load(folder / "step.pt"))
        optimizer.load_state_dict(torch.load(folder / "opt.pt", map_location="cpu"))
        ema = torch.load(folder / "ema.pt", weights_only=False)
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    averaged = AveragedModel(ddp, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if resume:
        averaged.load_state_dict(torch.load(folder / "averaged.pt"))
    torch.manual_seed(100 * dist.get_rank() + first)
    for step in range(first, steps):
        zero_grad(params)
        for micro_step in range(2):
            clean, noise, times = torch.randn(4, 5, 4).cumsum(1), torch.randn(4, 5, 4), torch.randint(NOISE_STEPS, (4,))
            share = (times / NOISE_STEPS)[:, None, None]
            with ddp.no_sync() if micro_step == 0 else nullcontext():
                with torch.autocast("cpu", torch.bfloat16):
                    guess = ddp((1 - share) * clean + share * noise, times)
                loss = (guess.float() - noise).square().mean() / 2
                loss.backward()
        anneal_lr(optimizer, step)
        log(round(grad_norm(params), 3))
        optimizer.step()
        for average, param in zip(ema, params, strict=True):
            average.detach().mul_(0.95).add_(param, alpha=0.05)
        averaged.update_parameters(ddp)
        log(loss.item())
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "model.pt")
        torch.save(ema, folder / "ema.pt")
        torch.save(averaged.state_dict(), folder / "averaged.pt")
        torch.save(optimizer.state_dict(), folder / "opt.pt")
        torch.save(steps, folder / "step.pt")
    return [model, nn.ParameterList(ema), averaged.module]
