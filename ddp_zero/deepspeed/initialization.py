"""`initialize`: an engine, its optimizer, a data loader and a schedule from a DeepSpeed configuration."""

import importlib
import inspect
import logging
import os
import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import get_rank, get_world_size, is_initialized
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import DataLoader, Dataset

from ddp_zero.core.comm import logger
from ddp_zero.core.ddp import RegisteredHook, bucket_options
from ddp_zero.ddp_hooks import build_with_hook
from ddp_zero.deepspeed.config.config import Auto, Config, Source
from ddp_zero.deepspeed.config.table import DTYPES, ConfigError, hint
from ddp_zero.deepspeed.engine import Engine, EngineOptimizer
from ddp_zero.deepspeed.optimizers import ADAM_OPTIONS, MUON_OPTIONS, Lamb, Lion, MuonWithAdam, muon_groups
from ddp_zero.deepspeed.params import remember
from ddp_zero.deepspeed.progress import warn_once
from ddp_zero.deepspeed.schedules import build_schedule
from ddp_zero.launch import init_process_group
from ddp_zero.loss_scale import DynamicLossScale
from ddp_zero.optimizer import ZeroRedundancyOptimizer

Built = tuple[Engine, Optimizer, DataLoader[Any] | None, Any]
Groups = list[dict[str, Any]]

_MIB = 1 << 20
_CAP_MIB = 25  # of DDP
_COMPRESSING = {torch.float16: fp16_compress_hook, torch.bfloat16: bf16_compress_hook}


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
        model: a module, not wrapped; it is moved to this process's device and cast to the configured dtype, in place.
        optimizer: replaces the configured one: an optimizer over the model's parameters, whose class, options and
            groups are then sharded; or a function of ``model_parameters`` that builds one.
        model_parameters: parameters or groups to step; None for all of the model.
        training_data: a dataset, for which a data loader is returned.
        lr_scheduler: replaces the configured one: a schedule over ``optimizer``, or a function of the optimizer.
        distributed_port: must be None: ``MASTER_PORT`` in the environment, as torchrun sets it, is used.
        mpu: must be None.
        dist_init_required: must not be False without a process group; it is initialised if there is none.
        collate_fn: collate function of the data loader.
        config: a path, a dictionary, or the text of a file in URL-safe base64.
        mesh_param: must be None.
        config_params: old name of ``config``.

    Returns:
        The engine, its optimizer, the data loader or None, and the schedule or None.

    Raises:
        ddp_zero.deepspeed.ConfigError: for a configuration that cannot be used; see docs/deepspeed-keys.md.
        NotImplementedError: for ``mpu``, ``mesh_param`` or ``distributed_port``.
        TypeError: without a model, or with one that is wrapped.
    """
    for name, value in {"mpu": mpu, "mesh_param": mesh_param, "distributed_port": distributed_port}.items():
        if value is not None:
            raise NotImplementedError(
                f"{name}={value!r:.80} is not supported: only data parallelism is sharded here, over the default "
                "process group, which torchrun's variables describe. Pass None. [ZERO-712]"
            )
    if not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel):
        raise TypeError(f"Expected model to be a module that is not wrapped, got {type(model).__name__}. [ZERO-712]")
    source = _source(args, config, config_params)
    _start_group(dist_init_required)
    parsed = _parse(source, model, optimizer=optimizer, scheduler=lr_scheduler)
    device = _device(args)
    module = model.to(device)
    cast(module, parsed)
    groups = as_groups(model_parameters, module)
    check_no_experts(module, optimizer.param_groups if isinstance(optimizer, Optimizer) else groups)
    ddp = _wrap(module, parsed, device)
    built = _optimizer(ddp, parsed, optimizer, groups)
    schedule = _schedule(parsed, built, optimizer, lr_scheduler)
    engine = Engine(ddp, built, schedule, parsed, collate_fn)
    if engine.zero is not None:
        remember(engine.zero)
        if type(engine.zero) is ZeroRedundancyOptimizer:  # not a class of the user's own
            engine.zero.__class__ = EngineOptimizer
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, built, engine.training_dataloader, schedule


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add ``--deepspeed``, a flag for the user's own code, and ``--deepspeed_config``, which `initialize` reads.

    Args:
        parser: the parser to extend.

    Returns:
        The parser.
    """
    group = parser.add_argument_group("DeepSpeed", "options of scripts for DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="a flag for the script; initialize() does not read it")
    group.add_argument("--deepspeed_config", help="the configuration, a JSON file")
    return parser


def _parse(source: Source, model: nn.Module, **given: Any) -> Config:
    """The configuration, with sizes that follow from the model; ``given`` are arguments that replace blocks of it."""
    auto = Auto(source)
    auto.fill_from_model(getattr(model, "config", None))
    parsed = Config.parse(auto.finish(), get_world_size())
    warn_once(parsed.findings, get_rank())
    for name in (name for name, value in given.items() if value is not None and name in parsed.document):
        if get_rank() == 0:
            logger.warning("%r of the configuration has no effect: one was passed to initialize(). [ZERO-715]", name)
    level = parsed.rest.log_level
    if level is not None:
        logger.setLevel(getattr(logging, level.upper()))
    return parsed


def _source(args: Any, config: Source | None, config_params: Source | None) -> Source:
    named = {"config": config, "config_params": config_params, "args": getattr(args, "deepspeed_config", None)}
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) != 1:
        raise TypeError(
            f"Expected one configuration, as config= or in args.deepspeed_config, got {sorted(given) or 'none'}. "
            "[ZERO-712]"
        )
    (source,) = given.values()
    return source


