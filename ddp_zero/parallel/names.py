"""Names of parameters, renamed: by their prefixes, or by a function of the user's."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

GlobalNames = Mapping[str, str] | Callable[[str], str]
"""Maps a rank's names to names in the whole model: by full name or dotted prefix, or by a function of the name."""


def rename_all(names: Iterable[str], rename: GlobalNames, argument: str, owner: str) -> dict[str, str]:
    """Map every name to its new name.

    ``rename`` maps old names or dotted prefixes to new names, or to "" to drop a prefix; the longest match wins. Or it
    is a function of the old name. ``argument`` is the user's name for it, for messages, as is ``owner`` of the names.
    ValueError for an old name that matches nothing, or two names that become equal; TypeError if a function does not
    return a nonempty string.
    """
    names = list(names)
    if callable(rename):
        found = {}
        for name in names:
            new = found[name] = rename(name)
            if not isinstance(new, str) or not new:
                raise TypeError(f"Expected {argument} to return a name for {name!r}, got {new!r:.80}. [ZERO-813]")
    else:
        found = _by_prefix(names, rename, argument, owner)
    twice = [name for name, count in Counter(found.values()).items() if count > 1]
    if twice:
        raise ValueError(
            f"Expected {argument} to give every parameter a name of its own, got several parameters of {owner} under "
            f"{twice}. [ZERO-813]"
        )
    return found


def _by_prefix(names: Sequence[str], rename: Mapping[str, str], argument: str, owner: str) -> dict[str, str]:
    """New names by old ones, each by the longest prefix in ``rename``; ValueError for a prefix that fits no name."""
    found, used = {}, set()
    for name in names:
        olds = [old for old in rename if name == old or name.startswith(f"{old}.")]
        if not olds:
            found[name] = name
            continue
        old = max(olds, key=len)
        used.add(old)
        found[name] = f"{rename[old]}{name[len(old) :]}".removeprefix(".")
    unused = sorted(set(rename) - used)
    if unused:
        raise ValueError(f"Expected names in {argument} that {owner} has, got {unused}. [ZERO-813]")
    return found
