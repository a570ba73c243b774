"""Detects changes between ``backward()`` and ``opt.step()``, which the step of a plain loop would use.

If the step was taken inside backward, such a change is too late: it acts in the next step, or on the result of the step
instead of its input. Gradients, options of the groups, this rank's state, and the parameters that were stepped are
compared. In-place changes and ``param.data = ...`` show in version counters and addresses. Writes through
``param.data`` and ``grad.data`` show only in the values: sums over the bits of all parameters and gradients are
compared, one reading pass before and one after. Two such passes would take several percent of a step, so from the ninth
step on they read one cache line of 16 of large memory, in turn, and everything in steps that are powers of two. On an
accelerator, where each sum is a kernel launch, other steps read nothing. Under ``torch.autograd.detect_anomaly()``
everything is read in every step. All ranks read the same memory, except for their own state, so that all raise.
"""

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, compress, repeat
from operator import attrgetter, is_, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_zero.core.local.inner import PER_PARAMETER_KEYS, ParamGroup
from ddp_zero.core.local.memory import LINES, BitSums, MovingMemory
from ddp_zero.core.local.weak_calls import weakly
from ddp_zero.core.step.coupling import is_checked_step
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.values.placeholders import AbsentGradient, not_awaiting_params

_REMEDY = (
    "Make such changes before backward() or after opt.step(), or in every iteration from the first one on or "
    "the first after opt.reset(), or build the optimizer with overlap_with_ddp=False (shard_optimizer(..., "
    "overlap=False)): opt.step() then takes the step."
)
_ABSENT = object()
_GRAD, _VERSION, _ZEROED, _DEVICE = map(attrgetter, ("grad", "_version", "zeroed", "device"))
_CONTAINERS = (list, dict, set)


