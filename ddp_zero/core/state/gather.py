"""The whole optimizer state on one rank: gathered together, or on demand while the peers go on.

On demand, the asking rank requests each shard, and a thread of the owner answers. While gradients are reduced together,
no rank can step without the asking one, so the peers' states do not change. That is verified: every rank counts the
changes of its state (`StateChanges`), the request states the asking rank's count, and the owner looks before and after
each message whether a further change has begun. A rank that is behind is waited for; a rank that has moved on is
named in an error. The result is one consistent state or none. Between the last backward pass and ``opt.step()`` all
ranks may ask, and none may step before the others have asked: a rank that has asked there waits in its step until the
other ranks come to theirs.

A rank whose devices stand behind a collective of the next step, which the asking rank has yet to join, answers
nevertheless: from the state that the last change has left (`StateVersion`), without the script's streams
(`device_reads`).

A request, in the job's store (`core.comm.requests`), is ``{"count": .., "plan": ..}``, or ``{"reaches": ..}`` of a rank
that waits for this rank to come to that change. Answers are ``{"wait": why}``, ``{"refused": why}``, ``{"end": 0}``, or
``{"connection": ..}``, which is followed on that connection by

- ``{"births": [[index, [step, place]], ..], "tree": text}`` and the elements of its tensors, for states that the rank
  owns, by parameter index, until it has sent all;
- ``{"end": number of states}``, or ``{"refused": why}`` as soon as the state has changed.

Only the ranks of ``shard.comm`` are asked, one after the other. A rank's state of a parameter holds the elements that
the rank owns.

Not chosen: messages on the training group (they would mix), or on a standing Gloo group (a receive that is posted for a
request that never comes fails with the time-out, and with it the connection); ports of our own (firewalls, and
strangers that connect); a lock held by each step (an answer would delay training).
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from ddp_zero.core.comm.groups import check_not_forked
from ddp_zero.core.comm.ranks import Agreement
from ddp_zero.core.comm.requests import Connection, Frame, Request, listen
from ddp_zero.core.comm.stay import UNTIL, Stay
from ddp_zero.core.local.parameters import MASTER_KEY, with_masters
from ddp_zero.core.local.placement import state_bytes
from ddp_zero.core.local.weak_calls import weakly
from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.state.device_reads import begin_thread, prepare
from ddp_zero.core.state.frames import receive_frame, receive_tree, send_frame, send_tree
from ddp_zero.core.step.rank_shard import Shard
from ddp_zero.core.step.state_changes import StateVersion
from ddp_zero.core.step.state_order import Birth, State
from ddp_zero.error_codes import coded
from ddp_zero.values.parts import join_states
from ddp_zero.values.shapes import Part
from ddp_zero.values.tree import Flat, flatten_states, rebuild

_POLL_SECONDS = 0.001, 0.05
MESSAGE_BYTES = 16 << 20
"""A message of states ends with the one that reaches this."""


class OwnedStates(NamedTuple):
    """The states of one rank, by parameter index."""

    parts: Mapping[int, Part]  # what the rank owns of each parameter
    births: dict[int, Birth]  # step and place of creation of each state
    states: dict[int, dict[Any, Any]]


def gather_state(shard: Shard, to: GroupRank) -> State | None:
    """Gather every rank's per-parameter state on rank ``to`` of everyone, to which its shard group sends. A collective.

    Returns on that rank a snapshot of the unsharded optimizer's state, keyed by parameter, in the unsharded order and
    on the unsharded devices; None on other ranks.

    Raises:
        TypeError: if a state holds a value that cannot be sent, naming the parameter; RuntimeError on other ranks.
        ValueError: if ``to`` is not a rank of the group, or ranks name different receivers.
    """
    comm, everyone, table = shard.comm, shard.everyone, shard.table
    with Agreement(everyone, "consolidate_state_dict") as agreement:
        if not 0 <= to < everyone.world_size:
            raise ValueError(f"Expected `to` to be a rank below {everyone.world_size}, got {to}. [ZERO-103]")
        agreement.declare("argument `to`", to)
        shard.order.note_new(shard.inner_state, shard.targets.index_of)
        owned = _owned_states(shard, shard.inner_state)
        flat = flatten_states(owned.states, table.label)
    receiver = comm.group_rank_of(everyone.global_rank(to))
    if receiver is None:
        return None
    counts = [count for (count,) in comm.all_gather_ints([len(owned.states)])]
    if comm.group_rank != receiver:
        # blocking, in the order of ranks: the receiver takes one sender after the other
        for index, state in owned.states.items():
            comm.send_tree((owned.births[index], index, state), receiver)
        return None
    every = [_copied(owned, flat)]
    for source in map(GroupRank, range(comm.world_size)):
        if source != receiver and counts[source]:
            found = OwnedStates(shard.binding.owned_parts(source), {}, {})
            for _ in range(counts[source]):
                birth, index, state = comm.receive_tree(source, table.accelerator())
                found.births[index], found.states[index] = birth, state
            every.append(found)
    return _whole_state(shard, every)


def _whole_state(shard: Shard, every: Sequence[OwnedStates]) -> State:
    """The unsharded optimizer's state, in its order and with masters, joined from the states of all ranks."""
    params, births, found = shard.table.params, dict[int, Birth](), dict[int, list[tuple[Part, Any]]]()
    for owned in every:
        births |= owned.births
        for index, state in owned.states.items():
            found.setdefault(index, []).append((owned.parts[index], state))
    joined = join_states(found, params)
    whole: State = {key: value for key, value in shard.inner_state.items() if not isinstance(key, Tensor)}
    is_fresh = shard.masters.are_initial
    for index in sorted(births, key=lambda index: (births[index], index)):
        whole[params[index]] = joined[index]
        # an initial master equals its parameter, which every rank has
        if is_fresh and shard.masters.needs_master(index):
            whole[params[index]][MASTER_KEY] = shard.targets.target_on_owner(index).detach()
    return whole


