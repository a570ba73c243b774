"""`initialize`: an engine, its optimizer, a data loader and a schedule from a DeepSpeed configuration."""

import logging
import os
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed import get_rank, get_world_size, is_initialized
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset

from ddp_zero.core.comm.tracing import logger
from ddp_zero.deepspeed.build import build_optimizer, prepare_plain, shard_built, wrap_model
from ddp_zero.deepspeed.config.auto import Auto
from ddp_zero.deepspeed.config.config import Config
from ddp_zero.deepspeed.config.document import Source
from ddp_zero.deepspeed.engine import Engine
from ddp_zero.deepspeed.monitor import warn_once
from ddp_zero.deepspeed.optimizers import as_groups, choice_of, choose
from ddp_zero.deepspeed.params import remember
from ddp_zero.deepspeed.precision import cast
from ddp_zero.deepspeed.schedules import build_schedule
from ddp_zero.launch import init_process_group
from ddp_zero.optimizer import ZeroRedundancyOptimizer

Built = tuple[Engine, Optimizer, DataLoader[Any] | None, Any]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Source | None = None,
    mesh_param: Any = None,
    config_params: Source | None = None,
) -> Built:
    """Build an engine with the arguments of DeepSpeed's function of this name. A collective.

    Args:
        args: an object that may have ``deepspeed_config``, a path, and ``local_rank``.
        model: not wrapped; it is moved to this process's device and cast to the configuration's dtype, in place.
        optimizer: replaces the configuration's: one that was built over the model's parameters, whose class, options
            and groups are then sharded; or a function of ``model_parameters`` that builds one.
        model_parameters: parameters or groups to step; None: all of the model.
        training_data: a dataset, for which a data loader is returned.
        lr_scheduler: replaces the configuration's: one over ``optimizer``, or a function of the optimizer.
        distributed_port: must be None: ``MASTER_PORT`` in the environment, as torchrun sets it, is used.
        mpu: must be None.
        dist_init_required: must not be False without a process group; it is initialised if there is none.
        collate_fn: of the data loader.
        config: a path, a dictionary, or the text of a file in URL-safe base64.
        mesh_param: must be None.
        config_params: the same under its old name.

    Returns:
        The engine, its optimizer, the data loader or None, and the schedule or None.

    Raises:
        ddp_zero.deepspeed.config.keys.ConfigError: for a configuration that cannot be used; see docs/deepspeed-keys.md.
        NotImplementedError: for ``mpu``, ``mesh_param`` or ``distributed_port``.
        TypeError: without a model, or with one that is wrapped.
    """
    _check_none(mpu=mpu, mesh_param=mesh_param, distributed_port=distributed_port)
    if not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel):
        raise TypeError(f"Expected model to be a module that is not wrapped, got {type(model).__name__}.")
    source = _source(args, config, config_params)
    _start_group(dist_init_required)
    parsed = _parsed(source, model, optimizer=optimizer, scheduler=lr_scheduler)
    module = model.to(_device(args))
    cast(module, parsed)
    ddp = wrap_model(module, parsed, _device(args))
    built = _optimizer(ddp, parsed, optimizer, model_parameters)
    schedule = _schedule(parsed, built, optimizer, lr_scheduler)
    engine = Engine(ddp, built, schedule, parsed, collate_fn)
    if engine.zero is not None:
        remember(engine.zero)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, built, engine.training_dataloader, schedule


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add ``--deepspeed``, a flag for the user's own code, and ``--deepspeed_config``, which `initialize` reads.

    Returns:
        The parser.
    """
    group = parser.add_argument_group("DeepSpeed", "options of scripts for DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script; initialize() does not read it")
    group.add_argument("--deepspeed_config", help="the configuration, a JSON file")
    return parser


def _check_none(**arguments: Any) -> None:
    """Check that arguments for what is not done here were not given.

    Raises:
        NotImplementedError: for one that was.
    """
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"Expected {name}=None, got {value!r:.80}. Only data parallelism is sharded here, over the default "
                "process group, which torchrun's variables describe."
            )


def _parsed(source: Source, model: nn.Module, **given: Any) -> Config:
    """The configuration; keys without effect are told, and sizes that follow from the model are filled in.

    Args:
        source: of the configuration.
        model: not wrapped.
        **given: by the name of a block, what was passed in its place, or None.
    """
    auto = Auto(source)
    auto.fill_from_model(getattr(model, "config", None))
    parsed = Config.parse(auto.finish(), get_world_size())
    warn_once(parsed.findings, get_rank())
    for name in (name for name, value in given.items() if value is not None and name in parsed.document):
        if get_rank() == 0:
            logger.warning("%r of the configuration has no effect: one was passed to initialize().", name)
    if parsed.rest.log_level is not None:
        logger.setLevel(getattr(logging, parsed.rest.log_level.upper()))
    return parsed


def _source(args: Any, config: Source | None, config_params: Source | None) -> Source:
    """The one configuration that was given.

    Raises:
        TypeError: if there is none, or several.
    """
    named = {"config": config, "config_params": config_params, "args": getattr(args, "deepspeed_config", None)}
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) != 1:
        raise TypeError(
            f"Expected one configuration, as config= or in args.deepspeed_config, got {sorted(given) or 'none'}."
        )
    (source,) = given.values()
    return source


def _start_group(required: bool | None) -> None:
    if is_initialized():
        return
    if required is False:
        raise RuntimeError(
            "Expected a default process group with dist_init_required=False, got none. Call "
            "torch.distributed.init_process_group() first, or leave dist_init_required out."
        )
    init_process_group()


def _device(args: Any) -> torch.device:
    """This process's device: that of its local rank on an accelerator, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = getattr(args, "local_rank", None)
    index = int(os.environ.get("LOCAL_RANK", 0)) if local is None or local < 0 else int(local)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _optimizer(ddp: DistributedDataParallel, config: Config, given: Any, parameters: Iterable[Any] | None) -> Optimizer:
    """The optimizer that was given, sharded, or that of the configuration.

    Raises:
        TypeError: if there is neither, or what a function has built is not an optimizer.
    """
    if given is None:
        if config.optimizer is None:
            raise TypeError('Expected optimizer= or "optimizer" in the configuration, got neither.')
        names = {param: name for name, param in ddp.module.named_parameters()}
        return build_optimizer(ddp, config, choose(config.optimizer, as_groups(parameters, ddp.module), names))
    groups = as_groups(parameters, ddp.module)
    built = given if isinstance(given, Optimizer) else given(groups)
    if not isinstance(built, Optimizer):
        raise TypeError(f"Expected optimizer to be, or to build, a torch.optim.Optimizer, got {type(built).__name__}.")
    if isinstance(built, ZeroRedundancyOptimizer):
        shard_built(built, ddp, config)
        return built
    if any(float(state.get("step", 1)) > 0 for state in built.state.values()):  # Adagrad has state from the start
        raise TypeError("Expected an optimizer that has not stepped yet, got one with state. Load it afterwards.")
    if config.is_sharded:
        return build_optimizer(ddp, config, choice_of(built))
    prepare_plain(ddp, config)
    return built