class LateChanges:
    """Notes gradients, options and parameters after a backward pass: addresses, versions and sums, no copies.

    Attributes:
        is_hooked_by_hand: whether the user has registered a hook that an optimizer without overlap refuses.
    """

    def __init__(self, shard: Shard) -> None:
        self._shard = shard
        self.is_hooked_by_hand = False
        self.is_at_rest = True  # whether nothing is noted or still to be compared
        self._kinds: _GradientKinds | None = None  # outlives `forget`
        self._gradients: _GradientMarks | None = None
        self._params: list[Tensor] = []  # the parameters that had a gradient, or a placeholder of one
        self._noted_indices: frozenset[int] = frozenset()  # their indices
        self._marks: list[int] = []  # addresses, then versions, of these parameters
        self._step_number = 0  # the number of the step
        self._line: int | None = None  # the cache line of `LINES` that this step reads of large memory; None: all
        self._sums = _NO_SUMS  # over the bits of parameters
        self._grad_memory = MovingMemory()
        self._grad_sums = _NO_SUMS  # over the bits of gradients; keeps the gradients' memory
        self._options: list[_Options] = []  # of each group
        self._known_options: list[_Options] = []  # the same; outlives `forget`
        self._states: list[Any] = []  # values in the state of this rank's parameters
        self._versions: list[int | None] = []  # of these values; None for one that is no tensor
        self._kept_gradients: dict[
            int, Tensor
        ] = {}  # gradients of a step that is due; the user may drop them before the step
        self._verdict: tuple[Tensor, torch.Event] | None = None  # flag that is being copied from an accelerator

    def remember(self, step_is_due: bool = False, reads_gradients: bool = False) -> None:
        """Note the state after a backward pass: from now on a change is the user's.

        Args:
            step_is_due: keep the gradients for a step within `with_noted_state`.
            reads_gradients: note the bits of gradients, too, and keep their memory until `forget`.
        """
        shard = self._shard
        self._step_number += 1
        self._line = (
            None if is_checked_step(self._step_number) or torch.is_anomaly_enabled() else self._step_number % LINES
        )
        self.is_at_rest = False
        with not_awaiting_params(), torch.no_grad():
            params = shard.table.params
            grads = [*map(_GRAD, params)]
            kinds = self._kinds
            if kinds is None or kinds.types != [*map(type, grads)]:
                kinds = self._kinds = _GradientKinds.of(grads)
            self._gradients = _GradientMarks(kinds, grads)
            self._kept_gradients = (
                {index: grad for index, grad in enumerate(grads) if grad is not None} if step_is_due else {}
            )
            self._params = [*map(params.__getitem__, kinds.noted)]
            self._noted_indices = kinds.noted_set
            self._marks = self._current_marks()
            self._sums = self._current_sums()
            held = (
                dict(zip(kinds.present, map(grads.__getitem__, kinds.present), strict=True)) if reads_gradients else {}
            )
            self._grad_sums = self._sums_over(held) if held else _NO_SUMS
        self._states, self._versions = self._current_states()
        # parameters in flight change when they arrive: their sums are taken then, not now
        shard.pending_syncs.on_bucket_received = weakly(self.note_arrived)
        groups, known = shard.param_groups, self._known_options
        if len(groups) != len(known) or not all(map(_Options.are_same, known, groups)):
            self._known_options = [_Options(group) for group in groups]
        self._options = self._known_options

    def forget(self) -> None:
        """Forget all notes, when the next iteration begins or this one is dropped."""
        self._gradients = None
        self._marks, self._options, self._params, self._noted_indices = [], [], [], frozenset()
        self._states, self._versions = [], []
        self._sums, self._kept_gradients, self._grad_sums = _NO_SUMS, {}, _NO_SUMS
        self.is_at_rest = self._verdict is None
        self._shard.pending_syncs.on_bucket_received = None

    def note_arrived(self) -> None:
        """Note parameters that were received: from now on a change of their values is the user's."""
        known = self._sums
        arrived = self._current_sums(but=set(known.keys))
        self._sums = _BitSumsNow(None, known.keys + arrived.keys, known.totals + arrived.totals)

    # Changes since

    def changed_gradient(self) -> int | None:
        """The first parameter whose gradient was changed in place, replaced, dropped or added, or None.

        Writes through ``grad.data`` show in `_changed_value` only.
        """
        if self._gradients is None:
            return None
        with not_awaiting_params():
            return self._gradients.first_changed(self._shard.table.params)

    def first_change(self) -> str | None:
        """The first change, as messages name it, or None. Waits for an accelerator."""
        return self._changed_tensor() or self._changed_option() or self._changed_state() or self._changed_value()

    def check_none(self) -> None:
        """At ``opt.step()`` after a step inside backward: check that nothing was changed too late.

        This does not wait for an accelerator: `check_earlier` reports writes through ``data`` there.
        """
        if changed := self._shard.local_step.changed_within:
            raise RuntimeError(
                f"The step was taken inside backward, which has set {changed} after buckets were stepped "
                f"({self._rank}). In a plain loop this step would use the change. Make it before backward() or after "
                "opt.step(), or build the optimizer with overlap_with_ddp=False (shard_optimizer(..., overlap=False)). "
                "[ZERO-304]"
            )
        late = self._changed_tensor() or self._changed_option() or self._changed_state()
        devices = {*map(_DEVICE, self._sums.totals), *map(_DEVICE, self._grad_sums.totals)}
        if late is None and any(device.type != "cpu" for device in devices):
            self._compare_later()
        elif late is None:
            late = self._changed_value()
        if late is not None:
            raise self._too_late(late)
        self.forget()

    def check_earlier(self) -> None:
        """On an accelerator: raise RuntimeError if values were written before the last ``opt.step()``.

        Does nothing if the comparison has not been copied to the host yet.
        """
        if self._verdict is not None and self._verdict[1].query():
            differs = bool(self._verdict[0].item())
            self._verdict = None
            if differs:
                raise self._too_late("the values of a parameter or a gradient, in the iteration before")

    def check_unstepped(self) -> None:
        """Before a step that is due: check that gradients and parameters are as backward left them.

        Gradients may have been dropped, as is usual before a forward pass.
        """
        with self._dropped_gradients():
            late = self._changed_tensor() or self._changed_value()
        if late is not None:
            raise RuntimeError(
                f"Expected opt.step() between backward() and the next forward pass, which takes the first step else, "
                f"got a change of {late} ({self._rank}). Call opt.step() after each backward(). For several passes "
                "before a step, as in SAM, run all but the last in ddp.no_sync(), or build the optimizer with "
                "overlap_with_ddp=False (shard_optimizer(..., overlap=False)). [ZERO-304]"
            )

    @contextmanager
    def with_noted_state(self) -> Iterator[None]:
        """A context for a step that is due, with the noted options and gradients; it restores the user's afterwards."""
        groups = self._shard.param_groups
        pairs = [(options.noted, group) for options, group in zip(self._options, groups, strict=False)]
        since = [{key: _Option.of(group, key) for key in _changed_keys(noted, group)} for noted, group in pairs]
        for (noted, group), changes in zip(pairs, since, strict=True):
            for key in changes:
                noted.get(key, _NO_OPTION).restore(group, key)
        try:
            with self._dropped_gradients():
                yield
        finally:
            for (_, group), changes in zip(pairs, since, strict=True):
                for key, option in changes.items():
                    option.restore(group, key)

    @contextmanager
    def _dropped_gradients(self) -> Iterator[None]:
        """A context in which gradients that were set to None since `remember` are back in ``param.grad``."""
        params = self._shard.table.params
        dropped = [index for index in self._kept_gradients if params[index].grad is None]
        for index in dropped:
            params[index].grad = self._kept_gradients[index]
        try:
            yield
        finally:
            for index in dropped:
                params[index].grad = None

    @contextmanager
    def while_memory_moves(self) -> Iterator[None]:
        """A context in which the library moves parameters: afterwards their new addresses and sums are the noted ones.

        A change that the user has made before is still found: then nothing is noted anew.
        """
        is_unchanged = (self._changed_tensor() or self._changed_value()) is None
        yield
        if is_unchanged:
            with not_awaiting_params():  # for parameters that are being received
                self._marks = self._current_marks()
                self._sums = self._current_sums()

    # Comparing

    def _changed_tensor(self) -> str | None:
        """The first gradient or parameter whose address or version has changed since `remember`, in words, or None."""
        index = self.changed_gradient()
        if index is not None:
            return f"the gradient of {self._shard.table.label(index)}"
        with not_awaiting_params():
            now = self._current_marks()
        if now == self._marks:
            return None
        assert self._kinds is not None, "places were noted"
        noted = self._kinds.noted
        differs = [before != found for before, found in zip(self._marks, now, strict=True)]
        return self._shard.table.label(min(compress([*noted, *noted], differs)))

    def _changed_option(self) -> str | None:
        """A description of the first option of a group that has changed since `remember`, or None."""
        for position, (options, group) in enumerate(zip(self._options, self._shard.param_groups, strict=False)):
            noted = options.noted
            if options.are_same(group):
                continue
            for key in _changed_keys(noted, group):
                before = noted[key].snapshot if key in noted else "nothing"
                now = group.get(key, "nothing")
                return f"{key!r} of parameter group {position}, {before!r} at backward and {now!r} now"
        return None

    def _changed_state(self) -> str | None:
        now, versions = self._current_states()
        is_same = versions == self._versions and not any(map(is_not, now, self._states))
        return None if is_same else "opt.state"

    def _changed_value(self) -> str | None:
        kinds = ("gradient", self._grad_sums, self._current_grad_sums()), ("values", self._sums, self._current_sums())
        for kind, noted, found in kinds:
            if (index := noted.first_changed(found)) is not None:
                return f"the {kind} of {self._shard.table.label(index)}, or of one that is stored behind it"
        return None

    def _compare_later(self) -> None:
        """Start a comparison of all sums on the accelerator, whose result a later check reads without waiting."""
        kinds = (self._sums, self._current_sums()), (self._grad_sums, self._current_grad_sums())
        pairs = [pair for noted, found in kinds for pair in zip(*noted.paired_with(found)[1:], strict=True)]
        device = next(before.device for before, _ in pairs if before.device.type != "cpu")
        differs = torch.stack([(noted != now).to(device) for noted, now in pairs]).any()
        verdict = torch.empty((), dtype=torch.bool, pin_memory=True)
        # pinned and asynchronous: to read the flag now, the host would wait for the whole step
        verdict.copy_(differs, non_blocking=True)
        self._verdict = verdict, torch.accelerator.current_stream(differs.device).record_event()

    # Marks

    def _current_states(self) -> tuple[list[Any], list[int | None]]:
        states: list[Any] = [*self._shard.inner_state.values()]
        if not {dict}.issuperset(map(type, states)):
            states = [state for state in states if type(state) is dict]
        values = [*chain.from_iterable(map(dict.values, states))]
        return values, [*map(getattr, values, repeat("_version"), repeat(None))]

    def _current_marks(self) -> list[int]:
        return [*map(Tensor.data_ptr, self._params), *map(_VERSION, self._params)]

    def _current_sums(self, but: Collection[int] = ()) -> "_BitSumsNow":
        """The sums of this step over parameters; over those on an accelerator only if everything is read."""
        if not self._noted_indices:
            return _NO_SUMS
        with not_awaiting_params(), torch.no_grad():
            memory = self._shard.binding.sums_at_rest(self._noted_indices, self._line is not None, but)
            return _BitSumsNow.now(memory, self._line)

    def _sums_over(self, grads: dict[int, Tensor]) -> "_BitSumsNow":
        """The sums of this step over gradients; over those on an accelerator only if everything is read."""
        if self._line is not None and self._shard.binding.accelerators:
            grads = {index: grad for index, grad in grads.items() if grad.is_cpu}
        return _BitSumsNow.now(self._grad_memory.sums(grads), self._line)

    def _current_grad_sums(self) -> "_BitSumsNow":
        memory = self._grad_sums.memory
        return _NO_SUMS if memory is None else _BitSumsNow.now(memory, self._line)

    @property
    def _rank(self) -> str:
        comm = self._shard.comm
        return comm.name(comm.group_rank)

    def _too_late(self, change: str) -> RuntimeError:
        return RuntimeError(
            "The step was taken inside backward, before a change between backward() and opt.step(): of "
            f"{change} ({self._rank}). In a plain loop this step would use the change. {_REMEDY}"
            + (" Leave ddp.register_comm_hook(...) out then." if self.is_hooked_by_hand else "")
            + " [ZERO-304]"
        )


