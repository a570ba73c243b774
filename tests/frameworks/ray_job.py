"""The same training as a worker of Ray Train and as a rank of torchrun.

    python -m tests.frameworks.ray_job FOLDER CASE ...     starts a cluster of two nodes, and runs cases on it
    torchrun -m tests.frameworks.ray_job FOLDER STAGE LAST begins or continues in FOLDER, up to step LAST

Cases: ``small-STAGE``; ``alone-STAGE``, with one worker; ``killed-STAGE``, in which a worker dies; ``removed-STAGE``,
in which its node goes away too. Each has a folder of its own, in which rank 0 leaves parameters and state, and every
attempt its number of workers and first step.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from ddp_zero import checkpoint, launch, shard_optimizer, wrap

STEPS, EVERY, DIES = 12, 3, 7
SMALL_STEPS = 6
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))


def take_step(ddp: nn.Module, opt: Any, step: int, rank: int) -> float:
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss = ddp(torch.randn(8, 16, generator=generator)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return float(loss.item())


def leave(model: nn.Module, opt: Any, folder: Path) -> None:
    """Rank 0 saves what all ranks have, and asks the others for their shards, which have nothing left to do."""
    if dist.get_rank() == 0:
        torch.save([dict(model.named_parameters()), opt.state_dict()["state"]], folder / "new")
        (folder / "new").rename(folder / "end")


# As a worker of Ray Train


def train(config: dict[str, Any]) -> None:
    import ray.train
    from ray.train.torch import prepare_model

    from ddp_zero.integrations.ray import report, resume

    torch.set_num_threads(1)
    folder, rank = Path(config["folder"]), ray.train.get_context().get_world_rank()
    model = build_model()
    ddp: nn.Module
    opt: Any
    if config["how"] == "alone":
        ddp, opt = wrap(prepare_model(model, parallel_strategy=None), AdamW, stage=config["stage"], **OPTIONS)
    else:
        ddp = prepare_model(model, parallel_strategy_kwargs={"gradient_as_bucket_view": True})
        opt = shard_optimizer(ddp, AdamW, stage=config["stage"], **OPTIONS)
    loaded = resume(ddp, opt)
    first = 0 if loaded is None else loaded.step + 1
    if rank == 0:
        with (folder / "attempts").open("a") as file:
            print(json.dumps([dist.get_world_size(), first, type(ddp).__name__]), file=file)
    for step in range(first, config["steps"]):
        if step == DIES and first == 0 and rank == dist.get_world_size() - 1:
            _die(config["how"], folder)
        loss = take_step(ddp, opt, step, rank)
        if step % EVERY == EVERY - 1:
            report({"loss": loss, "step": step}, ddp, opt, step=step)
    leave(model, opt, folder)


def _die(how: str, folder: Path) -> None:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "removed":
        (folder / "remove").touch()
        time.sleep(600)  # until its node, or its group, is gone


def run_on_a_cluster(folder: Path, cases: list[str]) -> None:
    import ray
    from ray.cluster_utils import Cluster
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80 << 20})
    second = cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    ray.init(address=cluster.address, log_to_driver=True)
    cluster.wait_for_nodes()
    try:
        for case in cases:
            how, _, stage = case.partition("-")
            place = folder / case
            place.mkdir()
            if how == "removed":
                threading.Thread(target=_remove, args=(cluster, second, place / "remove"), daemon=True).start()
            workers: Any = {"alone": 1, "small": 2, "killed": 3, "removed": (2, 3)}[how]
            result = TorchTrainer(
                train,
                train_loop_config={
                    "folder": str(place),
                    "stage": int(stage),
                    "how": how,
                    "steps": SMALL_STEPS if how == "small" else STEPS,
                },
                scaling_config=ScalingConfig(num_workers=workers),
                torch_config=TorchConfig(backend="gloo", timeout_s=60),
                run_config=RunConfig(
                    name="run",
                    storage_path=str(place),
                    failure_config=FailureConfig(max_failures=2),
                    checkpoint_config=CheckpointConfig(num_to_keep=2),
                ),
            ).fit()
            kept = sorted(path.name for path in (place / "run").glob("step-*"))
            seen = {"kept": kept, "metrics": result.metrics, "checkpoint": str(result.checkpoint.path)}
            (place / "result").write_text(json.dumps(seen, default=str))
    finally:
        ray.shutdown()
        cluster.shutdown()


def _remove(cluster: Any, node: Any, when: Path) -> None:
    while not when.exists():
        time.sleep(0.1)
    cluster.remove_node(node, allow_graceful=False)


# As a rank of torchrun


def run_in_torchrun(folder: Path, stage: int, last: int) -> None:
    torch.set_num_threads(1)
    launch.init_process_group("gloo")
    model = build_model()
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    opt = shard_optimizer(ddp, AdamW, stage=stage, **OPTIONS)
    first = checkpoint.load(folder, ddp, opt).step + 1 if list(folder.glob("step-*")) else 0
    for step in range(first, last + 1):
        take_step(ddp, opt, step, dist.get_rank())
    checkpoint.save(folder, ddp, opt, step=last)
    leave(model, opt, folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        run_in_torchrun(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        from tests.frameworks import ray_job  # workers find its functions under this name

        ray_job.run_on_a_cluster(Path(sys.argv[1]), sys.argv[2:])
