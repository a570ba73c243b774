"""What a checkpoint of a different library holds, in the words of this one."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_zero.checkpoint.foreign.values import RawTensor


@dataclass(frozen=True)
class Foreign:
    """A checkpoint that a different library wrote.

    Attributes:
        folder: where it is.
        step: how many steps its job had taken.
        digest: differs if anything in it differs.
        model: values by name.
        masters: fp32 values of parameters whose value in the model is less exact.
        state: optimizer state by parameter name, each value as the plain optimizer has it.
        groups: the optimizer's groups; ``params`` are names, and the options may be missing.
        aliases: additional names of values, with the name under which each is.
        buffers: names of values that are no parameters.
        kinds: last parts of the names of optimizer classes that have such a state.
        loss_scale: the state of a dynamic loss scale, or None.
        extra: everything else.
    """

    folder: Path
    step: int
    digest: str
    model: dict[str, Any]
    masters: dict[str, RawTensor]
    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    aliases: dict[str, str] = field(default_factory=dict)
    buffers: list[str] = field(default_factory=list)
    kinds: frozenset[str] = frozenset()
    loss_scale: dict[str, float] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def trainable(self) -> list[str]:
        """Names of the parameters that the optimizer steps."""
        return [name for group in self.groups for name in group["params"]]
