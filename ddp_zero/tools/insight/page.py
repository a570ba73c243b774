"""``opt.explain(html=...)``: who owns what, per rank and bucket, drawn as a page that needs no other file."""

import html
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template

from ddp_zero.core.plan.ownership import is_cut
from ddp_zero.core.plan.shard_plan import Bucket, ParameterSpec, Segment, ShardPlan
from ddp_zero.core.step.report import imbalance, share_of
from ddp_zero.tools.insight.optimizer_parts import OptimizerParts

_HUES = 8
_PAGE = Template("""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light; }
body { font: 14px/1.45 system-ui, sans-serif; color: #1b1f24; margin: 0 auto; max-width: 1100px; padding: 24px; }
h1 { font-size: 20px; margin: 0 0 4px; }
h2 { font-size: 16px; margin: 28px 0 8px; }
p { margin: 4px 0; }
table { border-collapse: collapse; width: 100%; }
th, td { padding: 3px 8px; text-align: right; border-bottom: 1px solid #e3e6ea; font-variant-numeric: tabular-nums; }
th { font-weight: 600; }
th:first-child, td:first-child, td.name, th.name { text-align: left; }
.row { display: flex; align-items: center; margin: 3px 0; }
.what { flex: 0 0 92px; }
.size { flex: 0 0 92px; text-align: right; font-variant-numeric: tabular-nums; }
.track { flex: 1 1 auto; min-width: 0; }
.bar { display: flex; gap: 2px; height: 24px; min-width: 12px; }
.own { display: flex; min-width: 3px; overflow: hidden; }
.part { min-width: 0; box-sizing: border-box; }
.wide { border-right: 1px solid rgba(255, 255, 255, .65); }
.part:last-child { border-right: 0; }
.key { display: inline-block; width: 14px; height: 14px; border-radius: 3px; margin-right: 6px; vertical-align: -2px; }
.legend span.rank { margin-right: 18px; white-space: nowrap; }
.r0 { background: #3b6fb6; } .r1 { background: #d9822b; } .r2 { background: #3f8f5f; } .r3 { background: #a04a8f; }
.r4 { background: #6b7785; } .r5 { background: #b8423a; } .r6 { background: #2a9aa8; } .r7 { background: #8a6d1f; }
details { margin: 2px 0 10px 92px; }
summary { cursor: pointer; color: #4b5560; }
pre { background: #f5f6f8; padding: 12px; white-space: pre-wrap; font-size: 12px; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$subtitle</p>
<p class="legend">$legend</p>
<h2>Ranks</h2>
<table id="ranks">
<tr><th>rank</th><th>parameters</th><th>elements</th><th>bytes</th><th>trainable bytes</th></tr>
$ranks
</table>
<p>Largest share of trainable bytes over the mean share: $imbalance.</p>
<h2>Buckets</h2>
<p>Each bar is a bucket, as long as its bytes; colours are the ranks that own its parts, divisions are parameters.</p>
<div id="buckets">
$buckets
</div>
$dormant
<h2>As text</h2>
<pre>$text</pre>
</body>
</html>
""")


def write_page(path: str | os.PathLike[str], running: OptimizerParts, text: str) -> None:
    """Write the page of an optimizer.

    Args:
        path: of the file.
        running: the optimizer.
        text: what `explain` says.
    """
    sharded = running.sharded
    everyone = sharded.everyone
    names = [sharded.table.name(index) for index in range(len(sharded.table))]
    title = f"{type(sharded.inner).__name__}, sharded over {sharded.comm.world_size} ranks"
    subtitle = f"ZeRO stage {running.stage}, seen from {everyone.name(everyone.group_rank)}"
    Path(path).write_text(page_of(sharded.plan, names, title, subtitle, text), encoding="utf-8")


