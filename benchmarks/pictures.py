"""``python -m benchmarks.pictures``: the pictures of docs/insight.md, from two ranks that train a small GPT.

Needs matplotlib, and Chromium for the one of the page.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from benchmarks.race.contestants import MODES
from benchmarks.race.launch import ROOT, run_ranks
from benchmarks.race.measuring import WARM_UP, Job, Measured
from ddp_zero.optimizer import ZeroRedundancyOptimizer
from ddp_zero.tools.timeline import main as timeline

IMAGES = ROOT / "docs" / "images"
TIMELINES = {
    "timeline-after-backward": "ddp_zero stage 2, after backward",
    "timeline-interleaved": "ddp_zero stage 2, interleaved",
}
PROFILED_STEPS = 3
WINDOW = "1150,1010"
CHROMIUM = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def leave_pictures(job: Job) -> dict[str, Any]:
    """On each rank: a trace of every mode, and the page of the last one, from rank 0."""
    folder, is_first = Path(job["folder"]), dist.get_rank() == 0
    for name, mode in TIMELINES.items():
        measured = Measured(MODES[mode], job)
        measured.steps(WARM_UP)
        with profile(activities=[ProfilerActivity.CPU]) as found:
            measured.steps(PROFILED_STEPS)
        optimizer = measured.contestant.optimizer
        assert isinstance(optimizer, ZeroRedundancyOptimizer), "one of ours"
        optimizer.check_agreement()
        if is_first:
            found.export_chrome_trace(str(folder / f"{name}.json"))
            optimizer.explain(html=folder / "explain.html")
    return {"torch": torch.__version__}


def main() -> None:
    """Run the ranks, and draw their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="26m")
    parser.add_argument("--batch-size", type=int, default=4)
    given = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run_ranks({"phase": "pictures", "folder": folder, **vars(given)}, [[], []], {})
        for name, mode in TIMELINES.items():
            title = f"{mode}, {given.model}, rank 0 of 2 on Gloo"
            timeline([f"{folder}/{name}.json", "-o", str(IMAGES / f"{name}.png"), "--title", title])
        photograph(Path(folder) / "explain.html", IMAGES / "explain.png")


def photograph(page: Path, picture: Path) -> None:
    """A picture of a page, as Chromium shows it.

    Raises:
        FileNotFoundError: without Chromium.
    """
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise FileNotFoundError("Expected chromium or google-chrome, got neither. Install one of them.")
    with tempfile.TemporaryDirectory() as profile_folder:
        command = [browser, *CHROMIUM, f"--user-data-dir={profile_folder}", f"--window-size={WINDOW}"]
        subprocess.run([*command, f"--screenshot={picture}", page.as_uri()], check=True, stderr=subprocess.DEVNULL)
    print(picture)


if __name__ == "__main__":
    main()
