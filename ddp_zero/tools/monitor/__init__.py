"""Writes the numbers of `opt.stats()` every few steps: to files, TensorBoard, a function, or as text.

from ddp_zero.tools.monitor import Monitor

monitor = Monitor(opt, every=50, to=["stats.csv"], model=model, wall_clock_breakdown=True)
"""

from ddp_zero.tools.monitor.monitor import Monitor
from ddp_zero.tools.monitor.sinks import Csv, JsonLines, TensorBoard

__all__ = ["Csv", "JsonLines", "Monitor", "TensorBoard"]
