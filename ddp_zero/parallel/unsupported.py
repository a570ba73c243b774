"""What a `ParallelOptimizer` refuses, with the remedy: further groups, copies, Join, GradScaler."""

from typing import Any, NoReturn

from torch.optim import Optimizer

from ddp_zero.core.local.inner import ParamGroup


class Refused(Optimizer):
    """Base class of `ParallelOptimizer`; documented there."""

    _step_supports_amp_scaling = True  # GradScaler then calls step(), which refuses it on every rank

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Refuse further groups, which the members would have to agree on.

        Raises:
            NotImplementedError: always, after construction.
        """
        if hasattr(self, "_places"):
            raise NotImplementedError(
                "ParallelOptimizer does not support add_param_group(). Instead build a new ParallelOptimizer with all "
                "groups, and load the state_dict() of this one."
            )
        super().add_param_group(param_group)

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refuse `torch.distributed.algorithms.Join`.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "ParallelOptimizer does not support Join: a rank that has joined could not exchange activations with the "
            "rest of the model. Instead give every rank the same number of batches, empty ones if need be."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise NotImplementedError(
            "Expected ParallelOptimizer not to be copied, since its members share process groups. Build another one, "
            "and load state_dict()."
        )

    def __getstate__(self) -> NoReturn:
        raise TypeError("Expected ParallelOptimizer not to be pickled. Save state_dict() instead.")

    def _check_no_scaler(self) -> None:
        """Refuse a step under a GradScaler."""
        if vars(self).get("found_inf") is not None:  # not that of an inner optimizer
            raise NotImplementedError(
                "ParallelOptimizer does not support torch.amp.GradScaler, whose scales would differ between ranks with "
                "different parameters. Instead build it with loss_scale=ddp_zero.DynamicLossScale(), or use bfloat16."
            )
