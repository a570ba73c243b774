import subprocess
import sys

import pytest

from tests import HANG

_IS_ASKED_AS_THE_SCRIPT_ENDS = """
import sys, threading, time
import torch.distributed as dist
from torch.distributed import TCPStore
from ddp_zero.core.comm import bell as bells, serving

class Slow:
    def answer(self, call):
        is_asked.set()
        until = time.monotonic() + 2
        while time.monotonic() < until:
            store.num_keys()

def ask():
    bell.ring(address, {})
    is_asked.wait(2)

serving.LAST_SECONDS = float(sys.argv[1])
is_asked, store, slow = threading.Event(), TCPStore("127.0.0.1", 0, 1, True), Slow()
if sys.argv[3] == "at its end":
    serving.watch_the_end(ask)
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
bell, address = bells.listen(dist.group.WORLD, slow)
if sys.argv[3] == "before":
    ask()
if sys.argv[2] == "fails":
    raise ValueError("expected")
"""


@pytest.mark.parametrize(
    ("limit", "ending", "asked"),
    [
        (HANG, "fails", "at its end"),
        (HANG, "ends well", "at its end"),
        (HANG, "fails", "before"),
        (0.1, "fails", "before"),
    ],
)
def test_no_thread_is_within_torch_when_the_interpreter_ends(limit: float, ending: str, asked: str) -> None:
    """It would abort the process when it comes back."""
    script = [sys.executable, "-c", _IS_ASKED_AS_THE_SCRIPT_ENDS, str(limit), ending, asked]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=2 * HANG, check=False)
    assert ended.returncode == int(ending == "fails"), ended.stderr
    assert ended.stderr.endswith("ValueError: expected\n" if ending == "fails" else ""), ended.stderr


_FREES_WHEN_A_THREAD_ENDS = """
import threading, time
from ddp_zero.core.comm import serving

class Memory:
    def work(self):
        is_last.wait()

    def __del__(self):
        time.sleep(0.5)  # without the interpreter's lock, as torch frees a tensor
        print("freed", flush=True)

is_last = threading.Event()
serving.watch_the_end()
serving.start_serving("last to hold the memory", Memory().work)
is_last.set()
"""


def test_a_thread_has_freed_its_memory_when_the_interpreter_ends() -> None:
    """A thread that is left alone once its work is done may still drop the last reference to an optimizer."""
    script = [sys.executable, "-c", _FREES_WHEN_A_THREAD_ENDS]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=HANG, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "freed\n", "")
