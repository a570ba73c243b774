"""Ownership for users: `ZeroRedundancyOptimizer.owner_of` and ``explain``.

The latter shows the shards of all ranks, their balance, and bytes of a step, as text or a page.
"""

import html
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import Template

from torch import Tensor

from ddp_zero.core.engine import Engine
from ddp_zero.core.plan import Bucket, GroupRank, Segment, ShardPlan, is_cut
from ddp_zero.core.step import Shard
from ddp_zero.insight.stats import imbalance, share_of


def explain(engine: Engine, flat: bool, page: str | os.PathLike[str] | None) -> str:
    """Describe an optimizer, and write the page if it has a path. Never communicates."""
    text, shard = describe(engine, flat), engine.shard
    if page is not None:
        names = [shard.table.name(index) for index in range(len(shard.table))]
        title = f"{type(shard.inner).__name__}, sharded over {shard.comm.world_size} ranks"
        subtitle = f"ZeRO stage {engine.stage}, seen from {shard.everyone.name(shard.everyone.group_rank)}"
        Path(page).write_text(page_of(shard.plan, names, title, subtitle, text), encoding="utf-8")
    return text


def owner_of(shard: Shard, param: Tensor) -> GroupRank:
    index = shard.table.index_of.get(param)
    if index is None:
        raise ValueError(f"The parameter of shape {list(param.shape)} is not a parameter of this optimizer. [ZERO-119]")
    pieces, comm = shard.binding.pieces[index], shard.comm
    if is_cut(pieces):
        shared = ", ".join(f"{comm.name(piece.owner)} elements {piece.start} to {piece.stop}" for piece in pieces)
        raise ValueError(f"{shard.table.label(index)} has several owners: {shared}. [ZERO-119]")
    owner = shard.everyone.place_of(comm.global_rank(pieces[0].owner))
    assert owner is not None, "a shard group is part of everyone"
    return owner


def describe(engine: Engine, flat: bool) -> str:
    shard, comm, ranks = engine.shard, engine.shard.comm, engine.shard.ranks
    storage = "flat storage" if flat else "storage of their own"
    mode = "overlapped with DDP" if engine.overlaps else "standalone"
    lines = [
        f"ZeroRedundancyOptimizer({type(shard.inner).__name__}), stage {engine.stage}, {mode}: "
        f"rank {ranks.everyone.group_rank} of {ranks.everyone.world_size}, parameters in {storage}"
    ]
    if ranks.replicas is not None:
        lines.append(
            f"sharded over the {comm.world_size} ranks of each of {ranks.num_replicas} shard groups: this is "
            f"{comm.name(comm.group_rank)} of group {ranks.replica}; the table shows shard ranks"
        )
    division = shard.binding.partition
    if division.why:
        lines.append(f'partition="auto" is "{division.name}" here: {division.why}')
    if engine.hook is not None:
        lines += engine.hook.describe()
    if engine.decision.options.sync == "forward":
        where = "in the next forward pass" if shard.leaves_syncs else "at the end of the step: see sync="
        lines.append(f"parameters of others are waited for {where}")
    lines += shard.stepped.residence.describe()
    plan = shard.plan
    state = engine.memory_parts()["state_bytes"]
    lines.append(describe_shards(plan, comm.group_rank, state))
    if division.max_byte_imbalance is not None:
        lines += describe_costs(plan, division.max_byte_imbalance)
    return "\n".join([*lines, draw_buckets(plan)])


def describe_costs(plan: ShardPlan, max_byte_imbalance: float) -> list[str]:
    """Each rank's share of the cost and of the bytes of a step, as multiples of the mean; nothing without costs."""
    costs = plan.cost_loads()
    if not any(costs):
        return []
    trained = [share_of(plan, rank).trained for rank in range(plan.world_size)]
    rows = [
        f"{label:>15} " + "".join(f"{load * plan.world_size / sum(loads):>20.3f}" for load in loads)
        for label, loads in (("cost / mean", costs), ("bytes / mean", trained))
        if sum(loads)
    ]
    return [
        f"{'load of a step':>15} " + "".join(f"{f'rank {rank}':>20}" for rank in range(plan.world_size)),
        *rows,
        f"dealt by cost: bytes of the busiest rank are at most {max_byte_imbalance:g} times the mean "
        "(max_byte_imbalance), or as in the plan by bytes",
    ]


