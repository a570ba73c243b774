"""Loading a checkpoint into a model and an optimizer: first check that it fits and is undamaged, then change them.

Names, shapes and dtypes are matched without tensors. Every misfit becomes a line that a person can act on; a strict
load raises with all lines, a lenient one skips the misfits.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_zero.checkpoint.rows import SavedCheckpoint
from ddp_zero.checkpoint.tensor_file import StoredTensor, read, read_into, stored_in, total_bytes, verify
from ddp_zero.checkpoint.view import OptimizerState, View
from ddp_zero.core.comm import Peers
from ddp_zero.core.local import MASTER_KEY, rounds_to, suboptimizer_for
from ddp_zero.parallel.names import rename_all
from ddp_zero.parallel.placement import group_options, load_group, same_class
from ddp_zero.parallel.whole_model import PartModel
from ddp_zero.tools.files import showing
from ddp_zero.values import Value, by_group, check_declared, fill, is_extra, restore, state_of_part


class DoesNotFitError(ValueError):
    """A checkpoint of a different model or optimizer."""


@dataclass
class Fit:
    """The parts of a checkpoint that can be loaded."""

    values: list[str] = field(default_factory=list)  # names of the model whose saved value fits
    # for each group of the optimizer, the saved group whose options it takes, or None
    groups: list[int | None] = field(default_factory=list)
    states: list[str] = field(default_factory=list)  # names of the optimizer's parameters that take their saved state
    misfits: list[str] = field(default_factory=list)  # a line for each misfit
    notes: list[str] = field(default_factory=list)  # a line for each expected difference


class Restore:
    """The assignment of a checkpoint's contents to a model and an optimizer; changes nothing until `carry_out`.

    ``elsewhere`` are names that only other ranks hold. ``checks`` is False if the caller has just compared all
    checksums: they are not computed again. Raises ValueError with a list of all misfits if the load is strict, or for a
    value that fits by name but cannot be loaded.
    """

    def __init__(
        self,
        saved: SavedCheckpoint,
        view: View,
        rename: Mapping[str, str],
        strict: bool,
        elsewhere: Collection[str] = (),
        checks: bool = True,
    ) -> None:
        self.fit = Fit()
        self._saved, self._live, self._optimizer, self._checks = saved, view.live, view.state, checks
        self._names = view.names
        self._device = torch.device("cpu") if view.state is None else view.state.device()
        self._targets = [] if view.state is None else [*map(view.state.target, range(len(view.names)))]
        self._values: dict[str, StoredTensor] = {}  # stored tensor for each tensor of the model, by name
        self._extra_states: dict[str, Any] = {}  # module state that is not a tensor, by name
        # after the load: states by index, in the order of the unsharded optimizer; state of no parameter; groups
        self._states: dict[int, dict[Any, Any]] = {}
        self._other_state: dict[str, Any] = {}
        self._groups: list[dict[str, Any]] = []
        names = {name: name for name in [*saved.model, *saved.names()]}
        live = view.live
        if rename:
            names = rename_all(names, rename, "rename=", "the checkpoint")
        known = {*live.values(), *elsewhere}
        tied = {names[alias]: names[name] for alias, name in saved.shared.aliases.items()}
        gone = {alias: name for alias, name in tied.items() if alias not in known and name in known}
        self._note("{!r} is left out: it was tied to {!r}, which is there", gone.items())
        left_out = {*elsewhere, *gone}
        entries = {names[name]: entry for name, entry in saved.model.items() if names[name] not in left_out}
        self._place_values(entries)
        if view.state is not None:
            first = {name: live.aliases.get(new, new) for name, new in names.items()}  # as the optimizer names them
            self._place_groups(view.state, first)
            self._place_states({first[name]: state for name, state in saved.state.items()}, entries, view.state)
        if strict and self.fit.misfits:
            raise DoesNotFitError(
                f"Expected {saved.folder} to fit the model and the optimizer, got{list_lines(self.fit.misfits)}\n"
                "checkpoint.load() takes rename= for names that have changed, and strict=False to load what fits. "
                "[ZERO-615]"
            )
        if view.state is not None:
            view.state.check_fits(self._state_dict(view.state, _as_meta))

    def _note(self, line: str, values: Iterable[tuple[Any, ...]]) -> None:
        self.fit.notes += [line.format(*row) for row in values]

    def _place_values(self, entries: Mapping[str, Any]) -> None:
        """Assign the model's values: tied values may be saved once; frozen parameters may have been left out."""
        live = self._live
        values = self._live.values()
        fit = self.fit
        tied = {alias: name for alias, name in live.aliases.items() if alias not in entries and name in entries}
        self._note("{!r} is loaded as {!r}, to which it is tied", tied.items())
        frozen = {name for name in values if isinstance(live.tensor(name), Parameter)} - set(live.trainable)
        kept = sorted(frozen - entries.keys() - tied.keys()) if self._saved.shared.excludes_frozen else []
        self._note("{!r} keeps its value: it is frozen and not saved", zip(kept))
        wanted = {name: value for name, value in values.items() if name not in {*tied, *kept}}
        fit_values({name: _value_in(name, entry) for name, entry in entries.items()}, wanted, fit)
        for name in fit.values:
            first = live.aliases.get(name)
            if first is not None:
                if first in entries and entries[first] != entries[name]:
                    fit.misfits.append(f"{name!r} is tied to {first!r} in the model, saved are two values")
            elif values[name].shape is None:
                self._extra_states[name] = entries[name]
            else:
                self._values[name] = self._local_chunk(name, entries[name], entries[name])

    def _local_chunk(self, name: str, whole: Any, value: Any) -> Any:
        """This rank's chunk of a saved value, or of a state of the value's shape."""
        chunk = self._live.chunk(name)
        if chunk is None or not isinstance(value, StoredTensor) or not isinstance(whole, StoredTensor):
            return value
        fits = value.spec.shape == whole.spec.shape and chunk.is_within(whole.spec.shape)
        return value.within(chunk) if fits else value

    def _place_groups(self, optimizer: OptimizerState, first: Mapping[str, str]) -> None:
        """Match saved groups with groups of the optimizer by the names of parameters, and choose options to load."""
        fit, shared, param_groups = self.fit, self._saved.shared, optimizer.optimizer.param_groups
        live_groups = by_group(self._names, param_groups)
        if not self._saved.is_of(optimizer.class_name):
            was = "no optimizer" if shared.optimizer is None else shared.optimizer
            fit.misfits.append(f"the optimizer is {optimizer.class_name}, saved is {was}")
            fit.groups = [None] * len(live_groups)
            self._other_state = optimizer.other_state()
        else:
            self._other_state = shared.other_state
            saved_groups = [[first[name] for name in group["params"]] for group in shared.param_groups]
            was_trainable = {first.get(name, name) for name in shared.trainable}
            fit_groups(saved_groups, live_groups, was_trainable, set(self._live.trainable), fit)
            if len(saved_groups) == len(live_groups) and not isinstance(self._live, PartModel):
                empty = {place for place, names in enumerate(saved_groups) if not (names or live_groups[place])}
                fit.groups = [place if place in empty else source for place, source in enumerate(fit.groups)]
        if shared.loss_scale is not None and optimizer.scale() is None:
            fit.misfits.append("the saved dynamic loss scale has no place: the optimizer has none")
        indices = iter(range(len(optimizer.table)))
        for group, source in zip(param_groups, fit.groups, strict=True):
            loaded = self._with_options(optimizer, group, source)
            self._groups.append({**loaded, "params": [next(indices) for _ in group["params"]]})

    def _with_options(self, optimizer: OptimizerState, group: Mapping[str, Any], source: int | None) -> dict[str, Any]:
        """A group with the options of a saved group."""
        options = group_options(group if source is None else self._saved.shared.param_groups[source])
        if self._saved.foreign is not None:  # options of a different class of the same kind
            options = group_options(group) | {key: value for key, value in options.items() if key in group}
        for key, value in options.items():
            if len({_kind(value), _kind(group.get(key))} - {"None"}) > 1:
                raise ValueError(
                    f"Expected option {key!r} to be a {_kind(group[key])}, got a {_kind(value)}. Give the "
                    "class this option in the form that was saved. [ZERO-615]"
                )
        return load_group(group, options, suboptimizer_for(optimizer.inner, group).defaults)

    def fill_empty_groups(self, peers: Peers) -> None:
        """Load the options of groups that have parameters on other ranks alone. A collective.

        Ranks of a mesh build as many groups as each other, some of them without parameters; those of experts apart. One
        of another class is not the same group: a rank has left out a group that it has no parameters of.
        """
        optimizer = self._optimizer
        places = [] if optimizer is None else optimizer.common_groups()
        local_sources = [self.fit.groups[place] for place in places]
        gathered = [json.loads(text) for text in peers.all_gather_text(json.dumps(local_sources))]
        alike = [sources for sources in gathered if len(sources) == len(local_sources)]
        for number, place in enumerate(places):
            group = self._groups[place]
            sources = {sources[number] for sources in alike} - {None}
            if optimizer is None or group["params"] or len(sources) != 1:
                continue
            source = sources.pop()
            if same_class(group, self._saved.shared.param_groups[source]):
                self._groups[place] = self._with_options(optimizer, group, source) | {"params": []}

    def _place_states(
        self, saved: Mapping[str, Mapping[Any, Any]], entries: Mapping[str, Any], optimizer: OptimizerState
    ) -> None:
        """Assign states, in their saved order; a fp32 master is the more exact value if dtypes have changed."""
        places = {name: place for place, name in enumerate(saved)}
        fits = set(self.fit.states)
        table = optimizer.table
        for index in sorted(range(len(self._names)), key=lambda index: places.get(self._names[index], len(places))):
            name = self._names[index]
            param = table.params[index]
            whole = table.wholes.get(index)
            state = {}
            for key, saved_value in saved.get(name, {}).items() if name in fits else ():
                if whole is None or key == MASTER_KEY:  # masters are of parts even of a parameter that is stepped whole
                    state[key] = self._local_chunk(name, entries.get(name), saved_value)
                elif whole.steps_here:
                    state[key] = saved_value
            value = self._values.get(name)
            master = state.pop(MASTER_KEY, None)
            has_master = isinstance(master, StoredTensor) and master.spec.shape == tuple(param.shape)
            is_converted = value is not None and value.spec.dtype != param.dtype
            if has_master and is_converted:
                self._values[name] = master
            if self._targets[index].has_master:
                if has_master or is_converted:
                    state[MASTER_KEY] = master if has_master else value
                elif value is not None and name in fits:
                    self.fit.misfits.append(f"{name!r} has a master weight, saved is none")
            elif has_master and not is_converted:
                self.fit.misfits.append(f"the saved master weight of {name!r} has no place: the optimizer keeps none")
            if state:
                self._states[index] = state

    def _state_dict(self, optimizer: OptimizerState, fill_with: Callable[[StoredTensor], Tensor]) -> dict[str, Any]:
        """The state dict to load, of this rank's parts, with ``fill_with`` of each stored tensor."""
        states = dict[Any, Any]()
        loaded_here = set(optimizer.loaded_indices())
        for index in filter(loaded_here.__contains__, self._states):
            # at once, so that one parameter alone is in memory whole
            states[index] = state_of_part(
                restore(fill(self._states[index], StoredTensor, fill_with)),
                optimizer.table.params[index],
                self._targets[index].part,
            )
        groups = [dict(group) for group in self._groups]
        for group in groups:
            group.update(restore(fill(group_options(group), StoredTensor, fill_with)))
        scale = self._saved.shared.loss_scale
        scale_entry = {} if scale is None else {"loss_scale": scale}
        other_state = restore(fill(self._other_state, StoredTensor, fill_with))
        return {"state": {**other_state, **states}, "param_groups": groups, **scale_entry}

    def verify(self, peers: Peers) -> None:
        """Check that all data to be read is present and undamaged, each rank a share; ValueError names the file."""
        saved = self._saved
        trees: list[Any] = [self._values, self._extra_states, self._states, self._groups]
        if isinstance(self._live, PartModel):  # ranks need different chunks: all are shared out
            trees = [saved.model, saved.state, saved.shared.param_groups]
        stored = stored_in([*trees, saved.shared.extra, *saved.rank_extras, self._other_state]) if self._checks else []
        labels = {f"{name!r} of the model": entry for name, entry in saved.model.items()}
        for name, state in saved.state.items():
            labels |= {f"state {key!r} of {name!r}": value for key, value in state.items()}
        named = [
            (name, stored_tensor) for name, stored_tensor in labels.items() if isinstance(stored_tensor, StoredTensor)
        ]
        name_of = {span: name for name, stored_tensor in named for _, span in stored_tensor.chunks}
        rank = peers.group_rank
        verify(saved.folder, stored, name_of, share=slice(rank, None, peers.world_size), shows=rank == 0)
        check_declared([self._extra_states, self._states, self._other_state, self._groups])
        if self._optimizer is None:
            return
        # parameters equal their rounded masters, or the first step would undo the load
        for index in self._optimizer.loaded_indices():
            param = self._optimizer.table.params[index]
            name = self._names[index]
            master = self._states.get(index, {}).get(MASTER_KEY)
            value = self._values.get(name)
            if master is None or value is None or master == value:
                continue
            rounded, as_saved = (
                self._read(stored_tensor).to(param.dtype) for stored_tensor in (master, value)
            )  # as read later
            if not rounds_to(rounded, as_saved):
                raise ValueError(
                    f"Expected {name!r} to be its saved master weight rounded, got a different value. [ZERO-606]"
                )

    def carry_out(self, shows: bool) -> None:
        """Read everything into place, a tensor at a time; user code runs first, since it may raise."""
        optimizer, folder = self._optimizer, self._saved.folder
        loaded_here = [] if optimizer is None else optimizer.loaded_indices()
        states = {index: self._states[index] for index in loaded_here if index in self._states}
        stored = stored_in([self._values, self._extra_states, states, self._groups, self._other_state])
        with showing(f"loading {folder.name}", total_bytes(stored), shows):
            self._live.load_extra(restore(fill(self._extra_states, StoredTensor, self._read)))
            # a state belongs to its value: if that is not loaded, both are kept
            present = {} if optimizer is None else optimizer.state()
            unloaded = [index for index in loaded_here if self._names[index] not in self._values and index in present]
            self._states.update({index: present[index] for index in unloaded})
            for name, stored_tensor in self._values.items():
                target = self._live.tensor(name)
                assert target is not None, "fits a tensor"
                read_into(folder, stored_tensor, target, self._checks)
            if optimizer is None:
                return
            for index, state in self._states.items():
                master = self._targets[index].master
                if master is not None and isinstance(state.get(MASTER_KEY), StoredTensor):
                    # directly into the live one, which then replaces it in the state
                    read_into(folder, state[MASTER_KEY], master, self._checks)
                    state[MASTER_KEY] = master.detach()
            del present
            optimizer.load(lambda: self._state_dict(optimizer, self._read), list(self._states))
            optimizer.optimizer.zero_grad()

    def _read(self, stored: StoredTensor, device: torch.device | None = None) -> Tensor:
        return read(self._saved.folder, stored, device or self._device, self._checks)

    def read_extra(self, tree: Any) -> Any:
        """Read the user's state, to the CPU."""
        return restore(fill(tree, StoredTensor, lambda stored: self._read(stored, torch.device("cpu"))))


