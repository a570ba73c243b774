"""Changes of memory format after DDP has built its buckets, with which DDP loses or mixes up gradients."""

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.backward.reducer import gradients_are_views, reduced_parameters
from ddp_zero.core.local.parameters import ParameterTable
from ddp_zero.core.local.placeholders import untouched


class MemoryFormats:
    """The strides of parameters when DDP built its buckets, by which it lays out gradients.

    Without ``gradient_as_bucket_view``, DDP writes gradients into a bucket by those strides and reads averages out of
    it by the parameters' own. If they have changed since, the elements of a gradient are mixed up (seen with torch
    2.13.0, also without a hook).

    Args:
        ddp: the model.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._params = [] if gradients_are_views(ddp) else reduced_parameters(ddp)
        self.buckets_built()

    def buckets_built(self) -> None:
        """DDP's buckets have the strides of now."""
        with untouched():
            self._strides = [(name, param, param.stride()) for name, param in self._params]

    def why_refuse(self) -> str | None:
        """The message of an error, if a parameter has other strides now; else None."""
        with untouched():
            found = next(
                ((name, before, param.stride()) for name, param, before in self._strides if param.stride() != before),
                None,
            )
        if found is None:
            return None
        name, before, now = found
        return (
            f"Expected {name} with strides {list(before)}, by which DDP has laid out its buckets, got {list(now)}, as "
            "after model.to(memory_format=...): DDP would mix up the elements of its gradient. Build "
            "DistributedDataParallel with gradient_as_bucket_view=True, or change memory formats before it is built."
        )


class PublishedViews:
    """The reducer's views of its buckets, which ``gradient_as_bucket_view`` publishes in ``param.grad``.

    ``model.to(memory_format=...)``, as any write to ``param.grad.data``, points the reducer's own view elsewhere: from
    then on autograd writes gradients there, and DDP reduces what is left in the bucket (seen with torch 2.13.0, also
    without a hook).

    Args:
        table: the optimizer's parameters.
    """

    def __init__(self, table: ParameterTable) -> None:
        self._table = table
        self._views: list[tuple[int, Tensor, int]] = []  # parameter, view, and its address

    def note(self) -> None:
        """Note the views, unless that was done; called when DDP has published gradients."""
        if not self._views:
            found = [(index, param.grad) for index, param in enumerate(self._table.params)]
            self._views = [(index, grad, grad.data_ptr()) for index, grad in found if grad is not None]

    def forget(self) -> None:
        """DDP has built other buckets."""
        self._views = []

    def why_refuse(self) -> str | None:
        """The message of an error, if a view is elsewhere now; else None."""
        for index, view, address in self._views:
            if view.data_ptr() != address:
                return (
                    f"Expected the gradient of {self._table.label(index)} in DDP's bucket, got it in other memory, as "
                    "after model.to(memory_format=...) while there were gradients: DDP would average what is left in "
                    "the bucket. Call opt.zero_grad() before model.to(...). To go on now, wrap the model again, and "
                    "call opt.reset() and opt.attach(model)."
                )
        return None
