"""The nodes of a Slurm allocation, from the variables that Slurm sets in it. Text in, values out."""

import re
from collections.abc import Iterator, Mapping

from ddp_zero.launch.hosts import Host

_MOST_NODES = 100_000
_ITEM = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_RANGES = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def is_allocation(environment: Mapping[str, str]) -> bool:
    """Whether a process with these variables runs in a Slurm allocation."""
    return bool(environment.get("SLURM_JOB_ID") and _nodelist(environment))


def hosts_of_allocation(environment: Mapping[str, str], nproc: int | None) -> tuple[Host, ...]:
    """The allocated nodes, with a slot for each GPU that Slurm gives, or else for each task.

    Args:
        environment: the variables.
        nproc: slots of each node, instead of what Slurm says; or None.

    Raises:
        ValueError: if this is no allocation, or a variable is not of Slurm's form.
    """
    if not is_allocation(environment):
        raise ValueError("Expected SLURM_JOB_ID and SLURM_JOB_NODELIST, got none. Start this within salloc or sbatch.")
    names = expand_nodelist(_nodelist(environment))
    counts = [nproc] * len(names) if nproc is not None else _slots(environment, len(names))
    return tuple(Host(name, tuple(range(count))) for name, count in zip(names, counts, strict=True))


def port_of_allocation(environment: Mapping[str, str]) -> int:
    """A port, 20000 to 29999, that differs between jobs whose numbers are near each other."""
    return 20000 + int(re.sub(r"\D", "", environment.get("SLURM_JOB_ID", "")) or 0) % 10000


def expand_nodelist(text: str) -> list[str]:
    """The names in a list such as ``gpu[01-03,7],login``.

    Raises:
        ValueError: if it is not of this form, or repeats a name.
    """
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise ValueError(f"Expected a list of nodes such as 'gpu[01-03,7],login', got {text!r}.")
    names = [name for item in items for name in _expand(item, text)]
    if len(set(names)) < len(names):
        raise ValueError(f"Expected each node once, got {text!r}.")
    return names


def _expand(item: str, text: str) -> Iterator[str]:
    match = _RANGES.search(item)
    if match is None:
        yield item
        return
    for one in match[1].split(","):
        bounds = _RANGE.fullmatch(one)
        if bounds is None:
            raise ValueError(f"Expected numbers and ranges in brackets, got {one!r} in {text!r}.")
        first, last = int(bounds[1]), int(bounds[2] or bounds[1])
        if not first <= last < first + _MOST_NODES:
            raise ValueError(f"Expected a range that goes up, got {one!r} in {text!r}.")
        for number in range(first, last + 1):
            yield from _expand(f"{item[: match.start()]}{number:0{len(bounds[1])}d}{item[match.end() :]}", text)


def _slots(environment: Mapping[str, str], nodes: int) -> list[int]:
    """How many slots each node has."""
    for name in ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"):
        count = environment.get(name, "").rpartition(":")[2]
        if count.isdecimal() and int(count):
            return [int(count)] * nodes
    text = environment.get("SLURM_TASKS_PER_NODE", "1")
    matches = [_COUNT.fullmatch(part) for part in text.split(",")]
    counts = [count for match in matches if match for count in [int(match[1])] * int(match[2] or 1)]
    if not all(matches) or len(counts) != nodes or not all(counts):
        raise ValueError(f"Expected SLURM_TASKS_PER_NODE for {nodes} nodes, got {text!r}. Say --nproc.")
    return counts


def _nodelist(environment: Mapping[str, str]) -> str:
    return environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST", "")
