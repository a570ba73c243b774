"""Which models and optimizers the hook can bring together, checked before anything depends on it."""

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.parameters import ParameterTable
from ddp_zero.sharded_step import ShardedStep


def check_can_sync(sync: str, as_views: bool) -> None:
    """See that parameters can arrive where they live.

    Raises:
        ValueError: if a sync is to outlast its step and has no memory that does.
    """
    if sync == "forward" and not as_views:
        raise ValueError(
            "Expected parameters_as_bucket_view=True with sync='forward', got False: parameters that are on their way "
            "would need copies of all of them. Pass parameters_as_bucket_view=True, or sync='step'."
        )


def check_has_no_hook(takes_hook: bool, has_hook: bool, may_be_replaced: bool) -> None:
    """See that an optimizer can be given a hook.

    Raises:
        ValueError: if it needs none, or has one that was not reset.
    """
    if not takes_hook:
        raise ValueError(
            "Expected an optimizer built with overlap_with_ddp=True or stage=2, got one that steps in step()."
        )
    if has_hook and not may_be_replaced:
        raise ValueError("Expected an optimizer without a hook, got one that has one. Build one hook per optimizer.")


def check_model(ddp: DistributedDataParallel, sharded: ShardedStep) -> None:
    """See that an optimizer can be stepped by the hook of a model.

    Raises:
        TypeError: if it is no DDP model.
        NotImplementedError: for a complex parameter.
        ValueError: if optimizer and model share no parameter, or not the same ranks.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"Expected a DistributedDataParallel model, got {type(ddp).__name__}.")
    complex_params = [index for param, index in sharded.table.index_of.items() if param.is_complex()]
    if complex_params:
        raise NotImplementedError(
            f"Expected real parameters, got {sharded.table.label(complex_params[0])} of dtype "
            f"{sharded.table.params[complex_params[0]].dtype}: DDP hands hooks real views of complex buckets. Build "
            "the optimizer with overlap_with_ddp=False and stage=1."
        )
    if not any(param in sharded.table.index_of for param in ddp.parameters()):
        raise ValueError("Expected an optimizer over the parameters of this DDP model, got none in common.")
    if not sharded.comm.has_same_ranks(ddp.process_group):
        raise ValueError(
            "Expected the optimizer and the DDP model on the same ranks, got different process groups. Pass "
            "process_group=ddp.process_group to the optimizer."
        )


def check_bucket_of(ddp: DistributedDataParallel, params: list[Tensor]) -> None:
    """See that a bucket is one of a model's.

    Raises:
        RuntimeError: if it has parameters of another one.
    """
    own = set(ddp.parameters())
    if any(param not in own for param in params):
        raise RuntimeError(
            "Expected the hook to be registered on the DDP model that it was built for, got a bucket with "
            "parameters of another one. Pass the same model to hook_with_zero_step() and call its "
            "register_comm_hook()."
        )


def sparse_gradient(table: ParameterTable, params: list[Tensor]) -> NotImplementedError:
    """The error for a bucket with a sparse gradient."""
    names = [table.label(table.index_of[param]) for param in params if param in table.index_of]
    return NotImplementedError(
        f"Expected dense gradients, got a sparse one for {', '.join(names) or 'a parameter of another optimizer'}. "
        "Build the layer with sparse=False."
    )
