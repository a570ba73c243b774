"""Migration from DeepSpeed: `initialize`, an engine with DeepSpeed's calls, and the ``safe_*`` functions.

    from ddp_zero.deepspeed import add_config_arguments, initialize

    engine, optimizer, loader, scheduler = initialize(model=model, config="ds_config.json")
    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

It runs on stock DDP and `ddp_zero.ZeroRedundancyOptimizer`; DeepSpeed is not needed. See docs/from-deepspeed.md.
"""

from ddp_zero.deepspeed.config.config import Config
from ddp_zero.deepspeed.config.table import ConfigError
from ddp_zero.deepspeed.engine import Engine
from ddp_zero.deepspeed.initialization import add_config_arguments, initialize
from ddp_zero.deepspeed.params import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)

__all__ = [
    "Config",
    "ConfigError",
    "Engine",
    "add_config_arguments",
    "initialize",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
]