def describe_shards(plan: ShardPlan, group_rank: int, own_state_bytes: int) -> str:
    """A table of each rank's owned parameters; a star marks this rank, whose state bytes estimate all others'."""
    shares = [share_of(plan, rank) for rank in range(plan.world_size)]
    trained = [share.trained for share in shares]
    lines = [f"{'rank':>6} {'parameters':>11} {'elements':>15} {'bytes':>15} {'state bytes now':>17}"]
    for rank, share in enumerate(shares):
        state = f"{own_state_bytes:,}" if rank == group_rank else _estimate(trained, group_rank, rank, own_state_bytes)
        mark = "*" if rank == group_rank else " "
        lines.append(f"{mark}{rank:>5} {share.parameters:>11,} {share.elements:>15,} {share.nbytes:>15,} {state:>17}")
    lines.append(f"imbalance: {imbalance(plan):.3f} (largest share of trainable bytes / mean share)")
    dormant = sum(not spec.active for spec in plan.specs)
    sent = trained[group_rank] * (plan.world_size - 1)
    lines.append(f"sync: {len(plan.buckets)} buckets, {sent:,} bytes sent by this rank per step")
    if dormant:
        lines.append(f"frozen: {dormant} parameters, not sent until they are trainable")
    if plan.world_size > 1:
        lines.append("* this rank; ~ estimated from this rank's state bytes per parameter byte")
    return "\n".join(lines)


def draw_buckets(plan: ShardPlan) -> str:
    """Buckets x ranks: the number of elements and parameters that each rank owns of each bucket."""
    lines = ["bucket " + "".join(f"{f'rank {rank}':>20}" for rank in range(plan.world_size))]
    for bucket in plan.buckets:
        cells = [
            f"{segment.numel:,} in {len(segment.params)}" if segment.params else "-" for segment in bucket.segments
        ]
        lines.append(f"{bucket.index:>6} " + "".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


def _estimate(trained: list[int], group_rank: int, rank: int, own_state_bytes: int) -> str:
    if not trained[group_rank]:
        return "unknown" if trained[rank] else "0"
    return f"~{round(own_state_bytes * trained[rank] / trained[group_rank]):,}"


# The page

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


def page_of(plan: ShardPlan, names: Sequence[str], title: str, subtitle: str, text: str) -> str:
    """The page of a plan, whose parameters have these names; ``text`` is shown at its end."""
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
    key = f'<span class="key r{rank % _HUES}"></span>'
    return f"<tr><td>{key}{rank}</td>{''.join(f'<td>{number:,}</td>' for number in share_of(plan, rank))}</tr>"


def _bucket_rows(plan: ShardPlan, bucket: Bucket, names: Sequence[str], largest: int) -> str:
    total = _bytes_of(plan, bucket)
    width = f"{100 * total / largest:.3f}%" if largest else "0%"
    owned = "".join(_segment_line(plan, segment, names, total) for segment in bucket.segments if segment.params)
    rows = "\n".join(
        f'<tr><td class="name">{html.escape(names[param])}</td><td>{segment.owner}</td><td>{start:,} to {stop:,}</td>'
        f"<td>{nbytes:,}</td></tr>"
        for segment in bucket.segments
        for param, start, stop, nbytes in _parts(plan, segment)
    )
    return (
        f'<div class="row bucket" data-bucket="{bucket.index}"><div class="what">bucket {bucket.index}</div>'
        f'<div class="track"><div class="bar" style="width:{width}">{owned}</div></div>'
        f'<div class="size">{_short(total)}</div></div>\n'
        f"<details><summary>{sum(len(segment.params) for segment in bucket.segments)} parameters or parts, "
        f'{html.escape(bucket.kind)}</summary><table><tr><th class="name">parameter</th><th>rank</th><th>elements</th>'
        f"<th>bytes</th></tr>\n{rows}\n</table></details>"
    )


def _segment_line(plan: ShardPlan, segment: Segment, names: Sequence[str], total: int) -> str:
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
    for param, (start, stop) in zip(segment.params, segment.ranges, strict=True):
        yield param, start, stop, plan.specs[param].bytes_of(stop - start)


def _bytes_of(plan: ShardPlan, bucket: Bucket) -> int:
    return sum(nbytes for segment in bucket.segments for *_, nbytes in _parts(plan, segment))


def _short(nbytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