def page_of(plan: ShardPlan, names: Sequence[str], title: str, subtitle: str, text: str) -> str:
    """The page of a plan.

    Args:
        plan: who owns what.
        names: of its parameters.
        title: of the page.
        subtitle: below it.
        text: shown at its end.
    """
    ranks = range(plan.world_size)
    largest = max((_bytes_of(plan, bucket) for bucket in plan.buckets), default=1)
    frozen = [names[index] for index, spec in enumerate(plan.specs) if not spec.active]
    dormant = f"<p>Frozen, in no bucket: {html.escape(', '.join(frozen))}.</p>" if frozen else ""
    return _PAGE.substitute(
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        legend="".join(
            f'<span class="rank"><span class="key r{rank % _HUES}"></span>rank {rank}</span>' for rank in ranks
        ),
        ranks="\n".join(_rank_row(plan, rank) for rank in ranks),
        imbalance=f"{imbalance(plan):.3f}",
        buckets="\n".join(_bucket_rows(plan, bucket, names, largest) for bucket in plan.buckets),
        dormant=dormant,
        text=html.escape(text),
    )


def _rank_row(plan: ShardPlan, rank: int) -> str:
    share = share_of(plan, rank)
    numbers = (share.parameters, share.elements, share.nbytes, share.trained)
    key = f'<span class="key r{rank % _HUES}"></span>'
    return f"<tr><td>{key}{rank}</td>{''.join(f'<td>{number:,}</td>' for number in numbers)}</tr>"


def _bucket_rows(plan: ShardPlan, bucket: Bucket, names: Sequence[str], largest: int) -> str:
    total = _bytes_of(plan, bucket)
    owned = "".join(_owned(plan, segment, names, total) for segment in bucket.segments if segment.params)
    rows = "\n".join(
        f'<tr><td class="name">{html.escape(names[param])}</td><td>{segment.owner}</td><td>{start:,} to {stop:,}</td>'
        f"<td>{nbytes:,}</td></tr>"
        for segment in bucket.segments
        for param, start, stop, nbytes in _parts(plan, segment)
    )
    return (
        f'<div class="row bucket" data-bucket="{bucket.index}"><div class="what">bucket {bucket.index}</div>'
        f'<div class="track"><div class="bar" style="width:{_percent(total, largest)}">{owned}</div></div>'
        f'<div class="size">{_short(total)}</div></div>\n'
        f"<details><summary>{sum(len(segment.params) for segment in bucket.segments)} parameters or parts, "
        f'{html.escape(bucket.kind)}</summary><table><tr><th class="name">parameter</th><th>rank</th><th>elements</th>'
        f"<th>bytes</th></tr>\n{rows}\n</table></details>"
    )


def _owned(plan: ShardPlan, segment: Segment, names: Sequence[str], total: int) -> str:
    parts = list(_parts(plan, segment))
    mine = sum(nbytes for *_, nbytes in parts)
    divisions = "".join(
        f'<div class="part{" wide" if 200 * part[-1] > total else ""}" style="flex:{max(part[-1], 1)} 1 0" '
        f'title="{_title(plan, segment, names, part)}"></div>'
        for part in parts
    )
    return (
        f'<div class="own r{segment.owner % _HUES}" data-rank="{segment.owner}" style="flex:{max(mine, 1)} 1 0">'
        f"{divisions}</div>"
    )


def _title(plan: ShardPlan, segment: Segment, names: Sequence[str], part: tuple[int, int, int, int]) -> str:
    param, start, stop, nbytes = part
    which = f", elements {start:,} to {stop:,}" if is_cut(plan.pieces[param]) else ""
    return html.escape(f"{names[param]}{which}: {_short(nbytes)}, rank {segment.owner}")


def _parts(plan: ShardPlan, segment: Segment) -> Iterator[tuple[int, int, int, int]]:
    """Parameter, first and last element, and bytes, of all that a segment holds."""
    for param, (start, stop) in zip(segment.params, segment.ranges, strict=True):
        yield param, start, stop, _bytes_of_elements(plan.specs[param], stop - start)


def _bytes_of(plan: ShardPlan, bucket: Bucket) -> int:
    return sum(nbytes for segment in bucket.segments for *_, nbytes in _parts(plan, segment))


def _bytes_of_elements(spec: ParameterSpec, numel: int) -> int:
    return numel * spec.nbytes // spec.numel if numel else 0


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.3f}%" if whole else "0%"


def _short(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
