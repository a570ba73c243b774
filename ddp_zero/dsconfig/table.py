"""Every documented key of a DeepSpeed configuration, by path, and the findings for a document."""

from collections.abc import Mapping
from typing import Any

from ddp_zero.dsconfig.keys import AUTO, ConfigError, Finding, Key, Kind, judge
from ddp_zero.dsconfig.main_keys import MAIN_KEYS
from ddp_zero.dsconfig.other_keys import OTHER_KEYS
from ddp_zero.dsconfig.zero_keys import ZERO_KEYS

ROWS: tuple[Key, ...] = (*MAIN_KEYS, *ZERO_KEYS, *OTHER_KEYS)
"""The rows, in the order of the page."""

TABLE: Mapping[str, Key] = {row.path: row for row in ROWS}
"""The rows by path."""


def find(document: Mapping[str, Any]) -> list[Finding]:
    """What becomes of every key of a document, in its order; ``"auto"`` is judged as a value yet to come.

    Raises:
        ConfigError: for keys that DeepSpeed does not have.
    """
    findings = judge(document, TABLE)
    return [_parallel(finding) for finding in findings]


def check(document: Mapping[str, Any]) -> list[Finding]:
    """The findings for a document that can be used as it is.

    Raises:
        ConfigError: for keys that DeepSpeed does not have, that are refused here, or whose value is still ``"auto"``.
    """
    findings = find(document)
    wrong = [f"- {one.path} = {one.value!r}: {one.text}" for one in findings if one.kind is Kind.REFUSED]
    if wrong:
        raise ConfigError("\n".join(["Expected a configuration without what is not done here, got:", *wrong]))
    left = [path for path in autos(document) if not _takes_auto(path)]
    if left:
        raise ConfigError(
            f'Expected numbers in place of "auto", got "auto" for {", ".join(left)}. Write the values, or fill them '
            "with ddp_zero.dsconfig.auto.Auto."
        )
    return findings


def autos(document: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The paths whose value is ``"auto"``."""
    found = list[str]()
    for name, value in document.items():
        if isinstance(value, Mapping):
            found += autos(value, f"{prefix}{name}.")
        elif value == AUTO:
            found.append(f"{prefix}{name}")
    return found


def _takes_auto(path: str) -> bool:
    return path in TABLE and TABLE[path].takes_auto


def _parallel(finding: Finding) -> Finding:
    """The one block whose switch is a number: tensor parallelism."""
    size = finding.value.get("autotp_size", 0) if isinstance(finding.value, Mapping) else 0
    if finding.path != "tensor_parallel" or size in (0, 1, None):
        return finding
    return Finding(finding.path, finding.value, Kind.REFUSED, "Only data parallelism is sharded here.")
