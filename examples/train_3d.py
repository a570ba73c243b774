"""Train a GPT over data, pipeline and tensor parallel ranks, 2 x 2 x 2, beside the same GPT on one device.

    torchrun --standalone --nproc-per-node=8 examples/train_3d.py

Ranks with the same stage and the same parts of the perceptrons average gradients and shard the optimizer. The embedding
is in both stages: its gradients add up over them. One gradient norm is clipped for the whole model.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.optim import AdamW

from ddp_zero.parallel import ParallelOptimizer
from gpt.corpus import Corpus
from gpt.model import GPT
from gpt.stages import Stage, is_shared
from gpt.world import World

CLIP, LEARNING_RATE = 1.0, 3e-3


def parse() -> Namespace:
    """The command line."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (("steps", 60), ("batch-size", 16), ("context", 32), ("layers", 4), ("width", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--micro-batches", type=int, default=4, help="of each data-parallel rank's batch")
    parser.add_argument("--tensor-ranks", type=int, default=2, help="ranks that share each perceptron")
    return parser.parse_args()


def build_whole(options: Namespace) -> GPT:
    """The model on one device; the same on every rank."""
    torch.manual_seed(0)
    return GPT(options.context, options.layers, options.width, 4)


def ranks_of_both_stages(mesh: DeviceMesh) -> Any:
    """The ranks that hold the same embedding: all with the same parts of the perceptrons, in both stages."""
    mine = None
    for ranks in mesh.mesh.movedim(2, 0).flatten(1).tolist():
        group = dist.new_group(sorted(ranks))  # every rank calls it for every group
        mine = group if dist.get_rank() in ranks else mine
    return mine


def build(options: Namespace, world: World) -> tuple[DeviceMesh, Stage, ParallelOptimizer]:
    """This rank's stage, and its optimizer."""
    table = (world.size // (2 * options.tensor_ranks), 2, options.tensor_ranks)
    mesh = init_device_mesh("cpu", table, mesh_dim_names=("data", "pipe", "tensor"))
    stage = Stage(build_whole(options), mesh.get_local_rank("pipe") == 1, mesh["tensor"])
    named = list(stage.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [one for one in named if not is_shared(one[0])]},
        {"params": [one for one in named if is_shared(one[0])], "process_group": ranks_of_both_stages(mesh)},
    ]
    dims: dict[str, Any] = {"mesh": mesh, "data_parallel_dim": "data", "pipeline_dim": "pipe"}
    opt = ParallelOptimizer(stage, AdamW, groups, **dims, max_grad_norm=CLIP, lr=LEARNING_RATE, foreach=False)
    return mesh, stage, opt


def shapes_of(options: Namespace, stage: Stage) -> dict[str, Any]:
    """Shapes of a stage's input and output, so that the first step need not find them by a separate pass."""
    size = options.batch_size // options.micro_batches, options.context
    between = torch.zeros(*size, options.width, requires_grad=True)
    if stage.is_last:
        scores = torch.zeros(*size, stage.tokens.num_embeddings, requires_grad=True)
        return {"input_args": between, "output_args": scores}
    return {"input_args": torch.zeros(size, dtype=torch.int64), "output_args": between}


def train_in_parallel(options: Namespace, world: World, corpus: Corpus) -> list[float]:
    """Train the stages; returns the loss of each step, on every rank."""
    mesh, stage, opt = build(options, world)
    world.say(opt.explain().split("\n\n")[0])

    def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
        total: Tensor = F.cross_entropy(scores.flatten(0, 1), targets.flatten())
        return total / int(options.micro_batches)

    place, group, shapes = mesh.get_local_rank("pipe"), mesh.get_group("pipe"), shapes_of(options, stage)
    pipe = PipelineStage(stage, place, 2, torch.device("cpu"), group=group, **shapes)
    schedule = Schedule1F1B(pipe, options.micro_batches, loss_fn=loss_of, scale_grads=False)
    mine = replace(world, rank=mesh.get_local_rank("data"), size=mesh["data"].size())
    data, means = torch.Generator().manual_seed(0), []
    for step in range(1, options.steps + 1):
        inputs, targets = corpus.draw(options.batch_size * mine.size, data, mine)
        losses: list[Tensor] = []
        if stage.is_last:
            schedule.step(target=targets, losses=losses)
        else:
            schedule.step(inputs)
        opt.step()
        opt.zero_grad()
        means.append(torch.stack(losses).sum() if stage.is_last else torch.zeros(()))
        world.update(f"step {step}: {opt.last_step}", is_due=step % 20 == 1)
    found = world.gather(torch.stack(means).detach()).sum(dim=0) / (mine.size * options.tensor_ranks)
    state = sum(value.nbytes for one in opt.state.values() for value in one.values())
    for rank, (held, owned) in enumerate(world.gather(torch.tensor([bytes_of(stage), state])).tolist()):
        world.say(f"rank {rank}: {held:,} bytes of parameters, {owned:,} bytes of optimizer state")
    result: list[float] = found.tolist()
    return result


def train_on_one_device(options: Namespace, world: World, corpus: Corpus) -> list[float]:
    """Train the whole model on the batches of all ranks; returns the loss of each step."""
    model, ranks = build_whole(options), world.size // (2 * options.tensor_ranks)
    optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    data, losses = torch.Generator().manual_seed(0), []
    for _ in range(options.steps):
        loss = model(*corpus.draw(options.batch_size * ranks, data, replace(world, rank=0, size=1)))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bytes_of(model: nn.Module) -> int:
    """Bytes of this rank's parts of the parameters."""
    locals_of: list[Any] = [getattr(param, "to_local", lambda param=param: param)() for param in model.parameters()]
    return sum(part.nbytes for part in locals_of)


def main() -> None:
    """Train both on the same data."""
    torch.set_num_threads(1)
    options, world = parse(), World.join()
    world.check_is_multiple(2 * options.tensor_ranks, f"2 stages of {options.tensor_ranks} tensor parallel ranks")
    corpus = Corpus.load(None, options.context)
    parallel = train_in_parallel(options, world, corpus)
    if world.rank == 0:
        one = train_on_one_device(options, world, corpus)
        for step in range(0, options.steps, max(1, options.steps // 6)):
            world.say(f"step {step + 1}: loss {parallel[step]:.5f}, on one device {one[step]:.5f}")
        largest = max(abs(mine - other) for mine, other in zip(parallel, one, strict=True))
        world.say(f"largest difference of the losses: {largest:.1e}")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