class _GradientKinds(NamedTuple):
    """The parameters by the kinds of their gradients, which mostly stay the same from step to step."""

    types: list[type]
    absent: list[int]  # parameters with an `AbsentGradient`
    present: list[int]  # parameters with any other gradient
    gradless: list[int]  # parameters without a gradient
    noted: list[int]  # ``absent`` and ``present``
    noted_set: frozenset[int]  # the same

    @classmethod
    def of(cls, grads: Sequence[Tensor | None]) -> "_GradientKinds":
        types = [*map(type, grads)]
        absent = [index for index, kind in enumerate(types) if kind is AbsentGradient]
        gradless = [index for index, grad in enumerate(grads) if grad is None]
        present = sorted({*range(len(grads))}.difference(absent, gradless))
        return cls(types, absent, present, gradless, [*absent, *present], frozenset((*absent, *present)))


class _GradientMarks:
    """Marks of all gradients when it is built: identities of placeholders; addresses and versions of the others.

    They are lists, which are compared without a Python loop.
    """

    def __init__(self, kinds: _GradientKinds, grads: Sequence[Any]) -> None:
        self._kinds = kinds
        self._absent = [*map(grads.__getitem__, kinds.absent)]
        self._marks = self._marks_of(grads)

    def _marks_of(self, grads: Sequence[Any]) -> tuple[list[bool], list[int], list[int]]:
        """Flags of placeholders that were set to zero, and addresses and versions of other gradients."""
        present = [*map(grads.__getitem__, self._kinds.present)]
        return [*map(_ZEROED, self._absent)], [*map(Tensor.data_ptr, present)], [*map(_VERSION, present)]

    def first_changed(self, params: Sequence[Tensor]) -> int | None:
        """The first parameter whose gradient was replaced, dropped, added, zeroed or changed in place, or None."""
        kinds = self._kinds
        grads = [*map(_GRAD, params)]
        if (
            [*map(type, grads)] == kinds.types
            and not any(map(is_not, map(grads.__getitem__, kinds.absent), self._absent))
            and self._marks_of(grads) == self._marks
        ):
            return None
        for index, absent, was_zeroed in zip(kinds.absent, self._absent, self._marks[0], strict=True):
            if grads[index] is not absent or absent.zeroed != was_zeroed:
                return index
        for index, *mark in zip(kinds.present, *self._marks[1:], strict=True):
            grad = grads[index]
            if grad is None or [grad.data_ptr(), grad._version] != mark:
                return index
        return next((index for index in kinds.gradless if grads[index] is not None), None)


