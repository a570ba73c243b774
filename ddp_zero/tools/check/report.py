"""What ``python -m ddp_zero`` prints, as text or as JSON."""

import json
import platform
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

import torch

from ddp_zero.tools.check.probes import PROBES, Finding, Probe, backends, devices, find

FRAMEWORKS = ("transformers", "accelerate", "lightning")

RUN = {
    "torch": ("2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.0", "2.12.1", "2.13.0", "2.14.0", "2.14.1", "2.15.0"),
    "Python": ("3.10", "3.11", "3.12", "3.13", "3.14"),
    "system": ("Linux",),
}
"""With what the tests, or the core of them, have passed; docs/status.md has the outcomes."""

COMBINATIONS = (("gloo", "cpu", True), ("gloo", "cuda", False), ("nccl", "cuda", False))
"""A backend, a device, and whether the tests have been run with them."""

_MARK = {True: "yes", False: "no", None: "?"}


@dataclass(frozen=True)
class Combination:
    """A backend and a type of device.

    Attributes:
        backend: of `torch.distributed`.
        device: the type.
        is_here: whether this machine and this torch have both.
        was_run: whether the tests of this library have been run with them.
    """

    backend: str
    device: str
    is_here: bool
    was_run: bool


@dataclass(frozen=True)
class Report:
    """All that is printed.

    Attributes:
        versions: of this library, Python, torch, the system and the frameworks; None for one that is not installed.
        backends: of `torch.distributed`, and whether this build of torch has them.
        devices: how many there are, by type.
        findings: see `probes.find`.
        combinations: see `COMBINATIONS`.
        not_run: in what this machine differs from those that the tests have been run on.
        problem: why the library cannot work here; None if it can.
    """

    versions: Mapping[str, str | None]
    backends: Mapping[str, bool]
    devices: Mapping[str, int]
    findings: Sequence[Finding]
    combinations: Sequence[Combination]
    not_run: Sequence[str]
    problem: str | None

    def as_json(self) -> str:
        """The report as one JSON object."""
        return json.dumps({"works": self.problem is None, **asdict(self)}, indent=2)

    def as_text(self) -> str:
        """The report for people."""
        lines = [f"{name} {version or 'not installed'}" for name, version in self.versions.items()]
        lines += ["", "backends: " + ", ".join(f"{name} {_MARK[here]}" for name, here in self.backends.items())]
        lines += ["devices: " + ", ".join(f"{name} ({count})" for name, count in self.devices.items())]
        lines += ["", "What this torch and this machine can do:"]
        lines += [f"  {_MARK[one.works]:3} {one.name}: {one.means} [{one.detail}]" for one in self.findings]
        lines += ["", "What the tests of ddp_zero have been run with:"]
        for one in self.combinations:
            here = "here" if one.is_here else "not here"
            lines.append(f"  {_MARK[one.was_run]:3} {one.backend} on {one.device} ({here})")
        lines += [f"  no  {difference}" for difference in self.not_run]
        works = "ddp_zero can work here." if self.problem is None else f"ddp_zero cannot work here. {self.problem}"
        return "\n".join([*lines, "", works])


def version_of(distribution: str) -> str | None:
    """The version of what is installed under this name, without importing it; None if nothing is."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def problem_of(available: Mapping[str, bool]) -> str | None:
    """Why the library cannot work with these backends; None if it can."""
    if available["gloo"] or available["nccl"]:
        return None
    return (
        "Expected a PyTorch built with Gloo or NCCL, got one with neither: its process groups cannot send tensors. "
        "Install a build that has one of them."
    )


def differences(versions: Mapping[str, str | None]) -> list[str]:
    """In what these versions differ from those that the tests have been run with."""
    return [
        f"{name} {versions[name]} (run: {', '.join(run)})"
        for name, run in RUN.items()
        if not any(_is_of(str(versions[name]), release) for release in run)
    ]


def _is_of(version: str, release: str) -> bool:
    """Whether a version is this release, or a build of it: 2.13.0+cpu is of 2.13.0, and 3.11.4 of 3.11."""
    return version == release or version.startswith((f"{release}.", f"{release}+", f"{release} "))


def report(version: str, probes: Sequence[Probe] = PROBES) -> Report:
    """Look at this machine. Initializes no process group and imports no framework.

    Args:
        version: of this library.
        probes: what to try.
    """
    versions = {
        "ddp_zero": version,
        "Python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        **{name: version_of(name) for name in FRAMEWORKS},
    }
    available, present = backends(), devices()
    return Report(
        versions=versions,
        backends=available,
        devices=present,
        findings=find(probes),
        combinations=[
            Combination(backend, device, available[backend] and device in present, was_run)
            for backend, device, was_run in COMBINATIONS
        ],
        not_run=differences(versions),
        problem=problem_of(available),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m ddp_zero check [--json]``.

    Args:
        arguments: of the command line; None: those of this process.

    Returns:
        0 if the library can work here, 1 if not.
    """
    parser = ArgumentParser(prog="python -m ddp_zero check", description="Versions, and what works on this machine.")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    options = parser.parse_args(arguments)
    found = report(version_of("ddp_zero") or "not installed")
    print(found.as_json() if options.json else found.as_text())
    return 0 if found.problem is None else 1
