"""Reads DeepSpeed checkpoints of stages 1 and 2 and of the universal format, and writes the latter; without DeepSpeed.

Stages 1 and 2 have a file of the model, and one of the optimizer for each data-parallel rank. A rank holds one flat
tensor for each group of parameters and each state. End to end, in the order of ranks, these hold a group's parameters
in the order of ``param_shapes``, so a parameter may begin on one rank and end on a later rank. Each rank also states
places, in ``param_slice_mappings``. With ``round_robin_gradients`` they are wrong, as if parameters were not dealt out
in turn, so that only the numbers of elements can be checked against ``param_shapes``. In the universal format each
state of each parameter is a file.
"""

import hashlib
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_zero.checkpoint.foreign.torch_file import Inert, RawTensor, Span, load
from ddp_zero.error_codes import coded, uncoded
from ddp_zero.tools.files import written

VERSION = "0.19.0"
"""DeepSpeed tells formats apart by this version; it treats all since 0.3.17 alike."""

MODEL_FILE = "mp_rank_00_model_states.pt"
_MODEL = re.compile(r"mp_rank_([0-9]{2})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_([0-9]{1,6})_mp_rank_([0-9]{2})_optim_states\.pt")
_STAGE_3 = re.compile(r"zero_pp_rank_[0-9]+_mp_rank_[0-9]{2}_model_states\.pt")
_OTHER_PARALLEL = re.compile(r"layer_[0-9].*\.pt|.*expp?_rank_[0-9].*\.pt|.*expert_[0-9].*\.pt")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=+-]{0,200}")
_MOST_BYTES_OF_TAG = 1000
_LATEST, _LATEST_UNIVERSAL = "latest", "latest_universal"

