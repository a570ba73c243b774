"""Loading a checkpoint into a model and an optimizer: first check that it fits and is undamaged, then change them.

Names, shapes and dtypes are matched without tensors. Every misfit becomes a line that a person can act on; a strict
load raises with all lines, a lenient one skips the misfits.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ddp_zero.checkpoint.contents import SavedCheckpoint
from ddp_zero.checkpoint.folder import StoredTensor, as_meta, as_written, fill, stored_in, total_bytes, within
from ddp_zero.checkpoint.optimizers import OptimizerState
from ddp_zero.checkpoint.tensor_file import read, read_into, verify
from ddp_zero.core.comm.groups import Peers
from ddp_zero.core.local.inner import group_options, loaded_group, other_state, part_for
from ddp_zero.core.local.live_model import LiveModel, PartModel, by_group, is_extra
from ddp_zero.core.local.parameters import MASTER_KEY, SteppedWhole, rounds_to
from ddp_zero.core.plan.global_layout import renamed
from ddp_zero.core.plan.partition import partition_greedy
from ddp_zero.core.plan.shapes import Value
from ddp_zero.tools.record.progress import showing


@dataclass
class Fit:
    """The parts of a checkpoint that can be loaded."""

    values: list[str] = field(default_factory=list)  # names of the model whose saved value fits
    # for each group of the optimizer, the saved group whose options it takes, or None
    groups: list[int | None] = field(default_factory=list)
    states: list[str] = field(default_factory=list)  # names of the optimizer's parameters that take their saved state
    misfits: list[str] = field(default_factory=list)  # a line for each misfit
    notes: list[str] = field(default_factory=list)  # a line for each expected difference


@dataclass
class Restore:
    """The assignment of a checkpoint's contents to a model and an optimizer."""

    saved: SavedCheckpoint
    live: LiveModel
    optimizer: OptimizerState | None
    fit: Fit = field(default_factory=Fit)  # the parts that fit
    values: dict[str, StoredTensor] = field(default_factory=dict)  # stored tensor for each tensor of the model, by name
    extra_states: dict[str, Any] = field(default_factory=dict)  # module state that is not a tensor, by name
    names: list[str] = field(default_factory=list)  # names of the optimizer's parameters, by index
    # state of each of them, by index, in the order of the unsharded optimizer
    states: dict[int, dict[Any, Any]] = field(default_factory=dict)
    # the optimizer's state after the load that belongs to no parameter
    other_state: dict[str, Any] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)  # the optimizer's groups after the load
    is_verified: bool = False  # True if the caller has just compared all checksums: they are not computed again

    @classmethod
    def plan(
        cls,
        saved: SavedCheckpoint,
        live: LiveModel,
        optimizer: OptimizerState | None,
        rename: Mapping[str, str],
        strict: bool,
        elsewhere: Collection[str] = (),
        is_verified: bool = False,
    ) -> "Restore":
        """Match names, shapes and dtypes; changes nothing. ``elsewhere`` are names that only other ranks hold.

        Raises ValueError with a list of all misfits if the load is strict, or for a value that fits by name but cannot
        be loaded.
        """
        plan = cls(saved, live, optimizer, is_verified=is_verified)
        shared = saved.shared
        groups = [group["params"] for group in shared.param_groups]
        saved_names = dict.fromkeys([*saved.model, *(name for group in groups for name in group)])
        if rename:
            names = renamed(saved_names, rename, "rename=", "the checkpoint")
        else:
            names = {name: name for name in saved_names}
        known = {*live.values(), *elsewhere}
        second = {names[alias]: names[name] for alias, name in shared.aliases.items()}
        gone = {alias: name for alias, name in second.items() if alias not in known and name in known}
        plan.fit.notes += [
            f"{alias!r} is left out: it was tied to {name!r}, which is there" for alias, name in gone.items()
        ]
        left_out = {*elsewhere, *gone}
        entries = {names[name]: entry for name, entry in saved.model.items() if names[name] not in left_out}
        first = {name: live.aliases.get(new, new) for name, new in names.items()}  # the names that the optimizer uses
        wholes = plan._stepped_whole()
        states = {
            first[name]: plan._own_state(first[name], entries.get(first[name]), state, wholes.get(first[name]))
            for name, state in saved.state.items()
        }
        fit_values({name: _value_in(name, entry) for name, entry in entries.items()}, plan._wanted(entries), plan.fit)
        plan._place_values(entries)
        if optimizer is not None:
            plan._place_states(optimizer, [[first[name] for name in group] for group in groups], states, first)
        if strict and plan.fit.misfits:
            raise ValueError(
                f"Expected {saved.folder} to fit the model and the optimizer, got{listed(plan.fit.misfits)}\nPass "
                "rename= for names that have changed, or strict=False to load what fits. [ZERO-615]"
            )
        if optimizer is not None:
            optimizer.check_fits(plan._state_dict(as_meta))
        return plan

    def _wanted(self, entries: Mapping[str, Any]) -> Mapping[str, Value]:
        """The model's values that must be saved: tied ones once; frozen parameters may have been left out."""
        values, trainable = self.live.values(), set(self.live.trainable)
        second = [alias for alias, name in self.live.aliases.items() if alias not in entries and name in entries]
        self.fit.notes += [
            f"{alias!r} is loaded as {self.live.aliases[alias]!r}, to which it is tied" for alias in second
        ]
        values = {name: value for name, value in values.items() if name not in second}
        if not self.saved.shared.excludes_frozen:
            return values
        kept = {
            name
            for name in values
            if name not in entries and isinstance(self.live.tensor(name), Parameter) and name not in trainable
        }
        self.fit.notes += [f"{name!r} keeps its value: it is frozen and not saved" for name in sorted(kept)]
        return {name: value for name, value in values.items() if name not in kept}

    def _place_values(self, entries: Mapping[str, Any]) -> None:
        for name in self.fit.values:
            first = self.live.aliases.get(name)
            if first is not None:
                if first in entries and entries[first] != entries[name]:
                    self.fit.misfits.append(f"{name!r} is tied to {first!r} in the model, saved are two values")
            elif isinstance(entries[name], StoredTensor) and not is_extra(name):
                self.values[name] = self._held(name, entries[name], entries[name])
            else:
                self.extra_states[name] = entries[name]

    def _stepped_whole(self) -> dict[str, SteppedWhole]:
        """Parameters of which this rank holds a part and some rank steps the whole, by name."""
        table = None if self.optimizer is None else self.optimizer.table
        if table is None or not table.wholes:
            return {}
        names = self.live.names_of(table)
        return {names[index]: whole for index, whole in table.wholes.items()}

    def _own_state(self, name: str, entry: Any, state: Mapping[Any, Any], whole: SteppedWhole | None) -> dict[Any, Any]:
        """This rank's share of a saved state: of its box, or all of it where the whole is stepped, and none elsewhere.

        Masters are of parts in any case.
        """
        if whole is None:
            return {key: self._held(name, entry, value) for key, value in state.items()}
        mine = {key: value for key, value in state.items() if whole.is_here or key == MASTER_KEY}
        return {key: self._held(name, entry, value) if key == MASTER_KEY else value for key, value in mine.items()}

    def _held(self, name: str, whole: Any, value: Any) -> Any:
        """This rank's box of a saved value, or of a state of the value's shape."""
        box = self.live.box(name)
        if box is None or not isinstance(value, StoredTensor) or not isinstance(whole, StoredTensor):
            return value
        fits = value.spec.shape == whole.spec.shape and box.is_within(whole.spec.shape)
        return within(value, box) if fits else value

    def _place_states(
        self,
        optimizer: OptimizerState,
        saved_groups: list[list[str]],
        states: Mapping[str, dict[Any, Any]],
        first: Mapping[str, str],
    ) -> None:
        fit, shared = self.fit, self.saved.shared
        names = self.names = self.live.names_of(optimizer.table)
        live_groups = by_group(names, optimizer.optimizer.param_groups)
        if not self.saved.is_of(optimizer.class_name):
            was = "no optimizer" if shared.optimizer is None else shared.optimizer
            fit.misfits.append(f"the optimizer is {optimizer.class_name}, saved is {was}")
            fit.groups = [None] * len(live_groups)
            self.other_state = other_state(optimizer.inner)
        else:
            self.other_state = shared.other_state
            was_trainable = {first.get(name, name) for name in shared.trainable}
            fit_groups(saved_groups, live_groups, was_trainable, set(self.live.trainable), fit)
        if (shared.loss_scale is not None) and optimizer.scale() is None:
            fit.misfits.append("the saved dynamic loss scale has no place: the optimizer has none")
        fits = set(fit.states)
        for index, name in enumerate(names):
            self._place_state(index, name, optimizer, states.get(name, {}) if name in fits else {})
        places = {name: place for place, name in enumerate(states)}
        in_saved_order = sorted(self.states, key=lambda index: places.get(names[index], len(places)))
        self.states = {index: self.states[index] for index in in_saved_order}
        for group, source in zip(optimizer.optimizer.param_groups, fit.groups, strict=True):
            if source is None:
                self.groups.append(dict(group))
                continue
            options = group_options(shared.param_groups[source])
            if self.saved.foreign is not None:  # options of a different class of the same kind
                options = group_options(group) | {key: value for key, value in options.items() if key in group}
            _check_options(options, group)
            self.groups.append(loaded_group(group, options, part_for(optimizer.inner, group).defaults))

    def _place_state(self, index: int, name: str, optimizer: OptimizerState, state: Mapping[Any, Any]) -> None:
        """Assign the state of one parameter; its fp32 master is the more exact value if dtypes have changed."""
        param = optimizer.table.params[index]
        state, value = dict(state), self.values.get(name)
        master = state.pop(MASTER_KEY, None)
        has_master = isinstance(master, StoredTensor) and master.spec.shape == tuple(param.shape)
        is_converted = value is not None and value.spec.dtype != param.dtype
        if has_master and is_converted:
            self.values[name] = master
        if optimizer.wants_master(index):
            if has_master or is_converted:
                state[MASTER_KEY] = master if has_master else value
            elif value is not None and name in self.fit.states:
                self.fit.misfits.append(f"{name!r} has a master weight, saved is none")
        elif has_master and not is_converted:
            self.fit.misfits.append(f"the saved master weight of {name!r} has no place: the optimizer keeps none")
        if state:
            self.states[index] = state

    def _state_dict(self, fill_with: Any) -> dict[str, Any]:
        assert self.optimizer is not None, "called only with an optimizer"
        kept = set(self.optimizer.kept())
        own_part = self.optimizer.own_part  # of one parameter at a time, so that only one is in memory whole
        states = {i: own_part(i, fill(state, fill_with)) for i, state in self.states.items() if i in kept}
        counted = iter(range(len(self.optimizer.table)))
        groups = [
            {**fill(group_options(group), fill_with), "params": [next(counted) for _ in group["params"]]}
            | ({"param_names": list(group["param_names"])} if "param_names" in group else {})
            for group in self.groups
        ]
        saved_scale = self.saved.shared.loss_scale
        scale = {} if saved_scale is None else {"loss_scale": saved_scale}
        return {"state": {**fill(self.other_state, fill_with), **states}, "param_groups": groups, **scale}

    # Verification

    def verify(self, peers: Peers) -> None:
        """Check that all data to be read is present and undamaged, each rank a share; ValueError names the file."""
        if not self.is_verified:
            self._verify_checksums(peers)
        self._verify_masters()

    def _verify_checksums(self, peers: Peers) -> None:
        extras = [self.saved.shared.extra, *self.saved.rank_extras]
        trees = [self.values, self.extra_states, self.states, self.groups, self.other_state, extras]
        if isinstance(self.live, PartModel):  # ranks need different ones: all are shared out
            trees = [self.saved.model, self.saved.state, self.saved.shared.param_groups, self.other_state, extras]
        needed = as_written(stored_in(trees))
        owners = partition_greedy([stored.nbytes for stored in needed], peers.world_size)
        mine = [stored for stored, owner in zip(needed, owners, strict=True) if owner == peers.group_rank]
        with showing(f"checking {self.saved.folder.name}", total_bytes(mine), peers.group_rank == 0):
            verify(self.saved.folder, mine, self._names_of_stored())

    def _names_of_stored(self) -> dict[StoredTensor, str]:
        named = [(f"{name!r} of the model", entry) for name, entry in self.saved.model.items()]
        for name, state in self.saved.state.items():
            named += [(f"state {key!r} of {name!r}", value) for key, value in state.items()]
        return {written: name for name, entry in named for written in as_written(stored_in(entry))}

    def _verify_masters(self) -> None:
        """Check that parameters equal their rounded masters; otherwise the first step would undo the load."""
        if self.optimizer is None:
            return
        for index in self.optimizer.kept():
            param, name = self.optimizer.table.params[index], self.names[index]
            master, value = self.states.get(index, {}).get(MASTER_KEY), self.values.get(name)
            if master is None or value is None or master == value:
                continue
            rounded, as_saved = (self._read(stored).to(param.dtype) for stored in (master, value))  # as read later
            if not rounds_to(rounded, as_saved):
                raise ValueError(
                    f"Expected {name!r} to be its saved master weight rounded, got a different value. [ZERO-606]"
                )

    # Changing the model and the optimizer

    def bytes_to_read(self) -> int:
        """Bytes that `carry_out` reads on this rank."""
        kept = () if self.optimizer is None else self.optimizer.kept()
        states = {index: self.states[index] for index in kept if index in self.states}
        return total_bytes(stored_in([self.values, self.extra_states, states, self.groups, self.other_state]))

    def carry_out(self) -> None:
        """Read everything into place, a tensor at a time; user code runs first, since it may raise."""
        self.live.load_extra(fill(self.extra_states, self._read))
        if self.optimizer is not None:
            self._keep_states(self.optimizer)
        for name, stored in self.values.items():
            target = self.live.tensor(name)
            assert target is not None, "fits a tensor"
            read_into(self.saved.folder, stored, target, not self.is_verified)
        if self.optimizer is not None:
            self._read_masters(self.optimizer)
            self.optimizer.drop()  # before the new one is read, so that two are never in memory
            self.optimizer.load(self._state_dict(self._read), list(self.states))
            self.optimizer.optimizer.zero_grad()

    def _read_masters(self, optimizer: OptimizerState) -> None:
        """Read saved masters directly into the live ones, which then replace them in the state."""
        for index, state in self.states.items():
            master = optimizer.master(index)
            if master is not None and MASTER_KEY in state:
                read_into(self.saved.folder, state[MASTER_KEY], master, not self.is_verified)
                state[MASTER_KEY] = master.detach()

    def _keep_states(self, optimizer: OptimizerState) -> None:
        """Keep the state of parameters whose value is not loaded: a state belongs to its value."""
        present = optimizer.state()
        for index in optimizer.kept():
            if self.names[index] not in self.values and index in present:
                self.states[index] = present[index]

    def _read(self, stored: StoredTensor) -> Tensor:
        device = torch.device("cpu") if self.optimizer is None else self.optimizer.device()
        return read(self.saved.folder, stored, device, not self.is_verified)

    def read_extra(self, tree: Any) -> Any:
        """Read the user's state, to the CPU."""
        checks = not self.is_verified
        return fill(tree, lambda stored: read(self.saved.folder, stored, torch.device("cpu"), checks))


def _check_options(saved: Mapping[str, Any], live: Mapping[str, Any]) -> None:
    for key, value in saved.items():
        kinds = {_kind(value), _kind(live.get(key))}
        if len(kinds - {"None"}) > 1:
            raise ValueError(f"Expected option {key!r} to be a {_kind(live[key])}, got a {_kind(value)}. [ZERO-615]")


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
            fit.misfits.append(f"{name!r} has shape {_shown(value.shape)}, saved is {_shown(saved[name].shape)}")
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


def listed(lines: Sequence[str], most: int = 20) -> str:
    """Lines as a list for a message: at most the first ``most``, then the number of remaining ones."""
    shown = [f"\n  - {line}" for line in lines[:most]]
    return "".join(shown) + (f"\n  and {len(lines) - most} more" if len(lines) > most else "")


def _shown(shape: Sequence[int] | None) -> str:
    return "none: it is no tensor" if shape is None else str(list(shape))
