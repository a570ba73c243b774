"""Compiles and registers the simulated accelerator; its reports."""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
import tempfile
import types
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch._meta_registrations
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

import ddp_zero

HERE = Path(__file__).parent
NAME = "sim"
BACKENDS = ("simccl", "hccl", "mccl")
LIBRARY = str(Path(ddp_zero.__file__).parent) + "/"
SOURCE = HERE / "simulated.cpp"
"""Includes the others: most of the time of compiling goes into torch's headers, which are read once."""
FLAGS = ["-O0", "-std=c++20", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]  # compiling takes longer than all that runs
_PATH = (
    f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # of an environment that is not activated
)


def missing() -> str | None:
    """Why the extension cannot be compiled here, or None."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        return "the simulated accelerator needs a C++ compiler"
    if shutil.which("ninja", path=_PATH) is None:
        return "the simulated accelerator needs ninja"
    if importlib.util.find_spec("setuptools") is None:
        return "the simulated accelerator needs setuptools"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "the simulated accelerator needs the headers of Python"
    return None


@cache
def compiled() -> Any:
    """The extension, compiled if this environment has not compiled these sources before."""
    contents = b"".join(source.read_bytes() for source in sorted((*HERE.glob("*.cpp"), *HERE.glob("*.h"))))
    kind = "".join([torch.__version__, sysconfig.get_config_var("SOABI"), *FLAGS])
    key = hashlib.sha256(contents + kind.encode()).hexdigest()
    folder = Path(tempfile.gettempdir()) / f"ddp_zero-simulated-{os.getuid()}-{key[:16]}"
    folder.mkdir(mode=0o700, exist_ok=True)
    name, built = f"simulated_{key[:16]}", folder / "built"
    with (folder / "building").open("w") as mine:
        fcntl.flock(mine, fcntl.LOCK_EX)  # the kernel drops it with its process; torch's own lock file would stay
        if not built.exists():
            _compile(name, folder)
            built.touch()
    # not torch's loader, which compiles again for the same sources in another folder
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.so")
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def _compile(name: str, folder: Path) -> None:
    import torch.utils.cpp_extension  # needs setuptools

    os.environ["PATH"] = _PATH
    (folder / "lock").unlink(missing_ok=True)
    # without loading it as a module, which happens once per process
    torch.utils.cpp_extension.load(
        name, [str(SOURCE)], build_directory=str(folder), extra_cflags=FLAGS, is_python_module=False
    )


def load(devices: int = 1, late: bool = False, backends: tuple[str, ...] = BACKENDS) -> Any:
    """Make the device ``sim`` known to torch, and its process groups under these names. May be called again.

    Args:
        devices: how many there are.
        late: run work on a stream as late as its waits allow, instead of at once.
        backends: names for ``init_process_group``, as ``"cpu:gloo,sim:simccl"``.

    Returns:
        The extension: ``races()``, ``host_syncs()``, ``messages()``, ``clear_reports()``, ``allocated(device)``.
    """
    extension = _registered(backends)
    extension.configure(devices, late, LIBRARY)
    extension.clear_reports()
    return extension


@cache
def _registered(backends: tuple[str, ...]) -> Any:
    extension = compiled()
    rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _device_module(extension))
    generate_methods_for_privateuse1_backend()
    for backend in backends:
        dist.Backend.register_backend(backend, _builder(extension, backend), extended_api=True, devices=[NAME])
    return extension


def _builder(extension: Any, backend: str) -> Callable[[Any, Any], Any]:
    def build(options: Any, _: Any) -> Any:
        wire = ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        folder = os.environ["SIMULATED_DEVICE_FOLDER"]
        return extension.DeviceGroup(
            options.group_rank,
            options.group_size,
            wire,
            backend,
            options.group_id,
            folder,
            options.timeout.total_seconds(),
        )

    return build


def _device_module(extension: Any) -> types.ModuleType:
    module = types.ModuleType(f"torch.{NAME}")

    def synchronize(device: Any = None) -> None:
        torch.accelerator.synchronize(device)

    def current_stream(device: Any = None) -> torch.Stream:
        return torch.accelerator.current_stream(device)

    module.__dict__.update(
        is_available=lambda: True,
        is_initialized=lambda: True,
        device_count=extension.device_count,
        current_device=extension.current_device,
        set_device=lambda device: extension.set_device(
            device if isinstance(device, int) else torch.device(device).index
        ),
        device=lambda device: torch.accelerator.device_index(torch.device(device).index),
        synchronize=synchronize,
        current_stream=current_stream,
        Stream=torch.Stream,
        stream=lambda stream: contextlib.nullcontext() if stream is None else stream,
        Event=torch.Event,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=extension.manual_seed,
        manual_seed=extension.manual_seed,
        get_rng_state=lambda *_: torch.empty(0, dtype=torch.uint8),  # not kept: nothing here draws after a restart
        set_rng_state=lambda *_: None,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    return module