def _owned_states(shard: Shard, values: State) -> OwnedStates:
    """What this rank owns of a state, not copied.

    Initial masters are left out: the receiver makes them from its parameters.
    """
    # reads only: this runs on a serving thread too, while a step may begin on the main thread
    parts = shard.binding.owned_parts()
    stepped = shard.targets
    # a look-up of the state of another rank's parameter would leave an empty state behind
    states = {index: state for index, state in with_masters(values, stepped).items() if index in parts}
    if stepped.masters.are_initial:
        for index, state in states.items():
            states[index] = {key: value for key, value in state.items() if key != MASTER_KEY}
    return OwnedStates(parts, shard.order.births_of(stepped.of(states)), states)


def _copied(owned: OwnedStates, flat: Flat) -> OwnedStates:
    """The states with a copy of every tensor, which holds only the tensor's own elements."""
    text, tensors = flat
    return owned._replace(states=rebuild(text, [tensor.clone() for tensor in tensors]))


def _messages(states: Mapping[int, dict[Any, Any]]) -> Iterator[dict[int, dict[Any, Any]]]:
    """Split states, by index, into messages of at least `MESSAGE_BYTES`, but for the last."""
    message, nbytes = dict[int, dict[Any, Any]](), 0
    for index, state in states.items():
        message[index] = state
        nbytes += state_bytes(state)
        if nbytes >= MESSAGE_BYTES:
            yield message
            message, nbytes = {}, 0
    if message:
        yield message


