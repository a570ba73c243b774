"""A GAN in the manner of DCGAN, with the discriminator frozen in the generator's pass as in pix2pix and StyleGAN2."""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam

from tests.scripts.networks import perceptron

NOISE, BATCH, BETAS = 4, 8, (0.5, 0.999)


def set_requires_grad(model: nn.Module, requires_grad: bool) -> None:
    for param in model.parameters():
        param.requires_grad = requires_grad


def main(folder: Path, steps: int, resume: bool, log: Callable[[float], None]) -> list[nn.Module]:
    torch.manual_seed(0)
    judge = DistributedDataParallel(perceptron(2, 24, 24, 1), bucket_cap_mb=0.001)
    maker = DistributedDataParallel(perceptron(NOISE, 24, 24, 2), bucket_cap_mb=0.001)
    judge_optimizer = Adam(judge.parameters(), lr=1e-2, betas=BETAS)
    maker_optimizer = Adam(maker.parameters(), lr=5e-3, betas=BETAS)
    first = 0
    if resume:
        checkpoint = torch.load(folder / "gan.pt", map_location="cpu")
        first = checkpoint["step"]
        for part, one in (("judge", judge), ("maker", maker)):
            one.module.load_state_dict(checkpoint[part])
        for part, opt in (("judge_optimizer", judge_optimizer), ("maker_optimizer", maker_optimizer)):
            opt.load_state_dict(checkpoint[part])
    torch.manual_seed(100 * dist.get_rank() + first)
    real_label, fake_label = torch.ones(BATCH, 1), torch.zeros(BATCH, 1)
    for step in range(first, steps):
        set_requires_grad(judge, True)
        judge.zero_grad()
        real_loss = F.binary_cross_entropy_with_logits(judge(torch.randn(BATCH, 2) * 0.3 + 1), real_label)
        real_loss.backward()
        fake = maker(torch.randn(BATCH, NOISE))
        fake_loss = F.binary_cross_entropy_with_logits(judge(fake.detach()), fake_label)
        fake_loss.backward()
        judge_optimizer.step()
        set_requires_grad(judge, False)
        maker.zero_grad()
        maker_loss = F.binary_cross_entropy_with_logits(judge(fake), real_label)
        maker_loss.backward()
        maker_optimizer.step()
        log(real_loss.item() + fake_loss.item())
        log(maker_loss.item())
        if (step + 1) % 2 == 0:
            models = {"judge": judge.module.state_dict(), "maker": maker.module.state_dict(), "step": step + 1}
            states = {"judge_optimizer": judge_optimizer.state_dict(), "maker_optimizer": maker_optimizer.state_dict()}
            if dist.get_rank() == 0:
                torch.save(models | states, folder / "gan.pt")
    return [judge.module, maker.module]
