"""``ddp-zero check``: versions, and features that work on this machine. Never initializes a process group."""

import json
import platform
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from ddp_zero.core.engine import probe

FRAMEWORKS = ("transformers", "accelerate", "lightning")

RUN = {
    "torch": ("2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0"),
    "Python": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "system": ("Linux",),
}
"""Versions with which the tests, or their core, have passed; docs/status.md has the outcomes."""

COMBINATIONS = (("gloo", "cpu", True), ("gloo", "cuda", True), ("nccl", "cuda", False))
"""A backend, a device, and True if the tests have been run with them, by more ranks than one."""

_MARK = {True: "yes", False: "no", None: "?"}


def backends() -> Mapping[str, bool]:
    return {name: bool(dist.is_backend_available(name)) for name in ("gloo", "nccl", "xccl", "ucc", "mpi")}


def devices() -> Mapping[str, int]:
    """The number of devices by type; the CPU is one."""
    found = {"cpu": 1}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        found[accelerator.type] = torch.accelerator.device_count()
    return found


def as_text(found: Mapping[str, Any]) -> str:
    lines = [f"{name} {version or 'not installed'}" for name, version in found["versions"].items()]
    lines += ["", "backends: " + ", ".join(f"{name} {_MARK[here]}" for name, here in found["backends"].items())]
    lines += ["devices: " + ", ".join(f"{name} ({count})" for name, count in found["devices"].items())]
    lines += ["", "What this torch and this machine can do:"]
    lines += ["  {:3} {name}: {means} [{detail}]".format(_MARK[one["works"]], **one) for one in found["findings"]]
    lines += ["", "What the tests of ddp_zero have been run with:"]
    for one in found["combinations"]:
        here = "here" if one["is_here"] else "not here"
        lines.append(f"  {_MARK[one['was_run']]:3} {one['backend']} on {one['device']} ({here})")
    lines += [f"  no  {difference}" for difference in found["not_run"]]
    works = "ddp_zero can work here." if found["works"] else f"ddp_zero cannot work here. {found['problem']}"
    return "\n".join([*lines, "", works])


def version_of(distribution: str) -> str | None:
    """The version of an installed distribution, without importing it; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def problem_of(available: Mapping[str, bool]) -> str | None:
    """The reason why the library cannot work with these backends; None if it can."""
    if available["gloo"] or available["nccl"]:
        return None
    return (
        "This PyTorch is built with neither Gloo nor NCCL: its process groups cannot send tensors. "
        "Install a build that has one of them."
    )


def differences(versions: Mapping[str, str | None]) -> list[str]:
    return [
        f"{name} {versions[name]} (run: {', '.join(run)})"
        for name, run in RUN.items()
        if not any(_is_of(str(versions[name]), release) for release in run)
    ]


def _is_of(version: str, release: str) -> bool:
    """True for this release, or a build of it: 2.13.0+cpu is of 2.13.0, and 3.11.4 of 3.11."""
    return version == release or version.startswith((f"{release}.", f"{release}+", f"{release} "))


def report(version: str, findings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Describe this machine, for JSON. Initializes no process group and imports no framework."""
    versions = {
        "ddp_zero": version,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{name: version_of(name) for name in FRAMEWORKS},
    }
    available, present = backends(), devices()
    problem = problem_of(available)
    return {
        "works": problem is None,
        "versions": versions,
        "backends": available,
        "devices": present,
        "findings": findings,
        "combinations": [
            dict(backend=backend, device=device, is_here=available[backend] and device in present, was_run=was_run)
            for backend, device, was_run in COMBINATIONS
        ],
        "not_run": differences(versions),
        "problem": problem,
    }


def main(options: Namespace) -> int:
    """``ddp-zero check [--json]``. Returns 0 if the library can work here, else 1."""
    found = report(version_of("ddp_zero") or "not installed", probe())
    print(json.dumps(found, indent=2) if options.json else as_text(found))
    return 0 if found["works"] else 1