def _start_group(required: bool | None) -> None:
    if is_initialized():
        return
    if required is False:
        raise RuntimeError(
            "dist_init_required=False needs a default process group. Call torch.distributed.init_process_group() "
            "first, or leave dist_init_required out. [ZERO-501]"
        )
    init_process_group()


def _device(args: Any) -> torch.device:
    """The device of this process's local rank on an accelerator, else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    local = getattr(args, "local_rank", None)
    index = int(os.environ.get("LOCAL_RANK", 0)) if local is None or local < 0 else int(local)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _optimizer(ddp: DistributedDataParallel, config: Config, given: Any, groups: Groups) -> Optimizer:
    """The given optimizer, sharded, or the configured one."""
    if given is None:
        if config.optimizer is None:
            raise TypeError(
                'Neither optimizer= nor "optimizer" in the configuration was given. Give one of them. [ZERO-712]'
            )
        names = {param: name for name, param in ddp.module.named_parameters()}
        return _build(ddp, config, choose(config.optimizer.type, config.optimizer.params, groups, names))
    built = given if isinstance(given, Optimizer) else given(groups)
    if not isinstance(built, Optimizer):
        raise TypeError(
            f"Expected optimizer to be, or to build, a torch.optim.Optimizer, got {type(built).__name__}. [ZERO-712]"
        )
    if isinstance(built, ZeroRedundancyOptimizer):
        _attach(built, ddp, config)
        return built
    if any(float(state.get("step", 1)) > 0 for state in built.state.values()):  # Adagrad has state from the start
        raise TypeError(
            "The optimizer has state already. Pass an optimizer that has not stepped yet, and load its state "
            "afterwards. [ZERO-712]"
        )
    if config.is_sharded:
        return _build(ddp, config, choice_of(built))
    _compress_gradients(ddp, config)
    return built


def _attach(optimizer: ZeroRedundancyOptimizer, ddp: DistributedDataParallel, config: Config) -> None:
    """Connect an optimizer that the user has sharded to the model."""
    if optimizer.stage != max(config.zero.stage, 1):
        raise ValueError(
            f"The configuration has stage {config.zero.stage}, the ZeroRedundancyOptimizer has stage "
            f"{optimizer.stage}. Pass the plain optimizer, which is sharded here. [ZERO-712]"
        )
    if (optimizer.loss_scale is not None) != config.fp16.enabled:
        raise ValueError(
            f"Expected a loss scale exactly if fp16 is enabled, got {optimizer.loss_scale} with fp16.enabled = "
            f"{config.fp16.enabled}. Pass the plain optimizer, which is sharded here. [ZERO-712]"
        )
    optimizer.attach(ddp)


def _schedule(config: Config, optimizer: Optimizer, given_optimizer: Any, given: Any) -> Any:
    if given is None:
        section = config.scheduler
        return None if section is None else build_schedule(section.type, section.params, optimizer)
    if callable(given) and not hasattr(given, "step"):
        return given(optimizer)
    if getattr(given, "optimizer", optimizer) is not optimizer:
        if hasattr(given, "_schedulers") or given.optimizer is not given_optimizer:
            raise TypeError(
                f"lr_scheduler is a {type(given).__name__} over a different optimizer, or wraps schedulers. Pass a "
                "function of the optimizer: lr_scheduler=lambda optimizer: ... [ZERO-709]"
            )
        _follow(given, optimizer)
    return given


def _follow(schedule: Any, optimizer: Optimizer) -> None:
    """Redirect a schedule from the plain optimizer to the sharded one."""
    schedule.optimizer = optimizer
    if isinstance(schedule, LRScheduler):
        rates = [group["lr"] for group in optimizer.param_groups]
        LambdaLR(optimizer, lambda _: 1.0)  # patches its `step`, or torch would warn that it is never called
        for group, lr in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = lr


# The model


def _wrap(module: nn.Module, config: Config, device: torch.device) -> DistributedDataParallel:
    """The model in `DistributedDataParallel`, with buckets as large as the configuration allows. A collective."""
    return DistributedDataParallel(
        module,
        **bucket_options(bucket_cap(module, config)),
        device_ids=None if device.type == "cpu" else [device.index],
        gradient_as_bucket_view=config.zero.contiguous_gradients,
        find_unused_parameters=config.zero.ignore_unused_parameters,
    )


def bucket_cap(module: nn.Module, config: Config) -> float | None:
    """The size of DDP's buckets in MiB: the configured one, if that is smaller than DDP's own; else None."""
    trained = [param for param in module.parameters() if param.requires_grad]
    elements = config.bucket_elements
    itemsize = max((param.element_size() for param in trained), default=1)
    cap = _CAP_MIB if elements is None else elements * itemsize / _MIB
    return cap if cap < _CAP_MIB else None


def cast(module: nn.Module, config: Config) -> None:
    """Cast a model's floating-point parameters, and its buffers if configured.

    Raises ConfigError, naming one, for fp16 or bf16 parameters if neither mode is enabled.
    """
    dtype = _dtype_named(config.dtype)
    kept = dict[int, Tensor]()
    if dtype is torch.float32:
        for name, param in module.named_parameters():
            if param.dtype in (torch.float16, torch.bfloat16):
                raise ConfigError(
                    f"Expected parameters of fp32 without fp16 or bf16 enabled, got {name} of {param.dtype}. Enable "
                    "the mode in the configuration, or pass model.float(). [ZERO-707]"
                )
    else:
        pattern = _names_kept_in_fp32(module, config, dtype)
        for name, buffer in module.named_buffers() if pattern is not None else ():
            if pattern is not None and buffer.is_floating_point() and pattern.search(name):
                kept[id(buffer)] = buffer
    buffers = config.data_types.buffer_dtype

    def change(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        if isinstance(tensor, nn.Parameter):
            return tensor if dtype is torch.float32 else tensor.to(dtype)
        if id(tensor) in kept:
            return tensor.float()
        return tensor if buffers is None else tensor.to(_dtype_named(buffers))

    module._apply(change)


def _names_kept_in_fp32(module: nn.Module, config: Config, dtype: torch.dtype) -> re.Pattern[str] | None:
    """Names of buffers that stay in fp32: the configured ones, or those listed by transformers models."""
    setting = config.data_types.keep_in_fp32_modules
    names = set(_fp32_names(module, dtype)) if setting == "auto" else {name.replace("*", ".*") for name in setting}
    return re.compile("|".join(sorted(names))) if names else None


def _fp32_names(module: nn.Module, dtype: torch.dtype) -> Iterator[str]:
    attributes = ["_keep_in_fp32_modules_strict"] + ["_keep_in_fp32_modules"] * (dtype is torch.float16)
    for path, child in module.named_modules():
        for attribute in attributes:
            for name in getattr(child, attribute, None) or ():
                pattern = name.replace("*", ".*")
                yield rf"^{re.escape(path)}\..*{pattern}" if path else pattern


def _dtype_named(name: str) -> torch.dtype:
    found = getattr(torch, DTYPES[name])
    assert isinstance(found, torch.dtype), "the table names dtypes"
    return found


# Options of the optimizer


def _build(ddp: DistributedDataParallel, config: Config, choice: "Choice") -> Optimizer:
    """The sharded optimizer, or in stage 0 with fp32 parameters the plain one. A collective if sharded."""
    if not config.is_sharded:
        _compress_gradients(ddp, config)
        return choice.optimizer_class(choice.groups, **choice.options)
    return build_with_hook(
        ddp,
        choice.optimizer_class,
        params=[dict(group) for group in choice.groups],
        **{**sharding_options(config), **choice.options},
    )


def _compress_gradients(ddp: DistributedDataParallel, config: Config) -> None:
    """In stage 0 with a plain optimizer: send gradients in the configured dtype."""
    hook = _reduction(config)["hook"]
    if hook is not None:
        # wrapped: DDP requires NCCL for torch's bf16 hook, which it recognises by name, though Gloo can run it
        ddp.register_comm_hook(None, RegisteredHook(lambda state, bucket: hook(state, bucket)))


def sharding_options(config: Config) -> dict[str, Any]:
    """Options of `shard_optimizer` besides the optimizer class's own."""
    fp16, bf16 = config.fp16, config.bf16
    options: dict[str, Any] = {
        "stage": max(config.zero.stage, 1),
        "overlap": bool(config.zero.overlap_comm),
        "max_grad_norm": config.max_grad_norm,
        "master_weights": config.has_masters,
        "offload": "cpu" if config.offload.device == "cpu" else None,
        **_reduction(config),
    }
    if bf16.enabled:
        options["nonfinite"] = "skip" if bf16.check_grad_overflow else "step"
    if fp16.enabled and fp16.loss_scale != 0:
        options["loss_scale"] = float(fp16.loss_scale)
    elif fp16.enabled:  # DeepSpeed's first growth, and the first after an overflow, come a step later than all others
        options["loss_scale"] = DynamicLossScale(
            initial=2.0**fp16.initial_scale_power,
            growth_interval=fp16.loss_scale_window,
            first_interval=fp16.loss_scale_window + 1,
            hysteresis=fp16.hysteresis,
            restores_hysteresis=fp16.consecutive_hysteresis,
            minimum=float(fp16.min_loss_scale),
        )
    return {name: value for name, value in options.items() if value is not None}