class OnDemandGather:
    """Gathers the state from other ranks by requests, and answers their requests. Construction is a collective.

    It answers after ``owner`` is gone, or the script has ended, until no rank can ask any more.
    """

    def __init__(self, shard: Shard, owner: object) -> None:
        self._shard = shard
        comm = shard.comm
        self._time_out = comm.time_out.total_seconds()
        prepare(shard.binding.accelerators)
        shard.changes.note_work(shard.binding.accelerators)  # kernels of construction may still run
        shard.changes.keeps_versions = True
        mine, why_not = "", ""
        try:
            self._listener, mine = listen(comm.process_group, self)
        except RuntimeError as error:  # of a backend without a store
            why_not = str(error)
        peers: list[str] = []
        if mine:  # before any peer can ask
            self._stay = Stay(self._listener, mine, peers, self._time_out, lambda: shard.changes.pending)
        told = [json.loads(text) for text in comm.all_gather_text(json.dumps([mine, why_not]))]
        self._addresses = [address for address, _ in told]
        self._refusal = next((reason for _, reason in told if reason), "")
        if not self._refusal:
            peers += [self._addresses[peer] for peer in comm.peers()]
            self._stay.keep(self, owner)

    # Asking

    def gather(self, others_may_step: bool = False) -> State:
        """Copies of all ranks' states, by parameter, in the unsharded order, on the unsharded devices.

        ``others_may_step``: whether other ranks can begin a step while this one asks.

        Raises:
            RuntimeError: within the group's time-out, naming the rank, if one is gone, has moved on, or does not end a
                step; within a step of this rank; in a forked process.
            TypeError: for a state that cannot be sent without pickle, naming the parameter.
        """
        shard, comm = self._shard, self._shard.comm
        check_not_forked(comm.process_group)
        if shard.changes.is_under_way:
            raise RuntimeError(
                f"state_dict() was called within a step ({comm.name(comm.group_rank)}). Call it after opt.step(), or "
                "opt.reset() after an interrupted backward pass. [ZERO-309]"
            )
        if self._refusal:
            raise RuntimeError(
                f"Expected ranks that can ask each other by the job's store, got {self._refusal}. Call "
                f"consolidate_state_dict() on all ranks before state_dict(). [ZERO-602]"
            )
        owned = _owned_states(shard, shard.inner_state)
        every = [_copied(owned, flatten_states(owned.states, shard.table.label))]
        for peer in comm.peers():
            if parts := shard.binding.owned_parts(peer):
                every.append(self._naming(peer, partial(self._request_states, peer, parts)))
        if others_may_step:  # then this rank may step too, while other ranks still ask
            shard.changes.await_peers = weakly(self._await_peers)
        return _whole_state(shard, every)

    def _await_peers(self, change: int) -> None:
        """Wait until all ranks have come to the change of this number, for which they need no other rank."""
        for peer in self._shard.comm.peers():
            self._naming(peer, partial(self._first_answer, peer, {"reaches": change}))

    def _request_states(self, peer: GroupRank, parts: Mapping[int, Part]) -> OwnedStates:
        """Request and receive a rank's states, of these parts of parameters."""
        shard, comm = self._shard, self._shard.comm
        final, key = self._first_answer(peer, {"count": shard.changes.begun, "plan": shard.binding.digest})
        received = OwnedStates(parts, {}, {})
        device = shard.table.accelerator()
        if "connection" in final:
            with self._listener.connection_to(key, self._time_out) as connection:
                while "births" in (final := receive_frame(connection)):
                    received.births.update({index: (step, place) for index, (step, place) in final["births"]})
                    received.states.update(receive_tree(connection, final, device))
        if "type_error" in final:
            raise TypeError(coded(final["type_error"], "[ZERO-611]"))
        if final.get("end") != len(received.states):
            message = (
                f"Expected {comm.name(peer)} to have the state that {comm.name(comm.group_rank)} has, got "
                f"{final.get('refused', 'a part of the state')}. If this rank is between backward() and opt.step(), "
                "call opt.step() first, which the other waits for. Where ranks step without each other, call "
                "consolidate_state_dict() on all of them before state_dict()."
            )
            raise RuntimeError(coded(message, "[ZERO-602]"))
        return received

    def _first_answer(self, peer: GroupRank, request: Frame) -> tuple[Frame, str]:
        """Ask until the rank no longer answers with "wait". Returns the answer and the key of its connection."""
        deadline = time.monotonic() + self._time_out
        pause, longest = _POLL_SECONDS
        while True:
            frame, key = self._listener.ask(self._addresses[peer], request)
            if "wait" not in frame:
                return frame, key
            if time.monotonic() + pause > deadline:
                raise RuntimeError(
                    f"Expected {self._shard.comm.name(peer)} to end its change of the state within "
                    f"{self._time_out:g} s, the group's time-out, got {frame['wait']}. [ZERO-602]"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _naming(self, peer: GroupRank, call: Callable[[], Any]) -> Any:
        """Call a function that communicates with a rank; errors of the connection then name the rank."""
        try:
            return call()
        except (OSError, EOFError, ValueError) as error:
            shown = "no answer within the group's time-out" if isinstance(error, TimeoutError) else str(error)
            message = (
                f"Expected {self._shard.comm.name(peer)} to give its part of the optimizer's state, got {shown}. Has "
                "it been killed, or ended with an error? A rank that ends well stays until no other can ask."
            )
            raise RuntimeError(coded(message, "[ZERO-602]")) from error

    # Answering, in a thread

    def answer(self, request: Request) -> None:
        """Answer a rank: whether this rank has come to a change, or with this rank's part of the state."""
        changes, asked = self._shard.changes, request.frame
        begin_thread(self._shard.binding.accelerators)
        if UNTIL in asked:
            self._stay.note_peer_left()
            request.answer({"end": 0})
        elif "reaches" in asked:
            has_come = changes.reached >= asked["reaches"]
            request.answer({"end": 0} if has_come else {"wait": f"no step after change {changes.begun}"})
        else:
            self._answer_for_state(request, asked["count"], asked["plan"])

    def _answer_for_state(self, request: Request, count: int, plan: int) -> None:
        """Answer a peer that asks for this rank's states after change ``count``: with them, or why not."""
        changes = self._shard.changes
        if changes.ended < count:
            where = "within" if changes.is_under_way else "after"
            request.answer({"wait": f"it still {where} its change {changes.begun}, a step or a load"})
            return
        # checked here and again around every message: the main thread may begin a step at any moment
        version = changes.version(count)
        if version is None:
            request.answer(self._moved_on(count))
        elif self._shard.binding.digest != plan:
            request.answer({"refused": "a different plan of who owns what"})
        else:
            request.answer({"connection": "here"})
            with request.connection(self._time_out) as connection:
                send_frame(connection, self._send_states(connection, count, version))

    def _send_states(self, connection: Connection, count: int, version: StateVersion) -> Frame:
        """Send every state that this rank owns. Returns the final frame: their number, or why they do not count."""
        # kernels of the last step may still write the state
        version.wait()
        sent, final = 0, Frame()
        try:
            _, births, states = _owned_states(self._shard, version.values)
            for message in _messages(states):
                if version.may_be_overwritten:
                    break
                head = {"births": [(index, births[index]) for index in message]}
                send_tree(connection, head, flatten_states(message, self._shard.table.label))
                sent += len(message)
            final = {"end": sent}
        except TypeError as error:
            final = {"type_error": str(error)}
        except (RuntimeError, LookupError) as error:
            final = {"refused": f"{type(error).__name__}: {error}"}
        # what was sent meanwhile may mix two states
        return self._moved_on(count) if version.may_be_overwritten else final

    def _moved_on(self, count: int) -> Frame:
        begun = self._shard.changes.begun
        return {"refused": f"a state that has moved on, to change {begun} (a step or a load) from {count}"}