class _BitSumsNow(NamedTuple):
    """Sums over the bits of memory, each with the first parameter in it.

    ``memory`` is None if the sums were taken at several times.
    """

    memory: BitSums | None
    keys: list[int]
    totals: list[Tensor]

    @classmethod
    def now(cls, memory: BitSums, line: int | None) -> "_BitSumsNow":
        return cls(memory, memory.keys, memory.now(line))

    def paired_with(self, now: "_BitSumsNow") -> tuple[list[int], list[Tensor], list[Tensor]]:
        """Keys that both have, with the sums of each; the sums of equal keys are paired in order."""
        if self.memory is now.memory is not None:
            return self.keys, self.totals, now.totals
        totals: dict[int, list[Tensor]] = {}
        for key, total in zip(now.keys, now.totals, strict=True):
            totals.setdefault(key, []).append(total)
        of_key = {key: iter(sums) for key, sums in totals.items()}
        rows = [(key, total, next(of_key[key])) for key, total in zip(*self[1:], strict=True) if key in of_key]
        return tuple(map(list, zip(*rows, strict=True))) if rows else ([], [], [])  # type: ignore[return-value]

    def first_changed(self, found: "_BitSumsNow") -> int | None:
        """The first parameter in memory whose sums differ, or None."""
        keys, before, now = self.paired_with(found)
        if len({*map(_DEVICE, before)}) == 1 and torch.equal(torch.stack(before), torch.stack(now)):
            return None  # as most often, by a single comparison
        pairs = zip(keys, before, now, strict=True)
        return next((key for key, noted, current in pairs if not torch.equal(noted, current)), None)


