"""The quickstart ends as DDP does, and every fragment of the documentation runs with the setup that it names."""

import gc
import json
import os
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.utils.data import TensorDataset

import ddp_zero
from ddp_zero import DynamicLossScale, ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from tests.multiproc.harness import Setup, run_ranks
from tests.pages import DOCS, PAGES, Block, blocks_of

Names = dict[str, Any]
"""The variables of a block."""


def _module() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))


def _ddp(module: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(module, gradient_as_bucket_view=True)


def _model(names: Names) -> DistributedDataParallel:
    if "model" not in names:
        names["model"] = names["ddp"] = _ddp(_module())
    model: DistributedDataParallel = names["model"]
    return model


def _give_model(names: Names) -> None:
    _model(names)


def _give_bf16(names: Names) -> None:
    names["model"] = names["ddp"] = _ddp(_module().bfloat16())


def _give_opt(names: Names, **options: Any) -> None:
    names["opt"] = shard_optimizer(_model(names), AdamW, **{"stage": 2, "lr": 1e-3, **options})


def _give_stepped(names: Names) -> None:
    _give_opt(names)
    _model(names)(torch.randn(8, 32)).square().mean().backward()
    names["opt"].step()
    names["opt"].zero_grad()


def _give_standalone(names: Names) -> None:
    names["opt"] = ZeroRedundancyOptimizer(_model(names).parameters(), AdamW, lr=1e-3)


def _give_loss(names: Names) -> None:
    names["loss"] = _model(names)(torch.randn(8, 32)).square().mean()


def _give_state(names: Names) -> None:
    _give_stepped(names)
    names["opt"].consolidate_state_dict()
    if dist.get_rank() == 0:
        torch.save(names["opt"].state_dict(), "opt.pt")
    dist.barrier()


def _give_configuration(names: Names) -> None:
    config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "optimizer": {"type": "AdamW"}}
    if dist.get_rank() == 0:
        Path("ds_config.json").write_text(json.dumps(config))
    dist.barrier()


def _give_gan(names: Names) -> None:
    names["maker"], names["judge"] = _ddp(nn.Linear(8, 32)), _ddp(_module())
    names["maker_opt"] = shard_optimizer(names["maker"], AdamW, stage=2, lr=1e-3)
    names["judge_opt"] = shard_optimizer(names["judge"], AdamW, stage=2, lr=1e-3)
    names["noise"] = torch.randn(8, 8)


def _give_training(names: Names) -> None:
    _give_opt(names)

    def train_some_steps() -> None:
        for _ in range(2):
            names["model"](torch.randn(8, 32)).square().mean().backward()
            names["opt"].step()

    names["train_some_steps"] = train_some_steps


def _give(name: str, make: Callable[[], Any]) -> Callable[[Names], None]:
    return lambda names: names.__setitem__(name, make())


THINGS: dict[str, Callable[[Names], None]] = {
    "module": _give("module", _module),
    "plain_model": _give("model", _module),
    "model": _give_model,
    "ddp": _give_model,
    "bf16_ddp": _give_bf16,
    "opt": _give_opt,
    "clipping_opt": partial(_give_opt, max_grad_norm=1.0),
    "scaled_opt": partial(_give_opt, loss_scale=DynamicLossScale()),
    "waiting_opt": partial(_give_opt, overlap=False),
    "stepped_opt": _give_stepped,
    "stage_1_opt": _give_standalone,
    "plain_opt": lambda names: names.__setitem__("plain_opt", AdamW(_model(names).parameters(), lr=1e-3)),
    "scheduler": lambda names: names.__setitem__("scheduler", torch.optim.lr_scheduler.StepLR(names["opt"], 10)),
    "loss": _give_loss,
    "inputs": _give("inputs", partial(torch.randn, 8, 32)),
    "batches": _give("batches", lambda: [torch.randn(8, 32) for _ in range(3)]),
    "step": _give("step", lambda: 1),
    "saved_state": _give_state,
    "train_some_steps": _give_training,
    "scratch_folder": _give("scratch_folder", lambda: "."),
    "build_model": _give("build_model", lambda: _module),
    "generate": _give("generate", lambda: lambda model: model.module(torch.randn(8, 32))),
    "judge": _give_gan,
    "maker": lambda names: None,  # made with the judge
    "maker_opt": lambda names: None,
    "noise": lambda names: None,
    "data": _give("data", lambda: TensorDataset(torch.randn(64, 32), torch.randn(64, 1))),
    "ds_config": _give_configuration,
    "loss_function": _give("loss_function", nn.MSELoss),
}
"""By the name in a fragment's comment: how it is made, on every rank."""

KNOWN: Names = {
    "AdamW": AdamW,
    "DistributedDataParallel": DistributedDataParallel,
    "DynamicLossScale": DynamicLossScale,
    "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer,
    "checkpoint": checkpoint,
    "ddp_zero": ddp_zero,
    "dist": dist,
    "inf": float("inf"),
    "nullcontext": nullcontext,
    "shard_optimizer": shard_optimizer,
    "torch": torch,
}
"""Imports that fragments may leave out."""


def _run(block: Block) -> None:
    names = dict(KNOWN)
    for thing in block.needs:
        THINGS[thing](names)
    exec(compile("\n" * (block.line - 1) + block.code, block.page, "exec"), names)
    checkpoint.wait()
    for name in ("opt", "maker_opt", "judge_opt"):
        if isinstance(names.get(name), ZeroRedundancyOptimizer):
            names[name].finish_sync()


def _run_all(setup: Setup, blocks: list[Block]) -> list[str]:
    os.chdir(setup.folder)
    failed = []
    for block in blocks:
        torch.manual_seed(setup.rank)
        try:
            _run(block)
        except Exception:  # of a block, on all ranks alike: the next ones are run as well
            failed.append(f"{block.place}\n{traceback.format_exc()}")
        gc.collect()
        dist.barrier()
    return failed


def test_fragments_run_with_the_setup_that_they_name() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page) if block.is_run]
    if find_spec("matplotlib") is None:
        blocks = [block for block in blocks if ".plot(" not in block.code]
    assert len(blocks) > 20
    failed = run_ranks(_run_all, 2, blocks, timeout=240)[0]
    assert not failed, "\n".join(failed)


def _train(source: str) -> dict[str, list[int]]:
    names: Names = {}
    exec(source, names)
    bits = {
        name: value.detach().view(torch.int32).flatten().tolist() for name, value in names["model"].named_parameters()
    }
    del names
    gc.collect()
    return bits


def _train_each(setup: Setup, sources: list[str]) -> list[dict[str, list[int]]]:
    return [_train(source) for source in sources]


def test_each_step_of_the_quickstart_ends_with_the_parameters_of_ddp() -> None:
    plain, *steps = [block.code for block in blocks_of(DOCS / "quickstart.md") if block.mark == "quickstart"]
    line = "opt = AdamW(model.parameters(), lr=3e-4)\n"
    assert (len(steps), plain.count(line)) == (3, 1)
    assert all("ddp_zero" in source for source in steps)
    untrained = plain.replace("range(5)", "range(0)")
    sources = [untrained, plain, *(plain.replace(line, source) for source in steps)]
    for before, reference, *found in run_ranks(_train_each, 2, sources):
        assert all(before[name] != bits for name, bits in reference.items())
        assert found == [reference] * 3
