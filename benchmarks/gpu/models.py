"""GPT in the sizes that are trained on accelerators."""

from benchmarks.race.models import Task, gpt

MODELS: dict[str, Task] = {
    "tiny": gpt(context=16, layers=2, width=64, heads=2),
    "125m": gpt(context=1024, layers=12, width=936, heads=13),
    "1b": gpt(context=2048, layers=24, width=1856, heads=29),
    "7b": gpt(context=2048, layers=32, width=4224, heads=33),
}
"""The vocabulary is bytes, so blocks hold nearly all parameters: wider than the usual models of these sizes."""
CHECKED = "tiny"
"""What correctness is shown on."""
CHECKED_BUCKET_MIB = 0.1
"""So that it has several buckets."""
