"""Optimizers that step each element by itself, so that a part of a parameter can be stepped as the whole would be."""

from typing import TypeVar

from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
)

OptimizerClass = TypeVar("OptimizerClass", bound=type[Optimizer])

_known: set[type[Optimizer]] = {
    *(SGD, Adam, AdamW, Adagrad, RMSprop, Adadelta, Adamax, NAdam, RAdam, ASGD, Rprop),
}


def elementwise(optimizer_class: OptimizerClass) -> OptimizerClass:
    """Declare that an optimizer class steps each element by itself, for ``partition="elements"``; a decorator.

    Such a class computes no norm, mean, rank or shape-dependent factor of a parameter or its gradient, and keeps state
    that has the parameter's shape or does not depend on its elements. That is the caller's promise: parameters would
    silently differ from the unsharded optimizer's otherwise.

    Args:
        optimizer_class: of your own or of a library; returned as it is.

    Raises:
        TypeError: if it is not a class of optimizers.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(f"Expected a torch.optim.Optimizer class, got {optimizer_class!r:.80}.")
    _known.add(optimizer_class)
    return optimizer_class


def is_elementwise(inner: Optimizer) -> bool:
    """Whether an optimizer is known to step each element by itself."""
    return type(inner) in _known


def check_elementwise(inner: Optimizer) -> None:
    """Check that an optimizer steps each element by itself.

    Raises:
        TypeError: if that is not known.
    """
    if not is_elementwise(inner):
        names = ", ".join(sorted(known.__name__ for known in _known))
        raise TypeError(
            f"Expected an optimizer that steps each element by itself with partition='elements', got "
            f"{type(inner).__name__}; known are {names}. Use partition='parameters', or declare the class by "
            "ddp_zero.elementwise(...) if it is one."
        )
    held = [name for name, value in vars(inner).items() if isinstance(value, Optimizer)]
    if held:
        raise TypeError(
            f"Expected an optimizer without another one inside with partition='elements', got "
            f"{type(inner).__name__}.{held[0]}. Use partition='parameters'."
        )