def _schedule(config: Config, optimizer: Optimizer, given_optimizer: Any, given: Any) -> Any:
    """The schedule that was given, following the optimizer, or that of the configuration, or None.

    Raises:
        TypeError: for a schedule that is built of others, whose optimizer cannot be replaced.
    """
    if given is None:
        return None if config.scheduler is None else build_schedule(config.scheduler, optimizer)
    if callable(given) and not hasattr(given, "step"):
        return given(optimizer)
    if getattr(given, "optimizer", optimizer) is not optimizer:
        if hasattr(given, "_schedulers") or given.optimizer is not given_optimizer:
            raise TypeError(
                f"Expected a schedule over the optimizer, or a function of it, got {type(given).__name__} over another "
                "one, or one that holds others. Pass lr_scheduler=lambda optimizer: ..."
            )
        _follow(given, optimizer)
    return given


def _follow(schedule: Any, optimizer: Optimizer) -> None:
    """Let a schedule set the rates of the sharded optimizer, and torch's count its steps instead of the plain one's."""
    schedule.optimizer = optimizer
    if isinstance(schedule, LRScheduler):
        rates = [group["lr"] for group in optimizer.param_groups]
        LambdaLR(optimizer, lambda _: 1.0)  # which makes the optimizer note that it steps
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr
