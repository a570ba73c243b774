"""Every documented key of a DeepSpeed configuration, by path, and the findings for a document."""

from collections.abc import Mapping
from typing import Any

from ddp_zero.deepspeed.config.document import value_at
from ddp_zero.deepspeed.config.keys import AUTO, ConfigError, Finding, Key, Kind, judge
from ddp_zero.deepspeed.config.main_keys import MAIN_KEYS
from ddp_zero.deepspeed.config.other_keys import OTHER_KEYS
from ddp_zero.deepspeed.config.zero_keys import ZERO_KEYS

ROWS: tuple[Key, ...] = (*MAIN_KEYS, *ZERO_KEYS, *OTHER_KEYS)
"""The rows, in the order of the page."""

TABLE: Mapping[str, Key] = {row.path: row for row in ROWS}
"""The rows by path."""


def find(document: Mapping[str, Any]) -> list[Finding]:
    """What becomes of every key of a document, in its order; ``"auto"`` is judged as a value yet to come.

    Raises:
        ConfigError: for keys that DeepSpeed does not have.
    """
    stage = value_at(document, "zero_optimization.stage", 0)
    return [_in_context(finding, stage) for finding in judge(document, TABLE)]


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
            "with ddp_zero.deepspeed.config.auto.Auto."
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


def _in_context(finding: Finding, stage: object) -> Finding:
    """What becomes of a key where that depends on more than its own value."""
    path, value = finding.path, finding.value
    if path == "tensor_parallel" and isinstance(value, Mapping) and value.get("autotp_size", 0) not in (0, 1, None):
        return Finding(path, value, Kind.REFUSED, "Leave it out: only data parallelism is sharded here.")
    if path == "zero_optimization.contiguous_gradients" and value is False and stage == 2:
        return Finding(path, value, Kind.NO_EFFECT, "Stage 2 needs gradient_as_bucket_view of DDP.")
    if path == "data_types.grad_accum_dtype" and stage == 2 and value not in (None, "fp32", "float32", "float"):
        return Finding(path, value, Kind.NO_EFFECT, "Stage 2 always adds up in fp32.")
    return finding
