"""Which variables a job's hosts are given. Text in, values out."""

import re
from collections.abc import Mapping

PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTHON", "OMP_", "UCX_", "MV2_")
"""Variables of this process that other hosts get as well."""

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse_environment(text: str, shown: object, here: Mapping[str, str]) -> dict[str, str]:
    """The variables of a file: ``NAME=value``, or ``NAME`` for the value that it has here; ``#`` begins a comment line.

    Args:
        text: of the file. A value is the rest of its line, without quotes around it.
        shown: the name of the file in messages.
        here: the variables of this process.

    Raises:
        ValueError: with every line that is of a different form, repeats a name, or names a variable not set here.
    """
    found: dict[str, str] = {}
    wrong = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        name, equals, value = content.removeprefix("export ").strip().partition("=")
        if not _NAME.fullmatch(name):
            wrong.append(f"line {number}: Expected 'NAME=value' or 'NAME', got {content!r:.80}.")
        elif name in found:
            wrong.append(f"line {number}: Expected each variable once, got {name} again.")
        elif not equals and name not in here:
            wrong.append(f"line {number}: Expected {name} to be set here, or '{name}=value', got neither.")
        else:
            found[name] = _unquoted(value) if equals else here[name]
    if wrong:
        raise ValueError("\n  ".join([f"Expected an environment file in {shown}, got", *wrong]))
    return found


def exported(here: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process with one of `PREFIXES`, in alphabetical order."""
    return {name: here[name] for name in sorted(here) if name.startswith(PREFIXES)}


def _unquoted(value: str) -> str:
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "'\""
    return value[1:-1] if is_quoted else value
