"""Where a `Monitor` writes rows of numbers."""

import csv
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, float]
Sink = Callable[[Row], object]


class Csv:
    """Appends rows to a file of comma-separated values; the first line names the columns.

    Args:
        path: of the file. If it has lines already, as after a restart, its columns must be the same.

    Raises:
        ValueError: if they are not.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def __call__(self, row: Row) -> None:
        """Append a row."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+", newline="", encoding="utf-8") as file:
            file.seek(0)
            known = next(csv.reader(file), None)
            if known not in (None, list(row)):
                raise ValueError(
                    f"Expected {self._path} with the columns {', '.join(row)}, got {', '.join(known or ())}. Write to "
                    "a new file."
                )
            writer = csv.writer(file)
            if known is None:
                writer.writerow(row)
            writer.writerow(row.values())


class JsonLines:
    """Appends each row to a file as one JSON object on a line; null for a number that is not finite.

    Args:
        path: of the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)

    def __call__(self, row: Row) -> None:
        """Append a row."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        finite = {name: number if math.isfinite(number) else None for name, number in row.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite) + "\n")


class TensorBoard:
    """Writes each number as a scalar ``ddp_zero/<name>`` at the row's step; none that is not finite.

    Args:
        where: a folder for event files, or a writer with ``add_scalar`` such as that of `torch.utils.tensorboard`.
        prefix: put before the names of scalars.

    Raises:
        ImportError: for a folder, if the package ``tensorboard`` is not installed.
    """

    def __init__(self, where: Any, prefix: str = "ddp_zero/") -> None:
        self._prefix = prefix
        if hasattr(where, "add_scalar"):
            self._writer = where
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "Expected the package tensorboard for ddp_zero.tools.monitor.TensorBoard, got none. Run pip install "
                "tensorboard, or write to a .csv or .jsonl file."
            ) from error
        self._writer = SummaryWriter(os.fspath(where))

    def __call__(self, row: Row) -> None:
        """Add the scalars of a row."""
        for name, number in row.items():
            if name != "step" and math.isfinite(number):
                self._writer.add_scalar(f"{self._prefix}{name}", number, int(row["step"]))

    def close(self) -> None:
        """Flush what is not written yet."""
        self._writer.flush()


def sink_for(target: Any, rank: int | None) -> Sink:
    """What writes to a target of a `Monitor`.

    Args:
        target: a path that ends in ``.csv`` or ``.jsonl``, a writer with ``add_scalar``, or a function of a row.
        rank: put into the name of a file, since every rank writes one; None: only one rank writes.

    Raises:
        TypeError: for anything else.
    """
    if hasattr(target, "add_scalar"):
        return TensorBoard(target)
    if isinstance(target, str | os.PathLike):
        path = Path(target)
        if rank is not None:
            path = path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
        kinds: dict[str, Sink] = {".csv": Csv(path), ".jsonl": JsonLines(path)}
        if path.suffix in kinds:
            return kinds[path.suffix]
    elif callable(target):
        found: Sink = target
        return found
    raise TypeError(
        f"Expected a path that ends in .csv or .jsonl, a TensorBoard writer or a function, got {target!r}. For a "
        "folder of TensorBoard use ddp_zero.tools.monitor.TensorBoard(folder)."
    )
