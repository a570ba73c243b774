"""Watches runs of pipeline schedules of torch, and stands in for their stages' DDP models under `Join`.

A schedule (torch 2.13.0, ``torch/distributed/pipelining/schedules.py``) begins each run by ``clear_runtime_states()``
of its stages on this rank, before they send or receive anything. DDP's own part of `Join` knows nothing of the
reduction that a schedule starts in the last backward pass of each run: it would leave joined ranks out.
"""

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_zero.core.ddp.reducer import rebuild_before_forward, reduce_zeros


def stages_over(model: nn.Module) -> list[Any]:
    """The stages of torch's schedules in this process that run a model or parts of it, in the order of the pipeline.

    No module refers to its stage, so all objects known to the garbage collector are searched.
    """
    from torch.distributed.pipelining.stage import _PipelineStageBase

    gc.collect()
    modules = set(map(id, model.modules()))
    found = [one for one in gc.get_objects() if _PipelineStageBase in type(one).__mro__]
    return sorted(
        (one for one in found if id(vars(one).get("submod")) in modules), key=lambda stage: int(stage.stage_index)
    )


def watch_runs(stages: Sequence[Any], watch: Callable[[], object]) -> Callable[[], None]:
    """Call a function when a schedule begins to run stages forward and backward, before they communicate.

    Args:
        stages: as from `stages_over`; a schedule has one or several of them.
        watch: the function, called once in each run.

    Returns:
        A function that ends it.
    """
    # a schedule with several stages here clears them one after the other
    references = [weakref.ref(stage) for stage in stages if stage.stage_index == stages[0].stage_index]

    def begin(reference: "weakref.ref[Any]") -> None:
        stage = reference()
        assert stage is not None, "it calls this"
        if stage.has_backward:
            watch()
        type(stage).clear_runtime_states(stage)

    def stop() -> None:
        for reference in references:
            vars(reference() or _NoStage()).pop("clear_runtime_states", None)

    for reference in references:
        vars(reference() or _NoStage())["clear_runtime_states"] = partial(begin, reference)
    return stop


class _NoStage:
    """In the place of one that is gone."""


def shadow_run(models: Sequence[DistributedDataParallel]) -> None:
    """On a rank that has joined: take part in the reductions of one run of a schedule, with zeros. A collective.

    Args:
        models: the DDP models of this rank's stages, in the order of the pipeline.
    """
    for ddp in models:  # ranks that train do so in the first forward pass of each
        rebuild_before_forward(ddp)
    # the last micro-batch's backward pass reaches later stages first
    for ddp in reversed(models):
        reduce_zeros(ddp)
