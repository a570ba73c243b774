"""Train a small GAN on a ring of eight Gaussians: two DDP models, two sharded optimizers, stepped inside backward.

    torchrun --standalone --nproc-per-node=2 examples/train_gan.py
    torchrun --standalone --nproc-per-node=2 examples/train_gan.py --compare

The generator's loss goes backward through the discriminator. An optimizer that steps inside backward would step the
discriminator there, so it is frozen meanwhile.
"""

import math
import os
import sys
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Optimizer

from ddp_zero import shard_optimizer

MODES = 8
NOISE = 8
BETAS = (0.5, 0.99)
BUCKET_MB = 0.03  # several buckets even in models as small as these


@dataclass
class Player:
    """A model and the optimizer that steps it."""

    model: DistributedDataParallel
    optimizer: Optimizer

    @classmethod
    def build(cls, model: nn.Module, sharded: bool, lr: float) -> "Player":
        """Wrap a model; its optimizer is sharded and stepped inside backward, or torch's own."""
        ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
        if sharded:
            return cls(ddp, shard_optimizer(ddp, Adam, lr=lr, betas=BETAS))
        return cls(ddp, Adam(ddp.parameters(), lr=lr, betas=BETAS))

    def learn(self, loss: Tensor) -> None:
        """One update; the loop is the same with either optimizer."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def layers(inputs: int, width: int, outputs: int) -> nn.Module:
    """A small perceptron."""
    hidden = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


def draw_real(count: int, generator: torch.Generator) -> Tensor:
    """Points of the mixture, (count, 2): a Gaussian at each of eight places on a circle of radius 2."""
    angles = torch.randint(MODES, (count,), generator=generator) * (2 * math.pi / MODES)
    centres = 2 * torch.stack([angles.cos(), angles.sin()], dim=1)
    return centres + 0.1 * torch.randn(count, 2, generator=generator)


def train(sharded: bool, options: Namespace) -> tuple[Player, Player]:
    """Play for ``options.steps`` rounds, every rank on its own data; returns generator and discriminator."""
    torch.manual_seed(options.seed)
    maker = Player.build(layers(NOISE, options.width, 2), sharded, options.lr)
    judge = Player.build(layers(2, options.width, 1), sharded, options.lr)
    own = torch.Generator().manual_seed(1000 + options.seed + dist.get_rank())
    for step in range(1, options.steps + 1):
        real = draw_real(options.batch_size, own)
        noise = torch.randn(options.batch_size, NOISE, generator=own)
        with torch.no_grad():
            fake = maker.model(noise)
        verdicts = judge.model(torch.cat([real, fake]))  # one forward and one backward for both kinds
        truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
        judge_loss = F.binary_cross_entropy_with_logits(verdicts, truth)
        judge.learn(judge_loss)

        judge.model.requires_grad_(False)  # or the generator's backward would step the discriminator too
        maker_loss = F.softplus(-judge.model(maker.model(noise))).mean()
        maker.learn(maker_loss)
        judge.model.requires_grad_(True)
        if step % max(1, options.steps // 5) == 0:
            losses = f"discriminator {judge_loss.item():.3f}, generator {maker_loss.item():.3f}"
            say(f"{'sharded' if sharded else 'plain'} step {step}/{options.steps}: {losses}")
    return maker, judge


@torch.no_grad()
def covered_modes(maker: Player) -> int:
    """The number of the eight Gaussians that get at least 2% of 2,000 generated points within half a unit."""
    points = maker.model.module(torch.randn(2000, NOISE, generator=torch.Generator().manual_seed(0)))
    angles = torch.arange(MODES) * (2 * math.pi / MODES)
    centres = 2 * torch.stack([angles.cos(), angles.sin()], dim=1)
    near = (torch.cdist(points, centres) < 0.5).float().mean(dim=0)
    return int((near >= 0.02).sum())


def largest_difference(one: Player, other: Player) -> float:
    """Over all parameters and all ranks."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    largest = torch.stack([(first.detach() - second.detach()).abs().max() for first, second in pairs]).max()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def say(text: str) -> None:
    """Print on rank 0."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def parse_options() -> Namespace:
    """The command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0], formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="rounds of discriminator and generator")
    parser.add_argument("--batch-size", type=int, default=128, help="per rank")
    parser.add_argument("--width", type=int, default=64, help="of the hidden layers")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare", action="store_true", help="also train with DDP + Adam, and print the difference")
    return parser.parse_args()


def run(options: Namespace) -> bool:
    """Train; returns True if the comparison, if requested, found no difference."""
    maker, judge = train(sharded=True, options=options)
    say(f"{covered_modes(maker)} of {MODES} modes covered")
    if not options.compare:
        return True
    plain_maker, plain_judge = train(sharded=False, options=options)
    difference = max(largest_difference(maker, plain_maker), largest_difference(judge, plain_judge))
    torch.manual_seed(options.seed)
    untrained = (layers(NOISE, options.width, 2), layers(2, options.width, 1))
    pairs = zip((maker, judge), untrained, strict=True)
    moved = all(
        not torch.equal(trained, before)
        for player, model in pairs
        for trained, before in zip(player.model.parameters(), model.parameters(), strict=True)
    )
    say(f"largest parameter difference to DDP + Adam: {difference} (parameters moved: {moved})")
    return difference == 0 and moved


def main() -> int:
    """Join the job that torchrun started, or a job of one, and train."""
    options = parse_options()
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    equal = run(options)
    dist.destroy_process_group()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
