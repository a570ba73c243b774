"""Blocks of the documentation run: those of a guide when typed in order, fragments with the setup that they name."""

import gc
import os
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import ddp_zero
from ddp_zero import DynamicLossScale, ZeroRedundancyOptimizer, checkpoint, shard_optimizer
from tests.multiproc.harness import Setup, run_ranks
from tests.pages import NAMES, PAGES, Block, blocks_of

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


def _give_opt(names: Names) -> None:
    names["opt"] = shard_optimizer(_model(names), AdamW, stage=2, lr=1e-3)


def _give_stepped(names: Names) -> None:
    _give_opt(names)
    _model(names)(torch.randn(8, 32)).square().mean().backward()
    names["opt"].step()
    names["opt"].zero_grad()


def _give_loss(names: Names) -> None:
    names["loss"] = _model(names)(torch.randn(8, 32)).square().mean()


def _give_state(names: Names) -> None:
    _give_stepped(names)
    names["opt"].consolidate_state_dict()
    if dist.get_rank() == 0:
        torch.save(names["opt"].state_dict(), "opt.pt")
    dist.barrier()


def _give(name: str, make: Callable[[], Any]) -> Callable[[Names], None]:
    return lambda names: names.__setitem__(name, make())


THINGS: dict[str, Callable[[Names], None]] = {
    "module": _give("module", _module),
    "model": _give_model,
    "ddp": _give_model,
    "bf16_ddp": _give_bf16,
    "opt": _give_opt,
    "scheduler": lambda names: names.__setitem__("scheduler", torch.optim.lr_scheduler.StepLR(names["opt"], 10)),
    "loss": _give_loss,
    "inputs": _give("inputs", partial(torch.randn, 8, 32)),
    "batches": _give("batches", lambda: [torch.randn(8, 32) for _ in range(3)]),
    "saved_state": _give_state,
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
    _finish(names)


def _finish(names: Names) -> None:
    checkpoint.wait()
    for value in names.values():
        if isinstance(value, ZeroRedundancyOptimizer):
            value.finish_sync()


def _run_all(setup: Setup, blocks: list[Block]) -> list[str]:
    os.chdir(setup.folder)
    failed = []
    for block in blocks:
        torch.manual_seed(setup.rank)
        try:
            _run(block)
        except Exception:  # of a block, on all ranks alike: the next blocks are run as well
            failed.append(f"{block.place}\n{traceback.format_exc()}")
        gc.collect()
        dist.barrier()
    return failed


def test_fragments_run_with_the_setup_that_they_name() -> None:
    blocks = [block for page in PAGES for block in blocks_of(page) if block.is_run]
    assert len(blocks) > 12
    failed = run_ranks(_run_all, 2, blocks, timeout=240)
    assert failed == [[], []], "\n".join(text for rank in failed for text in rank)


PLAIN = {
    "no-ddp": {"ZeroRedundancyOptimizer(module.parameters(), AdamW, lr=3e-4)": "AdamW(module.parameters(), lr=3e-4)"},
    "clip": {
        'shard_optimizer(ddp, AdamW, stage=2, partition="parameters", overlap=False, lr=3e-4)': (
            "AdamW(ddp.parameters(), lr=3e-4)"
        ),
        "opt.owned_gradients().values()": "[param.grad for param in ddp.parameters()]",
    },
}
"""By guide: what plain training has in the place of our calls; it ends with the same parameters."""


def _type(blocks: list[Block], folder: Path, plain: dict[str, str]) -> Names:
    """Run blocks as one program in a folder that ranks share; returns its variables."""
    folder.mkdir(exist_ok=True)
    os.chdir(folder)
    names: Names = {}
    with patch.object(dist, "init_process_group"):  # the ranks are one already
        for block in blocks:
            code = block.code.replace('"/dev/shm/', '"')  # which outlives a test
            for ours, theirs in plain.items():
                code = code.replace(ours, theirs)
            exec(compile("\n" * (block.line - 1) + code, block.page, "exec"), names)
    _finish(names)
    return names


def _parameters(names: Names) -> list[Any]:
    """The parameters of the guide's last model."""
    model = names["module"] if "module" in names else names["ddp"]
    return [param.tolist() for param in model.parameters()]


def _type_all(setup: Setup, guides: dict[str, list[Block]]) -> list[str]:
    failed = []
    for guide, blocks in guides.items():
        try:
            ended = _type(blocks, setup.folder / guide, {})
            if guide in PLAIN:
                code = "".join(block.code for block in blocks)
                assert all(ours in code for ours in PLAIN[guide]), "shows other calls than those that are replaced"
                plain = _type(blocks, setup.folder / guide, PLAIN[guide])
                assert _parameters(ended) == _parameters(plain), "not the parameters of plain training"
                assert _parameters(ended)[0] != next(plain["new_module"]().parameters()).tolist(), "nothing moved"
                del plain
            del ended
        except Exception:  # of a block, on all ranks alike: the next guides are typed as well
            failed.append(f"{guide}\n{traceback.format_exc()}")
        gc.collect()
        dist.barrier()
    return failed


def test_the_blocks_of_each_guide_run_when_typed_in_order() -> None:
    (box,) = blocks_of(NAMES)
    typed = [block for page in PAGES for block in blocks_of(page) if block.is_typed]
    guides = {page: [box, *blocks] for page, blocks in groupby(typed, key=lambda block: Path(block.page).stem)}
    assert guides.keys() >= PLAIN.keys()
    failed = run_ranks(_type_all, 2, guides, timeout=240)
    assert failed == [[], []], "\n".join(text for rank in failed for text in rank)
