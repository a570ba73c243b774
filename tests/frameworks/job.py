"""Ranks that a framework takes for its own job, and what its tests compare."""

import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.multiproc.harness import Setup, run_ranks


def as_a_job(setup: Setup, body: Callable[[Setup], None]) -> None:
    """Run a body where a framework finds what torchrun would have set, CPUs only, and no state of an earlier job."""
    warnings.resetwarnings()
    warnings.simplefilter("ignore")  # of frameworks
    with _environment(setup):
        try:
            body(setup)
        finally:
            forget()


def run_and_resume(body: Callable[..., None], sizes: tuple[int, int], *args: Any) -> None:
    """Run ``body(setup, *args, resume)`` as a job at the first number of ranks, and again to resume at the second."""
    for resume, size in enumerate(sizes):
        run_ranks(_in_a_job, size, body, *args, bool(resume), timeout=240)


def _in_a_job(setup: Setup, body: Callable[..., None], *args: Any) -> None:
    as_a_job(setup, lambda setup: body(setup, *args))


def forget() -> None:
    """Forget accelerate's view of the job, which it keeps in its classes."""
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(True)
        GradientState._reset_state()


@contextmanager
def _environment(setup: Setup) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(
        RANK=str(setup.rank),
        LOCAL_RANK=str(setup.rank),
        WORLD_SIZE=str(setup.world_size),
        LOCAL_WORLD_SIZE=str(setup.world_size),
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=_port(setup.folder / "port", setup.rank),
        TORCHELASTIC_RUN_ID="test",
        ACCELERATE_USE_CPU="true",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="error",
        DISABLE_TQDM="1",
    )
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _port(file: Path, rank: int) -> str:
    """A free port, the same for all ranks; nothing listens there while the process group is up already."""
    if rank == 0:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            file.with_suffix(".new").write_text(str(one.getsockname()[1]))
        file.with_suffix(".new").rename(file)
    torch.distributed.barrier()
    return file.read_text()


def scale_on_a_cpu(accelerator: Any, init_scale: float) -> None:
    """Give an `Accelerator` what ``mixed_precision="fp16"`` gives it on a GPU; on a CPU it does nothing of its own."""
    accelerator.native_amp = True
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=3)


class Words(Dataset[dict[str, Tensor]]):
    """Text, a byte a token, in pieces of equal length; recorded losses are of this text."""

    def __init__(self, count: int, length: int = 12) -> None:
        text = Path(__file__).with_name("words.txt").read_bytes()
        tokens = torch.tensor(list(text[: count * length]), dtype=torch.long) % 64
        self._pieces = tokens.view(count, length)

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._pieces[index], "labels": self._pieces[index]}


def values(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's parameters, in memory of their own."""
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def assert_moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Check that every parameter has changed."""
    assert not [name for name, value in before.items() if torch.equal(value, after[name])], "nothing moved"


def assert_equal(expected: Any, actual: Any, where: str) -> None:
    """Check that two nestings of tensors and numbers have the same bits, or are NaN in the same places."""
    assert type(expected) is type(actual), where
    if isinstance(expected, Tensor):
        assert torch.allclose(expected, actual, rtol=0.0, atol=0.0, equal_nan=True), where
    elif isinstance(expected, dict):
        assert expected.keys() == actual.keys(), (where, expected.keys(), actual.keys())
        for key, value in expected.items():
            assert_equal(value, actual[key], f"{where}, {key}")
    elif isinstance(expected, list | tuple):
        assert len(expected) == len(actual), where
        for place, (one, other) in enumerate(zip(expected, actual, strict=True)):
            assert_equal(one, other, f"{where}, {place}")
    else:
        assert expected == actual or (expected != expected and actual != actual), (where, expected, actual)
