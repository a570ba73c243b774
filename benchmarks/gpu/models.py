"""GPT in the sizes that are trained on accelerators, and a model whose step takes what the host takes."""

from functools import partial

from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.race.models import Task, draw_vectors, gpt


class LaunchBound(nn.Module):
    """Layers whose kernels take less than starting them."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(layers))
        )

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        return mse_loss(self.blocks(inputs), targets)


LAUNCH_BOUND = "launch-bound"
MODELS: dict[str, Task] = {
    "tiny": gpt(context=16, layers=2, width=64, heads=2),
    LAUNCH_BOUND: Task(partial(LaunchBound, layers=48, width=256), partial(draw_vectors, 256), "256 numbers"),
    "125m": gpt(context=1024, layers=12, width=936, heads=13),
    "1b": gpt(context=2048, layers=24, width=1856, heads=29),
    "7b": gpt(context=2048, layers=32, width=4224, heads=33),
}
"""The vocabulary is bytes, so blocks hold nearly all parameters: wider than the usual models of these sizes."""
CHECKED = "tiny"
"""What correctness is shown on."""
CHECKED_BUCKET_MIB = 0.1
"""So that it has several buckets."""
BUCKET_MIB = {LAUNCH_BOUND: 0.2}
"""Of models that are measured in other buckets than DDP's: one for each layer."""
