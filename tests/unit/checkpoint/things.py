"""Things that are saved."""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import HANG


def at_once(call: Callable[[], Any]) -> Any:
    """What a call returns or raises; a failure if it waits for something."""
    outcome: list[tuple[Any, Exception | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except Exception as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout=HANG)
    if not outcome:
        pytest.fail("It waits.")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result


def thing(path: Path, kind: str) -> Path:
    """Something that is no regular file."""
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to nowhere":
        path.symlink_to(path.with_name("nothing"))
    elif kind == "link to a file":
        path.with_name("secret").write_text("{}")
        path.symlink_to(path.with_name("secret"))
    elif kind == "link to an endless device":
        path.symlink_to("/dev/zero")
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "socket":
        here = Path.cwd()
        os.chdir(path.parent)  # the address of a socket is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(here)
    return path