_NO_SUMS = _BitSumsNow(None, [], [])


class _Option(NamedTuple):
    """An option of a group as it was when noted."""

    value: Any  # the object itself
    snapshot: Any  # a copy, if the object is mutable; else the object
    version: int | None  # of a tensor

    @classmethod
    def of(cls, group: ParamGroup, key: str) -> "_Option":
        """The option as it is now."""
        value = group.get(key, _ABSENT)
        return cls(value, _copy_mutable(value), value._version if isinstance(value, Tensor) else None)

    def is_still(self, now: Any) -> bool:
        """True if the option has not been set or changed in place since."""
        if isinstance(self.value, Tensor) or isinstance(now, Tensor):
            return now is self.value and now._version == self.version
        return (now is self.value and not isinstance(now, _CONTAINERS)) or _is_equal(self.snapshot, now)

    @torch.no_grad()
    def restore(self, group: ParamGroup, key: str) -> None:
        """Restore the option in the group."""
        if self.value is _ABSENT:
            group.pop(key, None)
            return
        group[key] = self.value
        if isinstance(self.value, Tensor):
            self.value.copy_(self.snapshot)
        elif isinstance(self.value, list):
            self.value[:] = self.snapshot
        elif isinstance(self.value, dict | set):
            self.value.clear()
            self.value.update(self.snapshot)


_NO_OPTION = _Option(_ABSENT, _ABSENT, None)


class _Options:
    """The options of a group as they were when noted, by name."""

    def __init__(self, group: ParamGroup) -> None:
        self.noted = {key: _Option.of(group, key) for key in group if key not in PER_PARAMETER_KEYS}
        self._keys, self._values = [*group], [*group.values()]
        values = [option.value for option in self.noted.values()]
        self._may_change = any(isinstance(value, (Tensor, *_CONTAINERS)) for value in values)

    def are_same(self, group: ParamGroup) -> bool:
        """True if the group holds the same objects, and none that can change in place; without a Python loop."""
        return not self._may_change and self._keys == [*group] and all(map(is_, self._values, group.values()))


def _changed_keys(noted: Mapping[str, _Option], group: ParamGroup) -> list[str]:
    """The options that were set, removed or changed in place since they were noted."""
    keys = [*noted, *(key for key in group if key not in PER_PARAMETER_KEYS and key not in noted)]
    return [key for key in keys if not noted.get(key, _NO_OPTION).is_still(group.get(key, _ABSENT))]


def _copy_mutable(value: Any) -> Any:
    """The value, or a copy if it is mutable."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, _CONTAINERS) else value


def _is_equal(value: Any, other: Any) -> bool:
    try:
        return bool(value == other)
    except Exception:  # a class whose objects cannot be compared may raise anything
        return False
