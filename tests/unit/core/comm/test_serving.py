"""Ends of scripts, each in a process that is forked from an interpreter in which torch has been imported."""

import subprocess
import sys

from tests import HANG

_ENDS = """
import os, sys, threading, time
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore
from ddp_zero.core.comm import requests, serving
from ddp_zero.core.comm.stay import Stay

ENDINGS = {
    "asked at its end, fails": (600.0, True, True),
    "asked at its end, ends well": (600.0, False, True),
    "asked before, fails": (600.0, True, False),
    "asked before, fails, and does not wait for long": (0.1, True, False),
}

class Slow:
    def answer(self, call):
        is_asked.set()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            store.num_keys()

def ask():
    listener.post(address, {})
    is_asked.wait(2)

class Memory:
    def work(self):
        is_last.wait()

    def __del__(self):
        time.sleep(0.5)  # without the interpreter's lock, as torch frees a tensor
        print("freed", flush=True)

def start_slowly(thread):
    if thread.name == "ddp_zero stay":
        main_has_ended.wait()
        time.sleep(0.5)
    start(thread)

for ending in [*ENDINGS, "frees memory", "starts a thread"]:
    if os.fork() == 0:
        break
    _, status = os.wait()
    print(f"{ending}: {os.waitstatus_to_exitcode(status)}", flush=True)
    print("--", file=sys.stderr, flush=True)
    ending = None

if ending in ENDINGS:
    serving.LAST_SECONDS, fails, is_at_the_end = ENDINGS[ending]
    is_asked, store, slow = threading.Event(), TCPStore("127.0.0.1", 0, 1, True), Slow()
    if is_at_the_end:
        serving.watch_script_end(ask)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    listener, address = requests.listen(dist.group.WORLD, slow)
    if not is_at_the_end:
        ask()
    if fails:
        raise ValueError("expected")
elif ending == "frees memory":
    is_last = threading.Event()
    serving.watch_script_end()
    serving.start_serving("last to hold the memory", Memory().work)
    is_last.set()
elif ending == "starts a thread":
    start, threading.Thread.start = threading.Thread.start, start_slowly
    main_has_ended = threading.Event()
    serving.watch_script_end()
    threading.Thread(target=Stay(requests.Listener(HashStore()), "a/1", [], 5.0).leave).start()
    threading.Thread(target=lambda: (threading.main_thread().join(), main_has_ended.set())).start()
"""


def test_no_thread_is_within_torch_or_about_to_start_when_the_interpreter_ends() -> None:
    """It would abort the process when it comes back, or drop the last reference to an optimizer too late."""
    script = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _ENDS]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=2 * HANG, check=False)
    assert ended.stdout.splitlines() == [
        "asked at its end, fails: 1",
        "asked at its end, ends well: 0",
        "asked before, fails: 1",
        "asked before, fails, and does not wait for long: 1",
        "freed",
        "frees memory: 0",
        "starts a thread: 0",
    ], ended.stderr
    said = [one.rpartition("]: ")[2].strip() for one in ended.stderr.split("--\n")]
    assert said == ["ValueError: expected", "", "ValueError: expected", "ValueError: expected", "", "", ""]
