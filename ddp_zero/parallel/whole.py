"""Steps of whole matrices whose parts are cut over a dimension of the mesh, as by tensor parallelism.

Muon, Shampoo, SOAP and norms of LAMB need whole parameters. The ranks that hold the parts of one are at the same place
along the data-parallel dimension, so the same data-parallel rank owns all of its parts. One of these ranks is its
*host*: the parts of parameter and gradient meet there, the host steps the whole, and the parts go back. Hosts are
spread by cost over the ranks of the cut dimension, so these share the work. State of a whole parameter exists on its
host only.

With parts of n bytes on each of T ranks, a matrix sends 2 (T - 1) n to its host and (T - 1) n back in each step; with
parts of any sizes 2 (W - h) and W - h, for W bytes of the whole and h of its host's part. Nothing is padded. Besides,
each step of the class takes two gathers of one integer over the T ranks: whether all have the same gradients, before
anything is sent, and whether the step has failed, so that no rank waits for a rank that has.

Owners along the data-parallel dimension follow from sizes, and so do DDP's buckets. Where sizes differ between the T
ranks, both would: so owners of wholes are computed from the wholes' sizes and stated to the plan, and a rank steps all
buckets at once (`SteppedTogether`).
"""

import hashlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_zero.core.comm import Communicator, StepFailedElsewhereError
from ddp_zero.core.local import MASTER_KEY, ParameterTable, SteppedTogether, StepsWithPeers, deal_by_cost
from ddp_zero.core.plan import GroupRank
from ddp_zero.values import flatten_states

PART_NUMBER_KEY = "_ddp_zero_part"
"""Attribute of a parameter that is a part: its number. Stand-ins of a parameter have its attributes."""

_FAILED = -1
"""In place of a digest, of a rank that cannot step."""

_numbers = count()


@dataclass(frozen=True)
class Cut:
    """A parameter that is cut along one mesh dimension, and whose parts are gathered on one rank for the step."""

    comm: Communicator  # the ranks that hold its parts, in order
    dim: int  # the dimension of the tensor that is cut
    host: GroupRank  # the rank of ``comm`` that gathers the parts and steps the whole
    shape: tuple[int, ...]  # of the whole
    label: str  # the parameter in messages
    sizes: tuple[int, ...]  # the length of each rank's part along ``dim``; possibly 0
    # the data-parallel rank that must own the parts; None: the plan of any rank with parts finds the same
    owner: GroupRank | None = None

    @property
    def is_host(self) -> bool:
        """True if this rank gathers the parts and steps the whole."""
        return self.host == self.comm.group_rank

    def part_shape(self, rank: int) -> tuple[int, ...]:
        return tuple(self.sizes[rank] if at == self.dim else size for at, size in enumerate(self.shape))


def number_of_part(param: Tensor) -> int:
    """The number by which this module finds a part again; set as an attribute of the parameter if it has none yet."""
    number: int | None = getattr(param, PART_NUMBER_KEY, None)
    if number is None:
        number = next(_numbers)
        vars(param)[PART_NUMBER_KEY] = number
    return number


