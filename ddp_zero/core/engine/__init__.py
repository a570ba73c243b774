"""The engine of the optimizer: its construction, when a step is taken, the work behind its methods; and forecasts."""

from ddp_zero.core.engine.added_group import AddedGroup
from ddp_zero.core.engine.construction import build_engine
from ddp_zero.core.engine.engine import Engine
from ddp_zero.core.engine.forwarding import attribute_of_inner
from ddp_zero.core.engine.memory_needs import Mode, Training
from ddp_zero.core.engine.probes import probe
from ddp_zero.core.engine.shardable import check_shardable

__all__ = ["AddedGroup", "Engine", "Mode", "Training", "attribute_of_inner", "build_engine"]
__all__ += ["check_shardable", "probe"]
