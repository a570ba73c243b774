"""Ray Train: stage 2 over the workers of a cluster; a run goes on from its last checkpoint with any number of workers.

    pip install -e '.[ray]'
    python examples/train_ray.py --workers 2

On one machine Ray starts by itself. On a cluster, give --storage a folder that all nodes mount. Kill a worker, and Ray
starts all of them again. Run it again with more --steps and another number of workers, and it continues.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from ray import train
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

from ddp_zero import wrap
from ddp_zero.integrations.ray import report, resume


def train_worker(config: dict[str, Any]) -> None:
    """Train on one worker."""
    rank = train.get_context().get_world_rank()
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1)), parallel_strategy=None)
    ddp, opt = wrap(model, torch.optim.AdamW, stage=config["stage"], max_grad_norm=1.0, lr=1e-2)
    loaded = resume(ddp, opt)
    first = 0 if loaded is None else loaded.step + 1
    device = next(model.parameters()).device
    for step in range(first, config["steps"]):
        generator = torch.Generator().manual_seed(1000 * step + rank)  # data of its own
        inputs = torch.randn(32, 16, generator=generator).to(device)
        loss = nn.functional.mse_loss(ddp(inputs), inputs.square().mean(dim=1, keepdim=True))
        loss.backward()
        opt.step()
        opt.zero_grad()
        if (step + 1) % 50 == 0:
            report({"loss": loss.item(), "step": step, "first": first}, ddp, opt, step=step)


def main() -> None:
    """Start the workers, and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2))
    parser.add_argument("--storage", default="runs/ray", help="a folder that all nodes share")
    parser.add_argument("--name", default="example", help="of the run, which continues if it exists")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"steps": options.steps, "stage": options.stage},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available()),
        torch_config=TorchConfig(timeout_s=120),
        run_config=RunConfig(
            name=options.name,
            storage_path=str(Path(options.storage).absolute()),
            failure_config=FailureConfig(max_failures=10),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    )
    result = trainer.fit()
    print(f"ends with {result.metrics} in {result.checkpoint}")


if __name__ == "__main__":
    main()
