"""A case on one rank: every operation on ours, on the plain optimizers, and on one device; reported one by one."""

import contextlib
import copy
import gc
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddp_zero import checkpoint
from tests.fuzz.compare import Difference, check_equal
from tests.fuzz.mesh.case import (
    CUTS,
    ROLES,
    Away,
    Compare,
    Evaluate,
    Freeze,
    Layout,
    MeshCase,
    Move,
    Op,
    Refuse,
    Set,
    Step,
    Uneven,
)
from tests.fuzz.mesh.net import Values, first_values, piece
from tests.fuzz.mesh.side import Ours, Plain, Slot, Whole, stepped_part
from tests.fuzz.run_case import DIFFERENCE, ERROR, FAILED, OK, Ask, Report
from tests.fuzz.sides import Place

NORM_TOLERANCE = {"bfloat16": 1e-5, "float16": 1e-5, "float32": 1e-5, "float64": 1e-9}
TOLERANCE = 1e-7
"""Of parameters in double precision from those of one device, whose sums round differently."""


class Runner:
    """Runs one case.

    Args:
        case: which.
        place: which rank this is.
        ask: reports an operation.
    """

    def __init__(self, case: MeshCase, place: Place, ask: Ask) -> None:
        self.case, self._place, self._ask = case, place, ask
        self._frozen = set(case.net.frozen)
        self._steps = 0
        self._taken = 0
        self._moved = False
        self._is_new = False  # the model has just been built, and has no gradients

    def run(self) -> None:
        """All operations, or as many as go well."""
        if not self._report(-1, self._build):
            return
        for number, op in enumerate(self.case.program):
            if self._place.injects == f"hang {number}" and self._place.rank == 1:
                time.sleep(10_000)
            if not self._report(number, lambda op=op, number=number: self._do(op, number)):  # type: ignore[misc]
                return

    def _report(self, number: int, action: Callable[[], Any]) -> bool:
        started, before = time.monotonic(), self._taken
        kind = type(self.case.program[number]).__name__ if number >= 0 else "building"
        try:
            action()
            report = Report(number, OK, compared=self._taken - before)
        except Difference as difference:
            report = Report(number, FAILED, f"{DIFFERENCE} ({kind})", str(difference), False)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            report = Report(number, FAILED, f"{ERROR} ({kind})", text, False, time.monotonic() - started)
        return self._ask(report)

    def _build(self) -> None:
        self.layout = self.case.layout
        values = first_values(self.case)
        self.plain = Plain(self.case, self.layout, values, self._frozen)
        self.whole = Whole(self.case, values)
        self.ours = Ours(self.case, self.layout, values, self._frozen, self._place)
        self._start = self._values()
        self._check_parameters("before the first step")

    def _do(self, op: Op, number: int) -> None:
        if isinstance(op, Step):
            self._step(op)
        elif isinstance(op, Uneven):
            self._train_unevenly(op)
        elif isinstance(op, Refuse):
            self._refuse(op)
        elif isinstance(op, Away):
            self.ours.move_state()
        elif isinstance(op, Set):
            self._set(op)
        elif isinstance(op, Freeze):
            self._freeze(op)
        elif isinstance(op, Evaluate):
            check_equal(self.plain.evaluate(op, self._steps), self.ours.evaluate(op, self._steps), "scores")
        elif isinstance(op, Compare):
            self._compare(op)
        else:
            self._move(op, number)
        if number == len(self.case.program) - 1:
            self._gathered()  # replicas are equal
            if not self._moved:
                raise Difference("vacuous: no parameter has moved")

    # Steps

    def _step(self, op: Step) -> None:
        case, ours, plain, whole, number = self.case, self.ours, self.plain, self.whole, self._steps
        self._steps += 1
        op, self._is_new = replace(op, to_none=op.to_none or self._is_new), False
        whole.zero_grad(op.to_none)
        whole.backward(op, number, self.layout)
        expected = whole.norm()
        plain.zero_grad(op.to_none)
        plain.backward(op, number)
        plain.average()
        skips = case.how.on_nonfinite != "step" and not plain.is_finite()
        plain.unscale()
        ours.opt.zero_grad(op.to_none)
        ours.backward(op, number)
        norm = self._step_ours(skips)
        plain.follow(not skips)
        check_equal(plain.value, ours.value, "the loss scale")
        if not skips:
            if case.how.clip in ("option", "loop"):
                self._check_norm(norm, plain.norm(), expected)
            plain.step(norm)
            whole.step(expected if case.how.clip in ("option", "loop") else None)
            self._taken += 1
        self._look(f"after step {number}")

    def _look(self, when: str) -> None:
        self._check_parameters(when)
        if self._is_comparable:
            self._check_one_device(when)
        self._moved |= any(not torch.equal(now, old) for now, old in zip(self._values(), self._start, strict=True))

    def _values(self) -> list[Tensor]:
        """Masters where there are any: a small step may round to the same parameter. The plain run's, equal to ours."""
        return [slot.clipped.detach().clone() for slot in self.plain.slots]

    def _train_unevenly(self, op: Uneven) -> None:
        case, ours, plain, whole, number = self.case, self.ours, self.plain, self.whole, self._steps
        mine = [None if norm is None else float(norm) for norm in ours.train_unevenly(op, number)]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
        norms = max(every, key=len)
        if any(one != norms[: len(one)] for one in every):
            raise Difference(f"norms under Join by rank: {every}")
        if len(norms) != max(op.batches) or len(mine) != op.batches[ours.place["data"]]:
            raise Difference(f"{len(mine)} iterations under Join, and {len(norms)}, instead of those of {op.batches}")
        for iteration, found in enumerate(norms):
            places = [place for place, count in enumerate(op.batches) if count > iteration]
            whole.zero_grad(to_none=True)
            factor = len(places) / len(op.batches) if op.counts_all else 1.0
            whole.backward(Step(), number + iteration, self.layout, places, factor)
            plain.train_uneven_step(op, number, iteration)
            if case.how.on_nonfinite != "step" and not plain.is_finite():  # 16 bits under a large scale
                plain.follow(False)
                continue
            norm = None if found is None else torch.tensor(found, dtype=torch.float64)
            if case.how.clip == "option":
                expected = whole.norm()
                self._check_norm(norm, plain.norm(), expected)
                whole.step(expected)
            else:
                whole.step(None)
            plain.step(norm)
            plain.follow(True)
            self._taken += 1
        self._steps, self._is_new = number + len(norms), False
        check_equal(plain.value, ours.value, "the loss scale after Join")
        self._look(f"after Join at step {number}")

    def _refuse(self, op: Refuse) -> None:
        code = self.case.refuses_join(self.layout) if op.thing == "join" else "ZERO-812"
        assert code is not None
        try:
            if op.thing == "join":
                self.ours.refuse_to_join()
            else:
                Ours(self.case, self.layout, first_values(self.case), self._frozen, self._place, sync="forward")
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        else:
            told = ""
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, told)
        if not all(f"[{code}]" in one for one in every):
            raise Difference(f"{op} is not refused with {code} on all ranks: {every}")

    def _step_ours(self, skips: bool) -> Tensor | None:
        ours, how = self.ours, self.case.how
        if skips and how.on_nonfinite == "raise":
            try:
                ours.step()
            except RuntimeError as error:
                if "finite" not in str(error):
                    raise
                return None
            raise Difference("gradients that are not finite raise nothing")
        norm = ours.step()
        record = ours.opt.last_step
        if record.stepped == skips:
            raise Difference(f"{record} where the gradients are {'not ' if skips else ''}finite")
        if skips:
            self._check_same_everywhere(f"{record.nonfinite_parameter} {record.reason}", "the record of a skip")
            if record.nonfinite_parameter is None:
                raise Difference("no parameter is named for a skip")
        return norm

    def _check_norm(self, norm: Tensor | None, expected: Tensor, on_one_device: Tensor) -> None:
        assert norm is not None
        self._check_same_everywhere(float(norm).hex(), "the norm")
        self._check_close(norm, expected, "of the plain run's gradients")
        if self._is_comparable:
            self._check_close(norm, on_one_device, "on one device")

    def _check_close(self, norm: Tensor, expected: Tensor, where: str) -> None:
        ratio = abs(float(norm) / float(expected) - 1) if float(expected) else float(norm)
        if not ratio <= NORM_TOLERANCE[self.case.net.dtype]:
            raise Difference(f"norm {float(norm)}, {where} {float(expected)}")

    def _check_same_everywhere(self, text: str, what: str) -> None:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, text)
        if len(set(every)) > 1:
            raise Difference(f"{what} by rank: {every}")

    @property
    def _is_comparable(self) -> bool:
        """Whether one device stays close: not where steps amplify the last bits, as Muon does in bfloat16."""
        return self.case.net.dtype == "float64" and not self.case.how.muon

    def _check_parameters(self, when: str) -> None:
        for mine, other in zip(self.ours.slots, self.plain.slots, strict=True):
            check_equal(other.param, mine.param, f"{mine.name} {when}")
        for (name, one), other_buffer in zip(self.plain.part.named_buffers(), self.ours.part.buffers(), strict=True):
            check_equal(one, other_buffer, f"buffer {name} {when}")

    def _check_one_device(self, when: str) -> None:
        for slot in self.ours.slots:
            whole = piece(
                self.case,
                slot.name,
                self.whole.names[slot.name].detach(),
                self.ours.place["tensor"],
                self.layout.tensor,
            )
            apart = (whole - slot.param.detach()).abs()
            distance = float(apart.max()) if apart.numel() else 0.0
            if not distance <= TOLERANCE:
                raise Difference(f"{slot.name} {when}: {distance:.3g} from one device")

    # Between steps

    def _set(self, op: Set) -> None:
        for group in [*self.plain.options(op.role), *self.whole.options(op.role)]:
            group[op.key] = op.value  # type: ignore[index]
        for one, group in zip(self.ours.groups, self.ours.opt.param_groups, strict=True):
            if one.role == op.role:
                group[op.key] = op.value

    def _freeze(self, op: Freeze) -> None:
        (self._frozen.discard if op.trains else self._frozen.add)(op.name)
        self.ours.set_trains(op.name, op.trains)
        self.plain.set_trains(op.name, op.trains)
        self.whole.names[op.name].requires_grad_(op.trains)

    def _compare(self, op: Compare) -> None:
        found = self.ours.opt.state_dict()
        dist.barrier()  # ranks answer each other until then
        self._check_state(found)
        if not op.loads:
            return
        values = {name: tensor.detach().clone() for name, tensor in self.ours.part.state_dict().items()}
        ours = Ours(self.case, self.layout, self._zeros(), self._frozen, self._place, self.ours.scaler)
        ours.part.load_state_dict(values)
        ours.opt.load_state_dict(copy.deepcopy(found))
        self.ours, self._is_new = ours, True
        # as new as ours: DDP sums the first iteration in other buckets than all further ones
        self.plain = Plain(self.case, self.layout, self._zeros(), self._frozen).copy_of(self.plain)
        self.whole.load_own()
        again = ours.opt.state_dict()
        dist.barrier()
        self._check_state(again)
        self._check_options()

    def _check_state(self, found: dict[str, Any]) -> None:
        """See that a state dict has what the plain optimizers have; of parts that meet, only hosts have any."""
        for number, slot in enumerate(self.plain.slots):
            if slot.full is None:
                expected, mine = self.plain.state_of(slot), found["state"].get(number, {})
                check_equal(dict(sorted(expected.items())), dict(sorted(mine.items())), f"state of {slot.name}")

    def _check_options(self) -> None:
        for role in ROLES:
            mine = [g for one, g in zip(self.ours.groups, self.ours.opt.param_groups, strict=True) if one.role == role]
            if not any(group["params"] for group in mine):
                continue  # options are stored with parameters
            for one, other in zip(self.plain.options(role), mine, strict=True):
                for key in ("lr", "weight_decay"):
                    if key in one:
                        check_equal(one[key], other[key], f"{key} of {role}")

    def _zeros(self) -> Values:
        return {name: torch.zeros_like(value) for name, value in first_values(self.case).items()}

    # Checkpoints

    def _move(self, op: Move, number: int) -> None:
        folder = Path(self._place.folder) / f"mesh {self.case.seed} {self.case.ranks} {number}"
        checkpoint.save(folder, self.ours.model, self.ours.opt)
        values, states = self._gathered()
        options = {role: [dict(group) for group in self.plain.options(role)][:1] for role in ROLES}
        options = self._options_of_all_ranks(options)
        before, self._is_new = self.plain, True
        self.layout = op.layout
        self.ours = Ours(self.case, op.layout, self._zeros(), self._frozen, self._place, self.ours.scaler)
        checkpoint.load(folder, self.ours.model, self.ours.opt)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder)
        self.plain = Plain(self.case, op.layout, values, self._frozen)
        self.plain.value, self.plain.good = before.value, before.good
        self.whole.load_own()
        for slot in self.plain.slots:
            self.plain.set_state(slot, self._part_of_state(slot, states[slot.name], op.layout))
        for role, groups in options.items():
            for group in self.plain.options(role):
                group.update({key: groups[0][key] for key in ("lr", "weight_decay") if key in groups[0]})
        self._moved = False
        self._check_parameters("after loading")
        self._check_options()
        found = self.ours.opt.state_dict()
        dist.barrier()
        self._check_state(found)
        self._start = self._values()

    def _options_of_all_ranks(self, own: dict[str, list[dict[str, Any]]]) -> dict[str, list[dict[str, Any]]]:
        own = {role: [{k: v for k, v in g.items() if k != "params"} for g in groups] for role, groups in own.items()}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, own)
        return {
            role: next((one[role] for one in every if one[role]), []) for role in own if any(e[role] for e in every)
        }

    def _gathered(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """All values and states, whole, from the ranks of the plain run; ranks that hold the same must be equal."""
        plain, place = self.plain, self.plain.place
        mine: dict[tuple[str, int], tuple[Tensor, dict[str, Any]]] = {}
        stepped = {id(slot.given): slot for slot in plain.slots}
        for name, given in plain.names.items():
            slot = stepped.get(id(given), Slot(name, name, self.case.role_of(name), given, stepped_part(given)))
            mine[name, place["tensor"]] = (slot.param.detach(), plain.state_of(slot))
        buffers = dict(plain.part.named_buffers())
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (mine, buffers))
        parts: dict[str, dict[int, tuple[Tensor, dict[str, Any]]]] = {}
        values: dict[str, Tensor] = {}
        for rank, (theirs, their_buffers) in enumerate(every):
            for (name, at), value in theirs.items():
                known = parts.setdefault(name, {}).setdefault(at, value)
                check_equal(known[0], value[0], f"{name}, part {at}, on rank {rank} and before")
                check_equal(known[1], value[1], f"state of {name}, part {at}, on rank {rank} and before")
            for name, buffer in their_buffers.items():
                values.setdefault(name, buffer)
        states = {}
        for name, found in parts.items():
            role = self.case.role_of(name)
            pieces = [found[at] for at in sorted(found)]
            values[name] = _joined([value for value, _ in pieces], CUTS.get(role))
            dim = None if plain.meets(role) else CUTS.get(role)  # else every rank has the state of the whole
            states[name] = {key: _joined([state[key] for _, state in pieces], dim) for key in pieces[0][1]}
        return values, states

    def _part_of_state(self, slot: Slot, state: dict[str, Any], layout: Layout) -> dict[str, Any]:
        at = self.plain.place["tensor"]
        if slot.full is not None:
            return copy.deepcopy(state)
        return {
            key: piece(self.case, slot.name, value, at, layout.tensor) if isinstance(value, Tensor) else value
            for key, value in state.items()
        }


def _joined(parts: list[Any], dim: int | None) -> Any:
    first = parts[0]
    if not isinstance(first, Tensor) or dim is None or not first.dim():
        return first
    return torch.cat(parts, dim=dim)


def run_mesh_case(case: MeshCase, place: Place, ask: Ask) -> None:
    """Run a case and free what it has held."""
    try:
        Runner(case, place, ask).run()
    finally:
        with contextlib.suppress(Exception):
            checkpoint.wait()
        gc.collect()
