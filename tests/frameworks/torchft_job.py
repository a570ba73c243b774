"""A replica group for torchrun that logs all it averages and commits, for a test that kills it.

Arguments: a folder; the number of the group; the stage, 0 for the plain optimizer. The groups train until the folder
has a file ``limit``, with the number of the last step.

In the folder, of each rank: its pid; before it averages a step over the groups, its own gradients and whether its group
takes part; once a step is committed, the averages and a line in its log. At the end, the parameters and the state.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torchft import Manager, ProcessGroupGloo
from torchft.optim import OptimizerWrapper

from ddp_zero import launch
from ddp_zero.integrations.torchft import build_manager, prepare

LIMIT = timedelta(seconds=30)
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 16))


def _hook(manager: Manager, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer().div_(dist.get_world_size())
    dist.all_reduce(buffer)
    manager.allreduce(buffer).wait()
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def main(folder: Path, group: int, stage: int) -> None:
    torch.set_num_threads(1)
    launch.init_process_group("gloo", timeout=LIMIT)
    rank = dist.get_rank()
    (folder / f"pid-{group}-{rank}").write_text(str(os.getpid()))
    manager = build_manager(
        pg=ProcessGroupGloo(timeout=LIMIT),
        min_replica_size=1,
        replica_id=f"group_{group}",
        init_sync=False,
        timeout=LIMIT,
        quorum_timeout=LIMIT,
        connect_timeout=LIMIT,
    )
    model = build_model()
    names = {param: name for name, param in model.named_parameters()}
    # the plain side must not rebuild its buckets, whose messages would then differ between groups
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=stage == 0)
    opt: Any
    if stage:
        opt = prepare(manager, ddp, torch.optim.AdamW, stage=stage, **OPTIONS)
    else:
        ddp.register_comm_hook(manager, _hook)
        plain = torch.optim.AdamW(model.parameters(), **OPTIONS)
        opt = OptimizerWrapper(manager, plain)
        manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
        manager.register_state_dict_fn("optimizer", plain.load_state_dict, plain.state_dict)
    log, stop = folder / f"log-{group}-{rank}", folder / "limit"
    while not (stop.exists() and manager.current_step() >= int(stop.read_text())):
        opt.zero_grad()
        generator = torch.Generator().manual_seed(1000 * manager.current_step() + 10 * group + rank)
        ddp(torch.randn(8, 16, generator=generator)).square().mean().backward()
        time.sleep(0.02)  # a step takes a while elsewhere too
        manager.wait_quorum()
        step, quorum = manager.current_step(), manager._quorum_id
        if stage:
            own = {names[param]: grad.clone() for param, grad in opt.optim.owned_gradients().items()}
            if manager.is_participating():
                _save([manager.num_participants(), own], folder / f"own-{step}-{quorum}-{group}-{rank}")
            averages = {names[param]: grad.clone() for param, grad in opt.owned_gradients().items()}
        opt.step()
        if manager.current_step() == step + 1:
            if stage:
                _save(averages, folder / f"average-{step}-{quorum}-{group}-{rank}")
            with log.open("a") as file:
                print(step, quorum, file=file)
    state = opt.state_dict()["state"]
    _save([dict(model.named_parameters()), state, manager.current_step()], folder / f"end-{group}-{rank}")
    while len(list(folder.glob("end-*"))) < 6:  # groups that are still in the last step need this one
        time.sleep(0.1)
    manager.shutdown(wait=False)


def _save(content: Any, file: Path) -> None:
    """In whole or not at all, however this process ends."""
    torch.save(content, file.with_name(f"new-{file.name}"))
    file.with_name(f"new-{file.name}").rename(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    os._exit(0)  # managers' threads may wait for each other