def _as_meta(stored: StoredTensor) -> Tensor:
    return torch.empty(stored.spec.shape, dtype=stored.spec.dtype, device="meta")


def _kind(value: Any) -> str:
    if isinstance(value, StoredTensor | Tensor | int | float):
        return "number"
    return "list" if isinstance(value, tuple | list) else "None" if value is None else type(value).__name__


def _value_in(name: str, entry: Any) -> Value:
    if not isinstance(entry, StoredTensor) or is_extra(name):
        return Value(None, None)
    return Value(entry.spec.shape, str(entry.spec.dtype).removeprefix("torch."))


# Matching


def fit_values(saved: Mapping[str, Value], live: Mapping[str, Value], fit: Fit) -> None:
    """Match a model's values by name and shape; a different dtype is a misfit, which a lenient load converts."""
    for name, value in live.items():
        if name not in saved:
            fit.misfits.append(f"{name!r} of the model is not in the checkpoint")
        elif saved[name].shape != value.shape:
            fit.misfits.append(f"{name!r} has shape {_show(value.shape)}, saved is {_show(saved[name].shape)}")
        else:
            fit.values.append(name)
            if saved[name].dtype != value.dtype:
                fit.misfits.append(f"{name!r} has dtype {value.dtype}, saved is {saved[name].dtype}")
    fit.misfits += [f"{name!r} of the checkpoint is not in the model" for name in saved if name not in live]