def _reduction(config: Config) -> dict[str, Any]:
    """Options of the reduction and accumulation of gradients."""
    rest = config.rest
    own = _dtype_named(config.dtype)
    comm = own if rest.communication_data_type is None else _dtype_named(rest.communication_data_type)
    if config.zero.stage == 2:
        factor = None if rest.prescale_gradients else rest.gradient_predivide_factor
        return {"grad_comm_dtype": None if comm is own else comm, "gradient_predivide_factor": factor}
    return {"accumulate_in_fp32": config.sums_in_fp32, "hook": None if comm is own else _COMPRESSING[comm]}


# Optimizers by name


_WITHOUT_EFFECT = ("torch_adam", "fp32_optimizer_states", "set_grad_none")
"""Options that choose among DeepSpeed's own implementations."""

_VARIANT = re.compile("fused|foreach|deepspeed|cpu|onebit|8bit|_")  # parts of names: how an optimizer is computed
_NEAR = 0.75
_ELSEWHERE = {"muadam": "mup.MuAdam", "muadamw": "mup.MuAdamW", "musgd": "mup.MuSGD"}

_OWN: Mapping[str, Callable[..., Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "lion": Lion,
    "lamb": Lamb,
}


class Choice(NamedTuple):
    """An optimizer class, its options, and its parameter groups."""

    optimizer_class: Callable[..., Optimizer]
    options: Mapping[str, Any]
    groups: Groups


def choose(type_name: str, params: Mapping[str, Any], groups: Groups, names: Mapping[nn.Parameter, str]) -> Choice:
    """The optimizer of a configured type and its options ``params``, given the names of the parameters.

    Raises ConfigError, with the nearest name, for an unknown class, or for an option that it does not have.
    """
    options = {name: value for name, value in params.items() if name not in _WITHOUT_EFFECT}
    if isinstance(options.get("betas"), list):
        options["betas"] = tuple(options["betas"])
    kind = type_name.lower()
    if kind in ("adam", "adamw"):
        return _adam(kind, options, groups)
    if kind == "muon":
        return _muon(options, groups, names)
    found = _class(type_name)
    _check_options(found, options, type_name)
    return Choice(found, options, groups)


def _adam(kind: str, options: dict[str, Any], groups: Groups) -> Choice:
    is_decoupled = bool(options.pop("adam_w_mode", True)) or kind == "adamw"
    found = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    if options.pop("bias_correction", True) is not True:
        raise ConfigError(
            "torch's Adam does not have bias_correction = false in optimizer.params. Leave it out. [ZERO-708]"
        )
    _check_options(found, options, "Adam")
    return Choice(found, {"weight_decay": 0.0, **options}, groups)  # AdamW of torch has another default


def _muon(options: dict[str, Any], groups: Groups, names: Mapping[nn.Parameter, str]) -> Choice:
    if options.pop("per_head_muon", False):
        raise ConfigError(
            "Expected per_head_muon = false in optimizer.params of Muon, got true: leave it out. [ZERO-708]"
        )
    own = {name: options.pop(name) for name in ("adam_w_mode",) if name in options}
    known = {*MUON_OPTIONS, *ADAM_OPTIONS, "muon_lr", "adam_lr"}
    for name in options:
        if name not in known:
            raise ConfigError(_unknown(name, known, "Muon"))
    return Choice(MuonWithAdam, own, muon_groups(groups, names, options))


def _class(name: str) -> Callable[..., Optimizer]:
    own = _OWN.get(name.lower())
    if own is not None:
        return own
    if name.lower() in _ELSEWHERE:
        raise ConfigError(
            f"Expected the full name of a class of another library in optimizer.type, got {name!r}. Install it, and "
            f"write {_ELSEWHERE[name.lower()]!r}. [ZERO-708]"
        )
    found = getattr(torch.optim, name, None) if "." not in name else _import(name)
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        known = [*(one for one, value in vars(torch.optim).items() if isinstance(value, type)), "Lion", "Lamb"]
        bare = _VARIANT.sub("", name.lower())
        same = next((one for one in known if one.lower() == bare), None)
        near = hint(name, known, _NEAR) if same is None else f"; did you mean {same!r}?"
        raise ConfigError(
            "Expected optimizer.type to be a name of DeepSpeed, a class of torch.optim, or the full name of an "
            f"importable one, got {name!r}{near} [ZERO-708]"
        )
    return found


def _import(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError as error:
        raise ConfigError(
            f"Expected an importable class in optimizer.type, got {name!r}: {error}. [ZERO-708]"
        ) from error


def _check_options(found: Callable[..., Optimizer], options: Mapping[str, Any], name: str) -> None:
    taken = inspect.signature(found).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        return
    for option in options:
        if option not in taken or option == "params":
            raise ConfigError(_unknown(option, taken, name))


def _unknown(option: str, known: Iterable[str], name: str) -> str:
    return f"Expected an option of {name} in optimizer.params, got {option!r}{hint(option, known, _NEAR)} [ZERO-708]"


def choice_of(optimizer: Optimizer) -> Choice:
    """The class, options and groups of an optimizer that a user has built."""
    kind = type(optimizer)
    taken = inspect.signature(kind).parameters  # AdamW, for one, adds a default that it does not take
    options = {name: value for name, value in optimizer.defaults.items() if name in taken}
    return Choice(kind, options, optimizer.param_groups)


def check_no_experts(module: nn.Module, groups: Iterable[Mapping[str, Any]]) -> None:
    """Check that no parameter is marked as one of DeepSpeed's experts, which DDP would make alike on all ranks."""
    names = {param: name for name, param in module.named_parameters()}
    marked = [param for group in groups if group.get("moe") for param in group["params"]]
    marked += [param for param in names if not getattr(param, "allreduce", True)]
    if marked:
        raise NotImplementedError(
            "Expected parameters that all ranks hold alike, got experts of DeepSpeed (allreduce = False, or a group "
            f"with 'moe'), such as {names.get(marked[0], 'a parameter of no module')!r}: this engine averages over all "
            "ranks. Train experts with shard_optimizer(model, AdamW, groups, mesh=mesh, data_parallel_dim=...), see "
            "docs/parallel.md. [ZERO-116]"
        )


def as_groups(parameters: Iterable[Any] | None, module: nn.Module) -> Groups:
    """Parameter groups, by default of all parameters, without frozen parameters and groups that become empty.

    Raises ValueError if no parameter is left.
    """
    given: Sequence[Any] = list(module.parameters() if parameters is None else parameters)
    loose = [one[1] if isinstance(one, tuple) else one for one in given if not isinstance(one, Mapping)]
    groups = [dict(one, params=list(one["params"])) for one in given if isinstance(one, Mapping)]
    groups = [*groups, {"params": loose}] if loose else groups
    trained = [dict(group, params=[param for param in group["params"] if param.requires_grad]) for group in groups]
    found = [group for group in trained if group["params"]]
    if not found:
        raise ValueError(
            "Expected a parameter that requires a gradient, got none. Call requires_grad_() on those that are to be "
            "trained. [ZERO-712]"
        )
    return found
