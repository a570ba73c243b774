"""Names of a model's values: other ones for the same values, given by prefix or by a function."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

GlobalNames = Mapping[str, str] | Callable[[str], str]
"""Names in the whole model of values that a rank holds: by name or prefix up to a dot, or a function of a name."""


def renamed(names: Iterable[str], rename: GlobalNames, argument: str, owner: str) -> dict[str, str]:
    """The new name of every name.

    Args:
        names: the present ones.
        rename: maps old names or prefixes up to a dot to new ones, or to "" to drop a prefix. If several match, the
            longest is used. Or a function.
        argument: what the user calls ``rename``, for messages.
        owner: what has the names, for messages.

    Raises:
        ValueError: for an old name that matches none, or two names that become the same.
        TypeError: for a function that returns something else than a name.
    """
    names = list(names)
    if callable(rename):
        found = {name: _by_function(name, rename, argument) for name in names}
    else:
        found = _by_prefix(names, rename, argument, owner)
    twice = [name for name, count in Counter(found.values()).items() if count > 1]
    if twice:
        raise ValueError(f"Expected {argument} to keep names apart, got several names of {owner} for {twice}.")
    return found


def _by_prefix(names: Sequence[str], rename: Mapping[str, str], argument: str, owner: str) -> dict[str, str]:
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
        raise ValueError(f"Expected names in {argument} that {owner} has, got {unused}.")
    return found


def _by_function(name: str, rename: Callable[[str], str], argument: str) -> str:
    new = rename(name)
    if not isinstance(new, str) or not new:
        raise TypeError(f"Expected {argument} to return a name for {name!r}, got {new!r:.80}.")
    return new
