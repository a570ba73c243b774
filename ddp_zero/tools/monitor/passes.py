"""When forward and backward passes of a model begin and end: events of the optimizer's own record."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddp_zero.core.backward.reducer import at_end_of_backward
from ddp_zero.core.step.report import tensors_in
from ddp_zero.tools.record.recorder import Recorder, Span

_LAST = 2
"""How often a callback must queue the next to come after the step at the end of backward, see `backward.hook`."""


class Passes:
    """Records the passes of a model as phases ``forward`` and ``backward``. Changes no values and no graph.

    A backward pass begins when the gradient of an output of the model is there, and ends with the engine's run, after
    DDP's and the optimizer's own last callbacks.

    Args:
        model: whose passes.
        recorder: of the optimizer.
        when_ended: called with the phase when one has ended.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, when_ended: Callable[[str], None]) -> None:
        self._recorder = recorder
        self._when_ended = when_ended
        self._forward: Span | None = None
        self._backward: Span | None = None
        self._hooks: list[RemovableHandle] = [
            model.register_forward_pre_hook(self._before_forward),
            model.register_forward_hook(self._after_forward, always_call=True),
        ]

    def close(self) -> None:
        """Take the hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    def _before_forward(self, module: nn.Module, inputs: Any) -> None:
        for left in (self._forward, self._backward):  # by an error
            if left is not None:
                left.stop()
        self._backward = None
        self._forward = self._recorder.span("forward").start()

    def _after_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._forward is not None:
            self._forward.stop()
            self._forward = None
            self._when_ended("forward")
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(self._gradient_of_output)

    def _gradient_of_output(self, grad: Tensor) -> None:
        if self._backward is None:
            self._backward = self._recorder.span("backward").start()
            at_end_of_backward(partial(_again, _LAST, self._after_backward))

    def _after_backward(self) -> None:
        if self._backward is not None:
            self._backward.stop()
            self._backward = None
            self._when_ended("backward")


def _again(times: int, callback: Callable[[], None]) -> None:
    """Run the callback after ``times`` nested rounds of engine callbacks."""
    at_end_of_backward(partial(_again, times - 1, callback) if times > 1 else callback)
