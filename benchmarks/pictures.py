"""``python -m benchmarks.pictures``: the picture of docs/insight.md, of two ranks that train a GPT. Needs Chromium."""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.race.contestants import MODES
from benchmarks.race.launch import ROOT, run_ranks
from benchmarks.race.measuring import WARM_UP, Job, Measured
from ddp_zero.optimizer import ZeroRedundancyOptimizer

IMAGES = ROOT / "docs" / "images"
MODE = "ddp_zero stage 2, interleaved"
WINDOW = "1150,1010"
CHROMIUM = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def leave_pictures(job: Job) -> dict[str, Any]:
    """On rank 0: the page of the plan."""
    measured = Measured(MODES[MODE], job)
    measured.steps(WARM_UP)
    optimizer = measured.contestant.optimizer
    assert isinstance(optimizer, ZeroRedundancyOptimizer), "one of ours"
    if dist.get_rank() == 0:
        optimizer.explain(html=Path(job["folder"]) / "explain.html")
    return {"torch": torch.__version__}


def main() -> None:
    """Run the ranks, and photograph the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="26m")
    parser.add_argument("--batch-size", type=int, default=4)
    given = parser.parse_args()
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run_ranks({"phase": "pictures", "folder": folder, **vars(given)}, [[], []], {})
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
