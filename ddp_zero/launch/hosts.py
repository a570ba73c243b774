"""The hosts of a job: a hostfile as DeepSpeed has it, and filters that choose hosts and slots. Text in, values out."""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

_LINE = re.compile(r"(\S+)\s+slots=([0-9]{1,6})")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
_SLOT = re.compile(r"[0-9]{1,6}")

Filter = Mapping[str, tuple[int, ...] | None]
"""Slots by host; None: all of them."""


@dataclass(frozen=True)
class Host:
    """A host and the processes to start on it.

    Attributes:
        name: as the hostfile has it; what ssh is given.
        slots: indices of its devices, one for each process.
    """

    name: str
    slots: tuple[int, ...]

    @property
    def is_first_slots(self) -> bool:
        """Whether the slots are 0, 1, 2 and so on, so that processes find their devices without being told."""
        return self.slots == tuple(range(len(self.slots)))


def parse_hostfile(text: str, shown: object) -> tuple[Host, ...]:
    """The hosts of a hostfile: a line ``name slots=8`` for each; ``#`` begins a comment.

    Args:
        text: of the file.
        shown: the name of the file in messages.

    Raises:
        ValueError: with every line that is not of this form, or that repeats a host; or if there is no host.
    """
    hosts: dict[str, tuple[int, Host]] = {}
    wrong = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None or not int(match[2]):
            wrong.append(f"line {number}: Expected 'name slots=count' with a count of at least 1, got {content!r}.")
        elif not _NAME.fullmatch(match[1]):
            wrong.append(f"line {number}: Expected a host name of letters, digits, '.', '-' and '_', got {match[1]!r}.")
        elif match[1] in hosts:
            wrong.append(f"line {number}: Expected each host once, got {match[1]!r}, as in line {hosts[match[1]][0]}.")
        else:
            hosts[match[1]] = number, Host(match[1], tuple(range(int(match[2]))))
    if wrong:
        raise ValueError("\n  ".join([f"Expected a hostfile in {shown}, got", *wrong]))
    if not hosts:
        raise ValueError(f"Expected a line 'name slots=count' for each host in {shown}, got none.")
    return tuple(host for _, host in hosts.values())


def parse_filter(text: str, option: str) -> Filter:
    """A filter such as ``host1@host2:0,2``: hosts separated by ``@``, each with the slots after ``:``, or all of them.

    Args:
        text: the filter.
        option: the option that it was given to, for messages.

    Raises:
        ValueError: naming the part that has a different form, or repeats a host or a slot.
    """
    found: dict[str, tuple[int, ...] | None] = {}
    for part in text.split("@"):
        name, colon, listed = part.strip().partition(":")
        slots = [slot.strip() for slot in listed.split(",")] if colon else []
        if not _NAME.fullmatch(name) or not all(map(_SLOT.fullmatch, slots)):
            raise ValueError(f"Expected {option} host1@host2:0,2, got {part!r} in {text!r}.")
        if name in found or len({int(slot) for slot in slots}) < len(slots):
            raise ValueError(f"Expected each host and slot once in {option}, got {part!r} in {text!r}.")
        found[name] = tuple(sorted(map(int, slots))) if colon else None
    return found


def filtered(hosts: Sequence[Host], include: str, exclude: str) -> tuple[Host, ...]:
    """The hosts and slots that filters leave, in the order of the hosts.

    Args:
        hosts: all hosts.
        include: a filter of what to use, or "".
        exclude: a filter of what not to use, or "".

    Raises:
        ValueError: for both filters, for a host or a slot that does not exist, or if nothing is left.
    """
    if include and exclude:
        raise ValueError(f"Expected --include or --exclude, got both: {include!r} and {exclude!r}.")
    if not include and not exclude:
        return tuple(hosts)
    option, text = ("--include", include) if include else ("--exclude", exclude)
    chosen = parse_filter(text, option)
    _check_exist(chosen, hosts, option)
    left = []
    for host in hosts:
        slots = chosen.get(host.name, ())
        named = set(host.slots if slots is None else slots)
        kept = tuple(slot for slot in host.slots if (slot in named) == bool(include))
        if kept:
            left.append(replace(host, slots=kept))
    if not left:
        raise ValueError(f"Expected {option} to leave a slot, got {text!r}, which leaves none.")
    return tuple(left)


def _check_exist(chosen: Filter, hosts: Sequence[Host], option: str) -> None:
    slots_of = {host.name: host.slots for host in hosts}
    for name, slots in chosen.items():
        if name not in slots_of:
            near = difflib.get_close_matches(name, slots_of, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else f" There are {', '.join(slots_of)}."
            raise ValueError(f"Expected hosts of the job in {option}, got {name!r}.{hint}")
        missing = [slot for slot in slots or () if slot not in slots_of[name]]
        if missing:
            raise ValueError(f"Expected slots of {name} in {option}, {list(slots_of[name])}, got {missing}.")


def limited(hosts: Sequence[Host], num_nodes: int | None, nproc: int | None) -> tuple[Host, ...]:
    """The first hosts, and the first slots of each.

    Args:
        hosts: what filters have left.
        num_nodes: how many hosts; None: all.
        nproc: how many processes on each; None: one for each slot.

    Raises:
        ValueError: if there are fewer.
    """
    if num_nodes is not None and not 1 <= num_nodes <= len(hosts):
        raise ValueError(f"Expected --num-nodes from 1 to {len(hosts)}, the number of hosts, got {num_nodes}.")
    used = tuple(hosts[:num_nodes])
    if nproc is None:
        return used
    for host in used:
        if not 1 <= nproc <= len(host.slots):
            raise ValueError(f"Expected --nproc from 1 to {len(host.slots)}, the slots of {host.name}, got {nproc}.")
    return tuple(replace(host, slots=host.slots[:nproc]) for host in used)