def fit_groups(
    saved: Sequence[Sequence[str]],
    live: Sequence[Sequence[str]],
    was_trainable: Collection[str],
    is_trainable: Collection[str],
    fit: Fit,
) -> None:
    """Match the groups and states of an optimizer by the names of their parameters, after `fit_values`.

    A parameter may be on one side only if it was or is frozen; any other difference is a misfit. Parameters whose
    values do not fit are not reported again.
    """
    values = set(fit.values)
    group_of = {name: position for position, names in enumerate(saved) for name in names}
    for position, names in enumerate(live):
        known = Counter(group_of[name] for name in names if name in group_of and name in values)
        fit.groups.append(min(known, key=lambda one: (-known[one], one)) if known else None)
        if len(known) > 1:
            fit.misfits.append(f"group {position} has parameters of the saved groups {sorted(known)}")
        if not known and names:
            fit.notes.append(f"group {position} keeps its options: the saved optimizer has none of its parameters")
        for name in names:
            if name in values and name in group_of:
                fit.states.append(name)
            elif name in values and name in was_trainable:
                fit.misfits.append(f"{name!r} of the optimizer is not in the saved one")
            elif name in values:
                fit.notes.append(f"{name!r} starts without state: it was frozen and not in the optimizer")
    here = {name for names in live for name in names}
    for name in group_of:
        if name not in here and name in values:
            if name in is_trainable:
                fit.misfits.append(f"{name!r} of the saved optimizer is not in this one")
            else:
                fit.notes.append(f"the state of {name!r} is left out: it is frozen and not in the optimizer")


def list_lines(lines: Sequence[str], most: int = 20) -> str:
    """Lines as a list for a message: at most the first ``most``, then how many remain."""
    shown = [f"\n  - {line}" for line in lines[:most]]
    return "".join(shown) + (f"\n  and {len(lines) - most} more" if len(lines) > most else "")


def _show(shape: Sequence[int] | None) -> str:
    return "none: it is no tensor" if shape is None else str(list(shape))
