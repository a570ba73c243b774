"""The page of ``opt.explain(html=...)``: what is on it, and what a real browser makes of it."""

import html
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ddp_zero.core.plan.partition import GroupRank
from ddp_zero.core.plan.shard_plan import ParameterSpec, ShardPlan, plan_standalone
from ddp_zero.insight.explain import page_of
from tests import HANG

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--window-size=1150,900"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
MEASURE = """
<script>
const found = [];
for (const bucket of document.querySelectorAll(".bucket")) {
  const bar = bucket.querySelector(".bar").getBoundingClientRect();
  const own = [...bucket.querySelectorAll(".own")].map(one => [one.dataset.rank, one.getBoundingClientRect()]);
  const overlaps = own.some(([_, box], i) => i > 0 && box.left < own[i - 1][1].right);
  const within = own.every(([_, box]) => box.left >= bar.left - 1 && box.right <= bar.right + 1);
  const label = bucket.querySelector(".what").getBoundingClientRect();
  const widths = own.map(([rank, box]) => rank + ":" + Math.round(box.width)).join(" ");
  const apart = label.right <= bar.left && bar.right <= bucket.querySelector(".size").getBoundingClientRect().left + 1;
  found.push([Math.round(bar.width), widths, overlaps, within, apart, bar.height].join("/"));
}
const fits = document.documentElement.scrollWidth <= window.innerWidth;
const parts = document.querySelectorAll(".part").length;
const colour = getComputedStyle(document.querySelector(".own[data-rank='0']")).backgroundColor;
document.title = JSON.stringify({found, fits, parts, colour});
</script>
"""


def plan_of(numels: list[int], owners: list[int], frozen: tuple[int, ...] = ()) -> ShardPlan:
    specs = [ParameterSpec(n, 4 * n, "cpu/float32", index not in frozen) for index, n in enumerate(numels)]
    return plan_standalone(specs, [GroupRank(owner) for owner in owners], max(owners) + 1, 4_000)


NAMES = ["embedding.<weight>", "a.weight", "a.bias", "b.weight", "b.bias", "frozen & still"]
PLAN = plan_of([1200, 600, 30, 500, 1, 40], [0, 1, 1, 2, 2, 0], frozen=(5,))


def page(plan: ShardPlan = PLAN, names: list[str] = NAMES) -> str:
    return page_of(plan, names, "AdamW, 3 ranks", "stage 2 <seen>", "imbalance: 1 & more")


def test_all_that_is_owned_is_on_the_page_and_nothing_comes_from_elsewhere() -> None:
    text = page()
    for name in NAMES:
        assert html.escape(name) in text
    assert "<weight>" not in text, "names are escaped"
    assert "Frozen, in no bucket: frozen &amp; still." in text
    assert not re.search(r"""(src|href|url)\s*[=(]|https?:|@import|<script|<link|<img""", text)
    assert re.search(r"<td>.*2</td><td>2</td><td>501</td><td>2,004</td><td>2,004</td>", text), "rank 2"
    assert text.count('class="row bucket"') == len(PLAN.buckets) > 1
    assert "as long as its bytes" in text


def browse(path: Path, *more: str) -> str:
    """The page's document after its scripts have run."""
    assert BROWSER is not None, "skipped otherwise"
    command = [BROWSER, *FLAGS, f"--user-data-dir={path.parent / 'profile'}", *more, "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="there is no chromium or google-chrome")
def test_a_browser_draws_bars_of_the_right_sizes_that_do_not_overlap(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page().replace("</body>", MEASURE + "</body>"))
    (title,) = re.findall(r"<title>(.*)</title>", browse(path))
    found = html.unescape(title)
    assert '"fits":true' in found, found
    assert f'"parts":{sum(len(segment.params) for bucket in PLAN.buckets for segment in bucket.segments)}' in found
    assert '"colour":"rgb(59, 111, 182)"' in found, found
    bars = re.findall(r'"(\d+)/([^"/]*)/false/true/true/24"', found)
    assert len(bars) == len(PLAN.buckets), found
    nbytes = [[4 * segment.numel for segment in bucket.segments] for bucket in PLAN.buckets]
    longest = max(int(width) for width, _ in bars)
    for (width, owned), sizes in zip(bars, nbytes, strict=True):
        assert int(width) == pytest.approx(longest * sum(sizes) / max(map(sum, nbytes)), abs=2)
        drawn = {int(rank): int(size) for rank, size in (one.split(":") for one in owned.split())}
        assert set(drawn) == {rank for rank, size in enumerate(sizes) if size}
        for rank, size in drawn.items():
            assert size == pytest.approx(int(width) * sizes[rank] / sum(sizes), abs=6)
