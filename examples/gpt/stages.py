"""A GPT in two pipeline stages, whose perceptrons are cut over tensor parallel ranks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gpt.model import GPT


class Stage(nn.Module):
    """Half of the blocks of a GPT; the first stage embeds bytes, and the last scores them by the same embedding.

    Args:
        whole: the model; the stage takes its modules.
        is_last: True for the second half.
        mesh: the ranks that share each perceptron; 1-D.
    """

    def __init__(self, whole: GPT, is_last: bool, mesh: DeviceMesh) -> None:
        super().__init__()
        half = len(whole.blocks) // 2
        self.tokens = whole.tokens
        self.blocks = whole.blocks[half:] if is_last else whole.blocks[:half]
        if is_last:
            self.norm = whole.norm
        else:
            self.positions = whole.positions
        for block in self.blocks.children():
            parallelize_module(block, mesh, {"expand": ColwiseParallel(), "contract": RowwiseParallel()})
        self.is_last = is_last

    def forward(self, x: Tensor) -> Tensor:
        """From bytes to vectors in the first stage, from vectors to scores in the last."""
        if self.is_last:
            return F.linear(self.norm(self.blocks(x)), self.tokens.weight)
        here = torch.arange(x.shape[1], device=x.device)
        result: Tensor = self.blocks(self.tokens(x) + self.positions(here))
        return result


def is_shared(name: str) -> bool:
    """True if both stages hold a parameter."""
    return name == "tokens.weight"