_COPY = (
    "Copy the files of all ranks again; if they are complete, convert them with DeepSpeed's zero_to_fp32 or "
    "ds_to_universal."
)
_CLASSES: dict[tuple[str, str], Any] = {
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"): None,
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"): None,
    ("deepspeed.utils.tensor_fragment", "fragment_address"): None,
    ("deepspeed.utils.tensor_fragment", "tensor_fragment"): None,
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"): int,
    ("argparse", "Namespace"): None,
}
_KINDS = {
    frozenset({"exp_avg", "exp_avg_sq"}): {"Adam", "AdamW", "Lamb", "FusedAdam", "DeepSpeedCPUAdam"},
    frozenset({"exp_avg"}): {"Lion"},
    frozenset({"momentum_buffer"}): {"SGD", "Muon"},
    frozenset({"sum"}): {"Adagrad"},
}
_OWN = {
    *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params"),
    *("frozen_param_fragments", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions"),
    *("lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps", "global_samples"),
    *("ds_config", "ds_version", "universal_checkpoint_info"),
}
"""DeepSpeed's own entries next to the user's client state."""


@dataclass(frozen=True)
class Foreign:
    """Another library's checkpoint."""

    folder: Path  # its folder
    step: int  # number of steps taken by its job
    digest: str  # hash that differs if any value differs
    model: dict[str, Any]  # values by name
    masters: dict[str, RawTensor]  # fp32 values of parameters whose value in the model is less exact
    state: dict[str, dict[str, Any]]  # optimizer state by parameter name, in the plain optimizer's form
    groups: list[dict[str, Any]]  # the optimizer's groups, with names as ``params``; options may be missing
    aliases: dict[str, str] = field(default_factory=dict)  # additional names of values, each with the name of the value
    buffers: list[str] = field(default_factory=list)  # names of values that are not parameters
    kinds: frozenset[str] = frozenset()  # unqualified names of optimizer classes that have such a state
    loss_scale: dict[str, float] | None = None  # state of a dynamic loss scale, or None
    extra: dict[str, Any] = field(default_factory=dict)  # everything else

    @property
    def trainable(self) -> list[str]:
        return [name for group in self.groups for name in group["params"]]


def find(path: Path) -> Path | None:
    """The folder of the DeepSpeed checkpoint that a path names: itself, or the folder that ``latest`` in it names."""
    if not path.is_dir():
        return None
    if any(_MODEL.fullmatch(name) for name in _names(path)):
        return path
    for latest in (_LATEST, _LATEST_UNIVERSAL):
        if (path / latest).is_file():
            with (path / latest).open("rb") as file:
                tag = file.read(_MOST_BYTES_OF_TAG).decode(errors="replace").strip()
            if _TAG.fullmatch(tag) and (path / tag).is_dir() and ".." not in tag:
                return path / tag
    return None


def read(folder: Path) -> Foreign:
    """Read everything but the elements of tensors.

    Raises ValueError for a checkpoint that is damaged or incomplete, of stage 0 or 3, of a job with tensor, pipeline or
    expert parallelism, or that holds objects of unknown classes.
    """
    try:
        return _Reader(folder).read()
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        found = f"{type(error).__name__}: {uncoded(str(error)).rstrip('.')}"
        raise ValueError(
            f"Expected a checkpoint of DeepSpeed 0.17 to 0.19 in {folder}, got {found}. {_COPY} [ZERO-621]"
        ) from error


class _Reader:
    """Reads one checkpoint; see `read`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names = _names(folder)
        self._digest = hashlib.sha256()

    def read(self) -> Foreign:
        self._check_files()
        model = self.load(MODEL_FILE)
        shapes = model["param_shapes"]
        if not shapes:
            raise ValueError(
                f"Expected stage 1 or 2 in {self.folder}, got stage 0. Load it with torch.load, and give 'module' and "
                "'optimizer' to load_state_dict(). [ZERO-620]"
            )
        shape_of = {name: tuple(shape) for group in shapes for name, shape in group.items()}
        is_universal = (self.folder / "zero").is_dir()
        parts = _Universal(self) if is_universal else _Partitioned(self, shapes, model)
        values = {name: parts.values(name, shape) for name, shape in shape_of.items()}
        module, aliases = dict(model["module"]), dict(model.get("shared_params") or {})
        masters = {name: states.pop("fp32") for name, states in values.items()}
        for name, master in masters.items():
            module.setdefault(name, master)
            if module[name].shape != master.shape:
                raise ValueError(
                    f"Expected {name!r} of shape {module[name].shape}, got {master.shape}. {_COPY} [ZERO-621]"
                )
        is_same = {name for name, master in masters.items() if module[name].dtype == master.dtype}
        given = {place: {key: one[key] for key in one if key != "params"} for place, one in enumerate(parts.groups)}
        groups = [{**given.get(place, {}), "params": group} for place, group in enumerate(map(list, shapes))]
        for group in groups:
            step = group.pop("step", None)  # of DeepSpeed's own Adam, which counts in the group
            for name in group["params"] if step is not None else ():
                if values[name]:
                    values[name].setdefault("step", step)
        keys = frozenset(key for states in values.values() for key in states) - {"step"}
        scaler = parts.common.get("loss_scaler")
        return Foreign(
            folder=self.folder,
            step=int(model["global_steps"]),
            digest=self._digest.hexdigest(),
            model={name: value for name, value in module.items() if aliases.get(name) not in module},
            masters={name: master for name, master in masters.items() if name not in is_same},
            state={name: states for name, states in values.items() if states},
            groups=groups,
            aliases={alias: name for alias, name in aliases.items() if alias in module and name in module},
            buffers=list(model.get("buffer_names") or []),
            kinds=frozenset(_KINDS.get(keys, ())),
            loss_scale=_loss_scale(scaler),
            extra=_extra(model, scaler),
        )

    def _check_files(self) -> None:
        """ValueError for a checkpoint of stage 3, or of other parallelism than data parallelism."""
        models = [match[1] for name in self.names if (match := _MODEL.fullmatch(name))]
        if any(_STAGE_3.fullmatch(name) for name in self.names):
            raise ValueError(
                f"Expected stage 1 or 2 in {self.folder}, got stage 3. Convert it with DeepSpeed's "
                "deepspeed.checkpoint.ds_to_universal first. [ZERO-620]"
            )
        if models != ["00"] or any(_OTHER_PARALLEL.fullmatch(name) for name in self.names):
            raise ValueError(
                f"The checkpoint in {self.folder} is of a job with tensor, pipeline or expert parallelism, and only "
                "data parallelism is read here. [ZERO-620]"
            )

    def load(self, name: str) -> Any:
        try:
            return load(self.folder, name, self._digest, _CLASSES)
        except ValueError as error:
            if "again" in str(error):  # it names a remedy
                raise
            raise ValueError(coded(f"{error} {_COPY}", "[ZERO-621]")) from error


class _Partitioned:
    """The optimizer's files of stages 1 and 2, a file for each rank; ``common`` is rank 0's."""

    def __init__(self, reader: _Reader, shapes: Sequence[Mapping[str, Sequence[int]]], model: Any) -> None:
        world_size = model["dp_world_size"]
        matches = [match for name in reader.names if (match := _OPTIMIZER.fullmatch(name))]
        files = {int(match[1]): match[0] for match in matches if match[2] == "00"}
        if sorted(files) != list(range(world_size)) or len(files) < len(matches):
            raise ValueError(
                f"Expected a file of the optimizer for each of {world_size} ranks in {reader.folder}, got those of "
                f"{sorted(files)}. {_COPY} [ZERO-621]"
            )
        loaded = [reader.load(files[rank]) for rank in sorted(files)]
        self._ranks = [content["optimizer_state_dict"] for content in loaded]
        self._group_of = {name: place for place, group in enumerate(shapes) for name in group}
        self.common = self._ranks[0]
        base = self.common["base_optimizer_state"]
        self.groups = base["param_groups"] if isinstance(base, dict) else ()  # an elastic checkpoint has no options
        configs = [content.get("ds_config") for content in (model, *loaded)]
        self._places = [
            self._places_in(place, group, any(map(_deals_round_robin, configs)), reader.folder)
            for place, group in enumerate(shapes)
        ]

    def _places_in(
        self, place: int, shapes: Mapping[str, Sequence[int]], is_round_robin: bool, folder: Path
    ) -> list[dict[str, tuple[int, int]]]:
        """For each rank, the begin and length of every parameter's elements in the rank's flat tensor of a group.

        Raises ValueError if the ranks' own mappings differ without round-robin, or if elements are missing.
        """
        places_of_ranks, start, end, counts = list[dict[str, tuple[int, int]]](), 0, 0, Counter[str]()
        ends = list(accumulate(math.prod(shape) for shape in shapes.values()))
        for number, rank in enumerate(self._ranks):
            start = end
            end = end + rank["single_partition_of_fp32_groups"][place].shape[0]
            by_shapes: dict[str, tuple[int, int]] = {}
            for name, last, shape in zip(shapes, ends, shapes.values(), strict=True):
                begin, stop = max(start, last - math.prod(shape)), min(end, last)
                if begin < stop:
                    by_shapes[name] = begin - start, stop - begin
            by_mappings = {name: _slice(name, address) for name, address in rank["param_slice_mappings"][place].items()}
            by_mappings = {name: address for name, address in by_mappings.items() if address[1]}
            counts.update({name: count for name, (_, count) in by_mappings.items()})
            if by_shapes != by_mappings and not is_round_robin:
                name = next(name for name in (*by_shapes, *by_mappings) if by_shapes.get(name) != by_mappings.get(name))
                raise ValueError(
                    f"Expected one order of parameters in {folder}, got {name!r} of rank {number} at "
                    f"{by_shapes.get(name)} by param_shapes and at {by_mappings.get(name)} by param_slice_mappings, "
                    "and no round_robin_gradients in its configuration. Convert it with DeepSpeed's zero_to_fp32 or "
                    "ds_to_universal. [ZERO-621]"
                )
            places_of_ranks.append(by_shapes)
        expected = {name: math.prod(shape) for name, shape in shapes.items() if math.prod(shape)}
        if end < sum(expected.values()) or counts != expected:
            raise ValueError(
                f"Expected {expected} elements of group {place} in {folder}, got {dict(counts)} of {end}. {_COPY} "
                "[ZERO-621]"
            )
        return places_of_ranks

    def values(self, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        """A parameter in fp32, as ``fp32``, and its states."""
        place = self._group_of[name]
        found: dict[str, Any] = {}
        spans: dict[str, list[Span]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for rank, places_here in zip(self._ranks, self._places[place], strict=True):
            if name not in places_here:
                continue
            begin, count = places_here[name]
            flat = rank["single_partition_of_fp32_groups"][place]
            for key, value in {**self._state(rank, place), "fp32": flat}.items():
                if isinstance(value, RawTensor) and len(value.shape) == 1 and value.shape[0] >= flat.shape[0]:
                    spans.setdefault(key, []).extend(value.part(begin, count))
                    if dtypes.setdefault(key, value.dtype) != value.dtype:
                        raise ValueError(f"Expected one dtype of {key} of {name!r}, got two. {_COPY} [ZERO-621]")
                else:
                    found[key] = value
        for key, places in spans.items():
            nbytes = sum(span.nbytes for span in places)
            if nbytes != math.prod(shape) * dtypes[key].itemsize:
                raise ValueError(
                    f"Expected {key} of {name!r} with shape {list(shape)}, got {nbytes} bytes on all ranks. {_COPY} "
                    "[ZERO-621]"
                )
            found[key] = RawTensor(shape, dtypes[key], tuple(places))
        if "fp32" not in found:
            raise ValueError(f"No rank's file has the elements of {name!r}. {_COPY} [ZERO-621]")
        return found

    @staticmethod
    def _state(rank: Any, place: int) -> dict[str, Any]:
        base = rank["base_optimizer_state"]
        states = base["state"].get(place, {}) if isinstance(base, dict) else base[place]
        return {key: value for key, value in states.items() if value is not None}


class _Universal:
    """The folder ``zero`` of the universal format: a folder for each parameter, a file for each state."""

    def __init__(self, reader: _Reader) -> None:
        self._reader = reader
        self.common = reader.load("zero/optimizer_state.pt")
        self.groups = self.common.get("param_groups") or ()

    def values(self, name: str, shape: tuple[int, ...]) -> dict[str, Any]:
        _check_folder_name(name)
        found: dict[str, Any] = {}
        for file in _names(self._reader.folder / "zero" / name):
            if not file.endswith(".pt"):
                continue
            key = file.removesuffix(".pt")
            value = self._reader.load(f"zero/{name}/{file}")
            if isinstance(value, dict):
                param = value["param"]
                if math.prod(param.shape) != math.prod(shape):
                    raise ValueError(
                        f"Expected {key} of {name!r} with shape {shape}, got {param.shape}. {_COPY} [ZERO-621]"
                    )
                value = RawTensor(shape, param.dtype, param.spans)
            found[key] = value
        if "fp32" not in found:
            raise ValueError(
                f"Expected fp32.pt of {name!r} in {self._reader.folder / 'zero'}, got none. {_COPY} [ZERO-621]"
            )
        return found


def _slice(name: str, address: Any) -> tuple[int, int]:
    begin, count = address.attributes["start"], address.attributes["numel"]
    if type(begin) is not int or type(count) is not int:
        raise TypeError(f"Expected the place of {name!r}, got {address.attributes!r:.200}. [ZERO-621]")
    return begin, count


def _deals_round_robin(config: Any) -> bool:
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return isinstance(zero, dict) and bool(zero.get("round_robin_gradients"))


def _loss_scale(scaler: Any) -> dict[str, float] | None:
    """The state of a dynamic scaler in the terms of `ddp_zero.DynamicLossScale`, as near as possible."""
    if not isinstance(scaler, Inert) or scaler.name != "DynamicLossScaler":
        return None
    has = scaler.attributes
    window = max(1, int(has["scale_window"]))
    since = int(has["cur_iter"]) - int(has["last_overflow_iter"]) - 1
    good_steps = (since - 1) % window if since > 0 else 0
    return {"value": float(has["cur_scale"]), "good_steps": good_steps, "patience": int(has["cur_hysteresis"])}


def _extra(model: dict[str, Any], scaler: Any) -> dict[str, Any]:
    kept = ("lr_scheduler", "global_steps", "global_samples", "skipped_steps", "ds_config", "ds_version")
    return {
        **{key: _without_classes(model.get(key)) for key in kept},
        "loss_scaler": _without_classes(scaler),
        "client_state": {key: _without_classes(value) for key, value in model.items() if key not in _OWN},
    }


def _without_classes(value: Any) -> Any:
    """Objects of known classes as dicts of their attributes."""
    if isinstance(value, Inert):
        return _without_classes(value.attributes)
    if isinstance(value, dict):
        return {key: _without_classes(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_classes(item) for item in value)
    return value


def _check_folder_name(name: str) -> None:
    if "/" in name or name in ("", ".", ".."):
        raise ValueError(f"Expected the name of a parameter that can be the name of a folder, got {name!r}. [ZERO-621]")


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# Writing


def write_universal(
    root: Path,
    tag: str,
    params: Iterable[tuple[str, Mapping[str, Any]]],
    groups: Sequence[Mapping[str, Any]],
    module: Mapping[str, Tensor],
    others: Mapping[str, Any],
) -> Path:
    """Write a checkpoint as ``root/tag``, and finally its name to ``root/latest_universal``. Returns the folder.

    ``root`` exists; FileExistsError if ``tag`` does. ``params`` are names of trainable parameters, one at a time, with
    ``fp32`` and states of the parameter's shape, and ``step`` if there is one; ``module`` has the model's values by
    name, and ``others`` further entries of its file, such as ``global_steps``.
    """
    folder = root / tag
    (folder / "zero").mkdir(parents=True)
    shapes: dict[str, torch.Size] = {}
    steps: dict[str, Any] = {}
    for name, values in params:
        _check_folder_name(name)
        (folder / "zero" / name).mkdir()
        shapes[name] = values["fp32"].shape
        for key, value in values.items():
            _save(value if key == "step" else {"param": value}, folder / "zero" / name / f"{key}.pt")
        steps[name] = values.get("step")
    numbered = [_number_params(group, steps) for group in groups]
    _save({"param_groups": numbered, "ds_version": VERSION, "overflow": False}, folder / "zero" / "optimizer_state.pt")
    param_shapes = [OrderedDict((name, shapes[name]) for name in group["params"]) for group in groups]
    sizes = {"dp_world_size": 1, "mp_world_size": 1}
    state = {"module": OrderedDict(module), "param_shapes": param_shapes, "optimizer": None, **sizes, **others}
    _save({**state, "ds_version": VERSION}, folder / MODEL_FILE)
    (root / _LATEST_UNIVERSAL).write_text(tag, encoding="utf-8")
    return folder


def _number_params(group: Mapping[str, Any], steps: Mapping[str, Any]) -> dict[str, Any]:
    """A group with numbers for parameters, and its step where DeepSpeed's own Adam looks for it."""
    found = [step for name in group["params"] if (step := steps[name]) is not None]
    step = {"step": int(max(float(one) for one in found))} if found else {}
    return {**group, **step, "params": list(range(len(group["params"])))}


def _save(value: Any, path: Path) -> None:
    with written(path, "xb") as file:
        torch.save(value, file)
