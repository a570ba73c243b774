"""The DDP model: its internals, its communication hooks, its forward and backward passes, and what is refused of it."""

from ddp_zero.core.ddp.forward_passes import PASSED_BY
from ddp_zero.core.ddp.reducer import (
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
from ddp_zero.core.ddp.registered_hook import CommHook, RegisteredHook, has_hook
from ddp_zero.core.ddp.schedules import shadow_run, stages_over, watch_runs

__all__ = ["PASSED_BY", "CommHook", "RegisteredHook", "bucket_options", "finds_unused", "has_hook", "has_static_graph"]
__all__ += ["in_buckets", "latest_join", "models_over", "prepare_reduction", "reduced_parameters", "sends_buffers"]
__all__ += ["shadow_run", "stages_over", "watch_iterations_under_join", "watch_runs"]
