"""Runs the test suites of other sharded optimizers against this library's; their files stay outside the repository.

    python -m tests.peers torch .../pytorch/test/distributed/optim/test_zero_redundancy_optimizer.py [--ranks 2|3|4]
    PYTHONPATH=.../fairscale python -m tests.peers fairscale .../fairscale/tests/optim/test_oss.py

Further arguments are handed to pytest. A copy of the file is edited, since both suites need GPUs: their tests run on
the CPU with Gloo instead, and import ``ddp_zero``. docs/parity.md has the outcomes.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.sgd import SGD

from ddp_zero import ZeroRedundancyOptimizer

EDITS = {
    "torch": {
        "from torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook import (": "from ddp_zero import (",
        "from torch.distributed.optim import ZeroRedundancyOptimizer": "from ddp_zero import ZeroRedundancyOptimizer",
        "@skip_if_no_gpu": "",
        "@skip_if_lt_x_gpu(4)": "",
        "@requires_accelerator_dist_backend()": "",
        "min(4, max(2, torch.get_device_module(self.device).device_count()))": "{ranks}",
        "torch.device(2 * self.rank)": 'torch.device("cpu")',
        "torch.device(2 * self.rank + 1)": 'torch.device("cpu")',
        # torch's overlap does not step before DDP has rebuilt its buckets; here the first iteration steps
        "num_warmup_inputs = 2 if not static_graph else 3": "num_warmup_inputs = 0",
    },
    "fairscale": {
        "import fairscale.optim as optim": "from tests import peers as optim",
        "@skip_if_no_cuda": "",
        "@skip_if_single_gpu": "",
        "@skip_if_py39_no_cuda": "",
        "min(2, torch.cuda.device_count())": "2",
        "torch.cuda.set_device(rank)": "",
        "torch.device(rank)": "DEVICE",
        'torch.device("cuda")': "DEVICE",
        "device=rank": "device=DEVICE",
        ".to(rank)": ".to(DEVICE)",
        "device_ids=[rank]": "device_ids=None",
        "device_ids=[device]": "device_ids=None",
        "assert o._default_device.type == DEVICE": "assert o._default_device == DEVICE",
    },
}
"""For each suite, what is replaced in its file, and by what; the number of ranks goes where ``{ranks}`` is."""


class OSS(ZeroRedundancyOptimizer):
    """This library's optimizer with FairScale's signatures, and the private attributes that its suite reads."""

    def __init__(
        self,
        params: Any,
        optim: Any = SGD,
        group: ProcessGroup | None = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        **defaults: Any,
    ) -> None:
        super().__init__(params, optim, group, **defaults)
        self.buckets: dict[torch.device, dict[int, Any]] = {}  # parameters never travel in another dtype

    def consolidate_state_dict(self, recipient_rank: int = 0) -> None:
        """Gather the state on a rank."""
        super().consolidate_state_dict(to=recipient_rank)

    def state_dict(self, all_ranks: bool = False) -> dict[str, Any]:
        """The state, on all ranks or as consolidated."""
        if all_ranks:
            for rank in range(self.world_size):
                super().consolidate_state_dict(to=rank)
        return super().state_dict()

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip gradients that are equal on all ranks."""
        return torch.nn.utils.clip_grad_norm_(self._all_params, max_norm, norm_type)

    @property
    def _default_device(self) -> torch.device:
        return self._all_params[0].device

    @property
    def _per_device_params(self) -> dict[torch.device, list[list[Tensor]]]:
        owned: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        for param in self._all_params:
            owned[self.owner_of(param)].append(param)
        return {self._default_device: owned}


def edited(suite: str, text: str, ranks: int) -> str:
    """The text of a suite's file, to run here."""
    for old, new in sorted(EDITS[suite].items(), key=lambda edit: -len(edit[0])):
        if old not in text:
            raise SystemExit(f"Expected the suite of another version: the file does not hold {old!r}.")
        text = text.replace(old, new.format(ranks=ranks))
    return text


def main(suite: str, path: Path, ranks: int, *options: str) -> int:
    """Run a suite; pytest's exit status."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, path.name)
        file.write_text(edited(suite, path.read_text(), ranks))
        own = "-c", "/dev/null", "--rootdir", folder, "-p", "no:cacheprovider", "-W", "ignore", "-q", "-rA"
        return subprocess.run([sys.executable, "-m", "pytest", str(file), *own, *options]).returncode


if __name__ == "__main__":
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter, allow_abbrev=False)
    parser.add_argument("suite", choices=EDITS)
    parser.add_argument("path", type=Path)
    parser.add_argument("--ranks", type=int, choices=range(2, 5), default=4, help="of torch's suite; FairScale's has 2")
    arguments, options = parser.parse_known_args()
    sys.exit(main(arguments.suite, arguments.path, arguments.ranks, *options))
