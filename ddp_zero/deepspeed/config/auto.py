"""Fills ``"auto"`` in a configuration from values that are known elsewhere, as the Hugging Face integration does.

auto = Auto(read("ds_config.json"))
auto.fill_from_trainer(args, ranks)
auto.fill_from_model(model.config)
auto.fill_steps(training_steps, warmup_steps)
document = auto.finish()
"""

from collections.abc import Callable, Mapping
from typing import Any

from ddp_zero.deepspeed.config.document import Source, read, value_at
from ddp_zero.deepspeed.config.keys import AUTO, ConfigError
from ddp_zero.deepspeed.config.table import autos

_OF_HIDDEN_SIZE: Mapping[str, Callable[[int], int]] = {
    "zero_optimization.reduce_bucket_size": lambda size: size * size,
    "zero_optimization.stage3_prefetch_bucket_size": lambda size: int(0.9 * size * size),
    "zero_optimization.stage3_param_persistence_threshold": lambda size: 10 * size,
}
"""Keys that follow from a model's hidden size."""


class Auto:
    """A configuration that is being filled in.

    Args:
        source: see `ddp_zero.deepspeed.config.document.read`; what is given is not changed.

    Attributes:
        document: the configuration so far.
        mismatches: values that contradict those known elsewhere, a line each.
    """

    def __init__(self, source: Source) -> None:
        self.document = read(source)
        self.mismatches = list[str]()

    def fill_match(self, path: str, value: Any, name: str) -> None:
        """Fill a key that is ``"auto"``; note a mismatch if it has another value. A key that is missing stays missing.

        Args:
            path: of the key.
            value: the known one.
            name: what that is called where it is known, for the message.
        """
        given = value_at(self.document, path)
        if given == AUTO:
            self.fill_only(path, value)
        elif given is not None and given != value:
            self.mismatches.append(f"- {path} = {given!r}, but {name} = {value!r}")

    def fill_only(self, path: str, value: Any) -> None:
        """Fill a key if it is ``"auto"``; any other value stays."""
        if value_at(self.document, path) == AUTO:
            block, _, key = path.rpartition(".")
            holder = value_at(self.document, block) if block else self.document
            holder[key] = value

    def fill_from_trainer(self, args: Any, ranks: int) -> None:
        """Fill what follows from training arguments alone.

        Args:
            args: of transformers, or any object with the same attributes.
            ranks: the number of ranks.
        """
        micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        self.fill_match("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size")
        self.fill_match("gradient_accumulation_steps", accumulation, "gradient_accumulation_steps")
        self.fill_match("train_batch_size", ranks * micro * accumulation, "train_batch_size (calculated)")
        self.fill_match("gradient_clipping", args.max_grad_norm, "max_grad_norm")
        self.fill_match("optimizer.params.lr", args.learning_rate, "learning_rate")
        self.fill_match("optimizer.params.betas", [args.adam_beta1, args.adam_beta2], "adam_beta1, adam_beta2")
        self.fill_match("optimizer.params.eps", args.adam_epsilon, "adam_epsilon")
        self.fill_match("optimizer.params.weight_decay", args.weight_decay, "weight_decay")
        self.fill_only("scheduler.params.warmup_min_lr", 0)
        self.fill_match("scheduler.params.warmup_max_lr", args.learning_rate, "learning_rate")
        for name in ("fp16", "bf16"):
            is_on = bool(getattr(args, name) or getattr(args, f"{name}_full_eval", False))
            self.fill_match(f"{name}.enabled", is_on, name)

    def fill_from_model(self, model_config: Any) -> None:
        """Fill sizes that follow from a model's hidden size.

        Args:
            model_config: of a transformers model, or any object with ``hidden_size`` or ``hidden_sizes``, itself or in
                ``text_config``; None if there is none.

        Raises:
            ConfigError: if such a size is ``"auto"`` and no hidden size is known.
        """
        open_keys = [path for path in _OF_HIDDEN_SIZE if value_at(self.document, path) == AUTO]
        if not open_keys:
            return
        size = hidden_size(model_config)
        if size is None:
            raise ConfigError(
                "Expected a model whose config has hidden_size or hidden_sizes, itself or in text_config, got none; "
                f'{", ".join(open_keys)} = "auto" cannot be filled without. Write numbers in their place.'
            )
        for path in open_keys:
            self.fill_only(path, _OF_HIDDEN_SIZE[path](size))

    def fill_steps(self, training_steps: int, warmup_steps: int) -> None:
        """Fill what follows from the length of the training.

        Args:
            training_steps: how many steps will be taken.
            warmup_steps: the first of them; 1 at least, as the schedules need.
        """
        self.fill_match("scheduler.params.total_num_steps", training_steps, "the number of training steps")
        self.fill_match("scheduler.params.warmup_num_steps", max(1, warmup_steps), "warmup_steps")

    def finish(self) -> dict[str, Any]:
        """The configuration.

        Raises:
            ConfigError: listing all mismatches.
        """
        if self.mismatches:
            raise ConfigError(
                "\n".join(
                    [
                        "Expected a configuration that says the same as the training arguments, got:",
                        *self.mismatches,
                        'Write "auto" in their place, or change one of the two.',
                    ]
                )
            )
        return self.document

    @property
    def left(self) -> list[str]:
        """Keys that are still ``"auto"``."""
        return autos(self.document)


def hidden_size(model_config: Any) -> int | None:
    """A model's hidden size; the largest of several; None if its config has none."""
    for config in (model_config, _attribute(model_config, "text_config")):
        single, several = _attribute(config, "hidden_size"), _attribute(config, "hidden_sizes")
        if single is not None:
            return int(single)
        if several:
            return int(max(several))
    return None


def _attribute(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
