"""Steps inside DDP's backward: the communication hook, the machine that it obeys, and DDP's internals."""

from ddp_zero.core.backward.forward_passes import PASSED_BY
from ddp_zero.core.backward.overlap_machine import Phase
from ddp_zero.core.backward.reducer import (
    bucket_options,
    finds_unused,
    has_static_graph,
    in_buckets,
    latest_join,
    models_over,
    prepare_reduction,
    reduced_parameters,
    sends_buffers,
    watch_iterations_under_join,
)
from ddp_zero.core.backward.registered_hook import CommHook, RegisteredHook, has_hook
from ddp_zero.core.backward.schedules import shadow_run, stages_over, watch_runs
from ddp_zero.core.backward.weak_calls import weakly

__all__ = ["PASSED_BY", "CommHook", "Phase", "RegisteredHook", "weakly"]
__all__ += ["bucket_options", "finds_unused", "has_hook", "has_static_graph", "in_buckets", "latest_join"]
__all__ += ["models_over", "prepare_reduction", "reduced_parameters", "sends_buffers"]
__all__ += ["shadow_run", "stages_over", "watch_iterations_under_join", "watch_runs"]