def places_for(
    wholes: Sequence[tuple[object, Sequence[int], Mapping[str, Any]]],
    nbytes: Sequence[int] | None,
    data_ranks: int,
    parts: int,
    max_byte_imbalance: float,
) -> list[tuple[GroupRank | None, GroupRank]]:
    """The data-parallel rank that owns the parts of each whole, and its host: spread over all pairs of these by cost.

    ``wholes`` have the class, shape and options of each parameter. With their ``nbytes``, owners follow from the wholes
    alone, so that ranks with parts of different sizes find the same; ``data_ranks`` share the state, and the busiest
    pair has at most ``max_byte_imbalance`` times the mean of bytes for a balanced cost.

    Without, owners are None: those along the data-parallel dimension are dealt in the same order, and the parts that
    one of them owns then have hosts of all numbers.
    """
    pairs = deal_by_cost(wholes, nbytes, data_ranks * parts, max_byte_imbalance)
    owners = [None if nbytes is None else GroupRank(pair % data_ranks) for pair in pairs]
    return [(owner, GroupRank(pair // data_ranks)) for owner, pair in zip(owners, pairs, strict=True)]


class StateRoutes:
    """Sends the states of whole parameters from the ranks whose state dict has them to the hosts of now.

    A state dict may come from a mesh on which other ranks were hosts. Construction is a collective; then `check`, then
    `carry_out` on all ranks if none has failed. ``states`` are this rank's, of all parameters that its data-parallel
    ranks own, by index, masters included.
    """

    def __init__(
        self, states: Mapping[Any, Any], table: ParameterTable, cuts: Mapping[int, Cut], owned: Collection[int]
    ) -> None:
        self._states = states
        self._table = table
        self._cuts = cuts
        self._owned = set(owned)
        self._senders: dict[int, list[GroupRank]] = {}
        indices_of_comm: dict[int, list[int]] = {}  # by dimension of the mesh
        for index, cut in sorted(cuts.items()):
            indices_of_comm.setdefault(id(cut.comm), []).append(index)
        for indices in indices_of_comm.values():
            has_state = [int(_is_of_whole(states.get(index))) for index in indices]
            flags_of_ranks = cuts[indices[0]].comm.all_gather_ints(has_state)
            for place, index in enumerate(indices):
                self._senders[index] = [GroupRank(rank) for rank, flags in enumerate(flags_of_ranks) if flags[place]]

    def check(self) -> None:
        """Check that the states can be sent.

        Raises:
            ValueError: if several ranks have a state of one whole parameter, naming them; on all ranks with its parts.
            TypeError: for a state that cannot be sent, naming the parameter; on the rank that has it.
        """
        for index, senders in self._senders.items():
            cut = self._cuts[index]
            if len(senders) > 1:
                shown = " and ".join(cut.comm.name(rank) for rank in senders[:2])
                raise ValueError(
                    f"Expected one of the ranks with parts of {cut.label} to have the state of the whole, got {shown}. "
                    "Load on each rank the state dict that was saved on that rank. [ZERO-817]"
                )
            if senders == [cut.comm.group_rank] and not cut.is_host:
                flatten_states({index: self._states[index]}, self._table.label)

    def carry_out(self) -> dict[Any, Any]:
        """Send each state to its host, and return the states of this rank, by index. A collective."""
        states = dict(self._states)
        # every rank walks the parameters in one order, so that blocking sends and receives pair up
        for index, senders in sorted(self._senders.items()):
            cut = self._cuts[index]
            if not senders or senders == [cut.host]:
                continue
            state = states.pop(index, {})
            master = {key: value for key, value in state.items() if key == MASTER_KEY}
            if senders == [cut.comm.group_rank] and index in self._owned:
                cut.comm.send_tree({key: value for key, value in state.items() if key != MASTER_KEY}, cut.host)
            arrived: Any = {}
            if cut.is_host and index in self._owned:
                arrived = cut.comm.receive_tree(senders[0], self._table.params[index].device)
            if cut.is_host or master:  # without an owner's part, it only says that there is a state, for their order
                states[index] = {**arrived, **master}
        numbered = sorted(key for key in states if isinstance(key, int))
        return {key: states[key] for key in [*numbered, *(key for key in states if not isinstance(key, int))]}


def _is_of_whole(state: object) -> bool:
    """True for the state of a whole, False for a state that is empty or has only the master of a part."""
    return isinstance(state, Mapping) and bool(state.keys() - {MASTER_KEY})


class _GatheringStep(StepsWithPeers):
    """Mixed into an optimizer class: steps parts as wholes on their hosts; everything else as the class does."""

    cuts: ClassVar[dict[int, Cut]] = {}  # of each class made; it grows with added groups

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Let parts meet, step wholes and other parameters, send parts back.

        Raises RuntimeError if ranks have gradients of different parts, or the step failed on another of them.
        """
        groups = self.param_groups
        gatherings = self._gatherings()
        if not gatherings:
            return self._step_class(closure, kwargs)
        for place, gathering in enumerate(gatherings):
            try:
                gathering.gather()
            except Exception as raised:
                for earlier in gatherings[:place]:
                    earlier.give_back(raised)
                for later in gatherings[place + 1 :]:
                    later.give_up()
                raise
        hosted = {part: whole for gathering in gatherings for part, whole in gathering.hosted.items()}
        stepped_groups = [{**group, "params": self._tensors_to_step(group["params"], hosted)} for group in groups]
        state: dict[Any, Any] = self.state
        for part, whole in hosted.items():
            if part in state:
                state[whole] = state.pop(part)
        self.param_groups = stepped_groups
        result, error = None, None
        try:
            result = self._step_class(closure, kwargs)
        except Exception as raised:
            error = raised
        finally:
            self.param_groups = groups
            for part, whole in hosted.items():
                if whole in state:
                    state[part] = state.pop(whole)
            for group, after in zip(groups, stepped_groups, strict=True):
                group.update({key: value for key, value in after.items() if key != "params"})
        # all of them, also after an error: the ranks of each wait for this rank
        for gathering in gatherings:
            error = gathering.give_back(error) or error
        if error is not None:
            raise error.with_traceback(error.__traceback__)
        return result

    def give_up(self) -> None:
        """Tell the ranks that hold other parts of these parameters that this rank cannot step. A collective."""
        for gathering in self._gatherings():
            gathering.give_up()

    def _gatherings(self) -> list["_Gathering"]:
        """The gatherings of a step, by dimension of the mesh."""
        params_of_comm: dict[int, list[tuple[Tensor, Cut]]] = {}
        for param in (param for group in self.param_groups for param in group["params"]):
            cut = self._cut_of(param)
            if cut is not None:
                params_of_comm.setdefault(id(cut.comm), []).append((param, cut))
        return [_Gathering(params) for params in params_of_comm.values()]

    def _tensors_to_step(self, params: Sequence[Tensor], hosted: Mapping[Tensor, Tensor]) -> list[Tensor]:
        """The tensors to step on this rank: wholes that it hosts, and parameters whose parts do not meet."""
        return [hosted.get(param, param) for param in params if param in hosted or self._cut_of(param) is None]

    def _step_class(self, closure: Callable[[], Any] | None, kwargs: Mapping[str, Any]) -> Any:
        step: Any = super().step
        return step(**kwargs) if closure is None else step(closure, **kwargs)

    def _cut_of(self, param: Tensor) -> Cut | None:
        return self.cuts.get(getattr(param, PART_NUMBER_KEY, -1))


class _GatheringStepAtOnce(_GatheringStep, SteppedTogether):
    """Parts of different sizes, which lie in different buckets on the ranks that hold them."""

    @classmethod
    def owner_of(cls, param: Tensor) -> GroupRank | None:
        cut = cls.cuts.get(getattr(param, PART_NUMBER_KEY, -1))
        return None if cut is None else cut.owner


def gathering_class(optimizer_class: type[Optimizer], cuts: dict[int, Cut]) -> type[Optimizer]:
    """The class, with steps of these parts as wholes; it keeps its name."""
    names = {"__module__": optimizer_class.__module__, "__qualname__": optimizer_class.__qualname__, "cuts": cuts}
    mixin = _GatheringStep if all(cut.owner is None for cut in cuts.values()) else _GatheringStepAtOnce
    gathering = type(optimizer_class.__name__, (mixin, optimizer_class), {**names, "__doc__": optimizer_class.__doc__})
    return cast(type[Optimizer], gathering)


@dataclass
class _Gathering:
    """Gathers the parts of parameters on their hosts for one step, and sends stepped parts back.

    All parts are cut along the same mesh dimension; ``gather`` comes first, then the hosts' step, then ``give_back``.
    """

    members: list[tuple[Tensor, Cut]]  # this rank's parts; in the same order on all ranks
    hosted: dict[Tensor, Tensor] = field(default_factory=dict)  # the wholes that this rank steps, by its part of each

    def __post_init__(self) -> None:
        (first, cut), *_ = self.members
        self.comm, self.device = cut.comm, first.device

    @torch.no_grad()
    def gather(self) -> None:
        """Send parts of parameters and gradients to their hosts, and fill ``hosted``. A collective.

        Parameters without a gradient are left out. Raises RuntimeError if ranks have gradients of different parts.
        """
        self._check_gradients()
        self.members = [(param, cut) for param, cut in self.members if param.grad is not None]
        me, peers = self.comm.group_rank, self.comm.peers()
        # of each parameter two messages: its part, then its gradient's
        sent = {peer: [flat for p, cut in self.members if cut.host == peer for flat in _flat_pair(p)] for peer in peers}
        hosted = [(param, cut) for param, cut in self.members if cut.host == me]
        received = {
            peer: [flat.new_empty(math.prod(cut.part_shape(peer))) for p, cut in hosted for flat in _flat_pair(p)]
            for peer in peers
        }
        self._exchange(sent, received)
        for place, (param, cut) in enumerate(hosted):
            values, grads = [], []
            for rank in map(GroupRank, range(self.comm.world_size)):
                value, grad = _flat_pair(param) if rank == me else received[rank][2 * place : 2 * place + 2]
                values.append(value.view(cut.part_shape(rank)))
                grads.append(grad.view(cut.part_shape(rank)))
            whole = nn.Parameter(torch.cat(values, dim=cut.dim), requires_grad=param.requires_grad)
            whole.grad = torch.cat(grads, dim=cut.dim)
            self.hosted[param] = whole

    @torch.no_grad()
    def give_back(self, error: Exception | None) -> Exception | None:
        """Send the parts of stepped wholes back to their ranks, unless the step failed anywhere. A collective.

        Args:
            error: of this rank's step.

        Returns:
            ``error``, or an error that names the ranks that have failed; None if none has.
        """
        comm, me = self.comm, self.comm.group_rank
        flags = comm.all_gather_ints([int(error is not None)])
        failed = [rank for rank, (has_failed,) in enumerate(flags) if has_failed]
        if error is not None:
            return error
        if failed:
            return self._failure(failed)
        chunks = {
            param: self.hosted[param].detach().split(cut.sizes, dim=cut.dim)
            for param, cut in self.members
            if cut.host == me
        }
        sent = {peer: [_flat(parts[peer]) for parts in chunks.values()] for peer in comm.peers()}
        of_host = {peer: [param for param, cut in self.members if cut.host == peer] for peer in comm.peers()}
        received = {peer: [param.new_empty(param.numel()) for param in params] for peer, params in of_host.items()}
        self._exchange(sent, received)
        for param, parts in chunks.items():
            param.copy_(parts[me])
        for peer, params in of_host.items():
            for param, part in zip(params, received[peer], strict=True):
                param.copy_(part.view(param.shape))
        return None

    def give_up(self) -> None:
        """In place of `gather`, after an error: fail the other ranks'. A collective."""
        self.comm.all_gather_ints([_FAILED])

    def _failure(self, ranks: Sequence[int]) -> StepFailedElsewhereError:
        shown = ", ".join(self.comm.name(GroupRank(rank)) for rank in ranks)
        return StepFailedElsewhereError(
            "Expected the step of whole matrices to succeed on every rank that holds parts of them, got a failure on "
            f"{shown}. Treat the error there, and restart from a checkpoint. [ZERO-319]"
        )

    def _exchange(
        self, sent: Mapping[GroupRank, Sequence[Tensor]], received: Mapping[GroupRank, Sequence[Tensor]]
    ) -> None:
        self.comm.all_to_all(sent, received, self.device, "the parts of matrices that are stepped whole")

    def _check_gradients(self) -> None:
        """Check that all ranks have gradients of the same parameters: a message that is not sent is waited for."""
        text = repr([(cut.label, param.grad is not None, cut.shape) for param, cut in self.members])
        mine = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
        every = [digest for (digest,) in self.comm.all_gather_ints([mine])]
        failed = [rank for rank, digest in enumerate(every) if digest == _FAILED]
        if failed:
            raise self._failure(failed)
        other = next((rank for rank, digest in enumerate(every) if digest != every[0]), None)
        if other is not None:
            names = [self.comm.name(GroupRank(rank)) for rank in (0, other)]
            raise RuntimeError(
                f"Expected gradients of the same parts of matrices on {names[0]} and {names[1]}, got different ones, "
                f"among {len(self.members)} from {self.members[0][1].label} on. Every rank that holds a part must use "
                "it in the same steps. [ZERO-816]"
            )


def _flat_pair(param: Tensor) -> tuple[Tensor, Tensor]:
    """A part and its gradient, each 1-D and contiguous."""
    assert param.grad is not None, "checked"
    return _flat(param.detach()), _flat(param.grad.detach())


def _flat(part: Tensor) -> Tensor:
    """The elements of a part, 1-D and contiguous: `reshape` alone keeps the stride of a single column."""
    return part.reshape(-1).contiguous()
