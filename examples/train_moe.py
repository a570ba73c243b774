"""Train a GPT with a mixture of experts that are spread over ranks, beside a dense one, on text that Python ships.

    torchrun --standalone --nproc-per-node=4 examples/train_moe.py --expert-ranks 2

Of every ``--expert-ranks`` ranks each holds some of the experts. Ranks with the same experts average and shard those
among themselves; everything else is averaged and sharded over all ranks. One gradient norm is clipped for all.
"""

from argparse import ArgumentParser, Namespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import shard_optimizer
from ddp_zero.parallel import ParallelOptimizer
from gpt.corpus import Corpus
from gpt.mixture import MixtureGPT, evaluate_loss, is_of_an_expert
from gpt.model import GPT
from gpt.world import World


def parse() -> Namespace:
    """The command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("steps", 200), ("batch-size", 16), ("context", 64), ("layers", 2), ("width", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--experts", type=int, default=4, help="in each layer")
    parser.add_argument("--expert-ranks", type=int, default=2, help="ranks that hold one of each expert together")
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2))
    return parser.parse_args()


def build_mixture(options: Namespace, world: World) -> tuple[nn.Module, nn.Module, ParallelOptimizer]:
    """The model without and with DDP, and its optimizer."""
    table = (world.size // options.expert_ranks, options.expert_ranks)
    mesh = init_device_mesh("cpu", table, mesh_dim_names=("same_experts", "other_experts"))
    torch.manual_seed(0)
    shape = (options.context, options.layers, options.width, 4)
    model = MixtureGPT(*shape, options.experts, mesh.get_group("other_experts"))
    ignored = [name for name, _ in model.named_parameters(remove_duplicate=False) if is_of_an_expert(name)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    named = list(ddp.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [one for one in named if not is_of_an_expert(one[0])]},
        {"params": [one for one in named if is_of_an_expert(one[0])], "process_group": mesh.get_group("same_experts")},
    ]
    opt = ParallelOptimizer(ddp, AdamW, groups, stage=options.stage, max_grad_norm=1.0, lr=3e-3)
    return model, ddp, opt


def main() -> None:
    """Train both models on the same data."""
    options, world = parse(), World.join()
    world.check_is_multiple(options.expert_ranks, "--expert-ranks")
    corpus = Corpus.load(None, options.context)
    mixture, ddp, opt = build_mixture(options, world)
    world.say(opt.explain().split("\n\n")[0])
    torch.manual_seed(0)
    dense = GPT(options.context, options.layers, options.width, 4)
    plain = DistributedDataParallel(dense, gradient_as_bucket_view=True)
    dense_opt = shard_optimizer(plain, AdamW, stage=options.stage, max_grad_norm=1.0, lr=3e-3)
    for optimizer, trained, name in ((dense_opt, plain, "dense"), (opt, ddp, "mixture")):
        data = torch.Generator().manual_seed(0)
        for step in range(1, options.steps + 1):
            loss = trained(*corpus.draw(options.batch_size * world.size, data, world))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            world.update(f"{name} step {step} loss {loss.item():.3f} {optimizer.last_step}", is_due=step % 50 == 1)
    held_out = [list(corpus.held_out(options.batch_size, world)) for _ in range(2)]
    losses = torch.tensor([evaluate_loss(one, part) for one, part in zip((dense, mixture), held_out, strict=True)])
    dense_loss, mixture_loss = world.gather(losses).mean(dim=0).tolist()
    world.say(f"validation loss in nats per byte: dense {dense_loss:.4f}, mixture {mixture_loss:.4f}")
    sizes = torch.tensor([float(sum(param.nbytes for param in mixture.parameters())), float(opt_bytes(opt))])
    for rank, (held, state) in enumerate(world.gather(sizes).tolist()):
        world.say(f"rank {rank}: {held:,.0f} bytes of parameters, {state:,.0f} bytes of optimizer state")


def opt_bytes(opt: ParallelOptimizer) -> int:
    """Bytes of optimizer state on this rank."""
    return sum(value.nbytes for state in opt.state.values() for value in state.values())


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
