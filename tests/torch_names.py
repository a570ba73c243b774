"""``python -m tests.torch_names``: the private names of torch in the source, and those that training in a mode reaches.

With wheels of torch: the names that those lack.

A name is private if it, or the module that it is in, begins with one underscore, or if it is one of `UNDOCUMENTED`.
docs/torch.md has a row for each; `tests/unit/test_torch_names.py` compares them.
"""

import ast
import multiprocessing
import re
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed import Logger, Reducer  # type: ignore[attr-defined]
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests import HANG

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddp_zero"
PAGE = ROOT / "docs" / "torch.md"

UNDOCUMENTED = {
    *("reducer", "logger", "static_graph", "parameters_to_ignore", "modules_buffers", "require_backward_grad_sync"),
    *("bucket_bytes_cap", "bucket_bytes_cap_default", "bucket_bytes_cap_list", "broadcast_buffers"),
    *("find_unused_parameters", "gradient_as_bucket_view", "require_manual_backward_finalization"),
    *("prepare_for_backward", "queue_callback", "default_pg_timeout", "default_pg_nccl_timeout", "pg_names"),
}
"""Attributes without an underscore that torch does not document."""

OF_OTHERS = {
    *("_getframe", "_current_frames", "_replace", "_exit"),  # of Python
    *("_ddp_zero_part", "_s", "_full_eval", "_universal", "_comment"),  # of this library, and of formats
    *("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),  # of transformers
    *("_schedulers", "_extra_state", "_checkpoint_wrapped_module", "_orig_mod"),
}
"""Private names that are no attributes of torch: of Python, of formats, and keys of torch's state dicts."""

MODULES = {"_C", "_dynamo", "_autograd", "_distributed_c10d", "_compile", "_pytree", "_python_dispatch", "_internal"}
"""Private modules of torch: what is in them counts."""

ALONE = "ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)"
MODES = {
    "without DDP": ALONE,
    "standalone": ALONE,
    "stage 1": "shard_optimizer(model, AdamW, lr=0.01)",
    "stage 2": "shard_optimizer(model, AdamW, stage=2, lr=0.01)",
}


@dataclass(frozen=True)
class Use:
    """A private name of torch in the source.

    Attributes:
        name: without what it is an attribute of.
        file: from the folder of the package.
        lines: of the statement.
    """

    name: str
    file: str
    lines: range


@cache
def _names_of_torch() -> frozenset[str]:
    """Names of the classes that the library reaches into, and of attributes that their constructors set."""
    with_constructors = (DistributedDataParallel, Joinable, Optimizer, GradScaler)
    found = {name for one in (Reducer, Logger, *with_constructors) for name in dir(one)}
    return frozenset(found.union(*(kind.__init__.__code__.co_names for kind in with_constructors)))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name.isidentifier()


def _defined(tree: ast.Module) -> Iterator[str]:
    """Private names that the library gives to things of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def _names_at(node: ast.AST, bound: dict[str, str]) -> list[str]:
    """The private names at a node: of a chain, the first that is no module."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
        inside = any(map(_is_private, (node.module or "").split(".")))
        return [one.name for one in node.names if (inside or _is_private(one.name)) and one.name not in MODULES]
    if isinstance(node, ast.Attribute):
        root, *chain = ast.unparse(node).split(".")
        path = [*bound.get(root, root).split("."), *chain]
        is_private = path[-2] in MODULES or _is_private(node.attr) or node.attr in UNDOCUMENTED
        return [node.attr] if is_private and path[-2] not in ("self", "cls") and node.attr not in MODULES else []
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        is_named = _is_private(node.value) or (node.value in UNDOCUMENTED and "_" in node.value)
        return [node.value] if is_named else []
    return []


@cache
def uses() -> list[Use]:
    """All private names of torch in the source, but for `ddp_zero.integrations`, where they are those of frameworks."""
    paths = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name != "integrations")
    trees = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in paths}
    own = {name for tree in trees.values() for name in _defined(tree)} - _names_of_torch() | OF_OTHERS
    return [use for file, tree in trees.items() for use in _uses_in(file, tree) if use.name not in own]


def _uses_in(file: str, tree: ast.Module) -> Iterator[Use]:
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            bound |= {one.asname or one.name: module + one.name for one in node.names if one.asname or module}
    for statement in ast.walk(tree):
        if not isinstance(statement, ast.stmt):
            continue
        is_simple = not hasattr(statement, "body")
        for node in ast.walk(statement) if is_simple else _in_head(statement):
            for name in _names_at(node, bound):
                at: Any = statement if is_simple else node
                yield Use(name, file, range(at.lineno, (at.end_lineno or at.lineno) + 1))


def _in_head(statement: ast.stmt) -> Iterator[ast.AST]:
    """Expressions of a compound statement outside of the statements in it."""
    waiting = list(ast.iter_child_nodes(statement))
    while waiting:
        node = waiting.pop()
        if not isinstance(node, ast.stmt):
            yield node
            waiting += ast.iter_child_nodes(node)


def reached(mode: str) -> set[str]:
    """The private names in lines that two ranks run: the import, construction, four steps, state saved and loaded."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(2, maxtasksperchild=1) as pool:
        lines = pool.starmap_async(_train, [(mode, rank, folder) for rank in range(2)], chunksize=1).get(HANG)
    ran = set().union(*lines)
    return {use.name for use in uses() if any((use.file, line) in ran for line in use.lines)}


def _train(mode: str, rank: int, folder: str) -> set[tuple[str, int]]:
    ran, root = set(), f"{PACKAGE}/"

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(root):
            return None
        if event == "line":
            ran.add((frame.f_code.co_filename.removeprefix(root), frame.f_lineno))
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    from ddp_zero import ZeroRedundancyOptimizer, shard_optimizer

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    if mode != "without DDP":
        model = DistributedDataParallel(model)
    names = {"model": model, "AdamW": torch.optim.AdamW, "shard_optimizer": shard_optimizer}
    opt = eval(MODES[mode], {**names, "ZeroRedundancyOptimizer": ZeroRedundancyOptimizer})
    for _ in range(4):
        model(torch.randn(4, 8)).square().mean().backward()
        for param in model.parameters() if mode == "without DDP" else ():
            dist.all_reduce(param.grad)
        opt.step()
        opt.zero_grad()
    opt.load_state_dict(opt.state_dict())
    sys.settrace(None)
    threading.settrace(None)
    dist.destroy_process_group()
    return ran


def lacking(wheel: Path) -> list[str]:
    """The private names that a wheel of torch does not mention, in its Python files or in its libraries."""
    missing = {use.name for use in uses()}
    with zipfile.ZipFile(wheel) as archive:
        for file in archive.namelist():
            if file.endswith((".py", ".pyi", "libtorch_python.so", "libtorch_cpu.so")):
                content = archive.read(file)
                missing -= {name for name in missing if name.encode() in content}
    return sorted(missing)


def on_page() -> dict[str, set[str]]:
    """The names of the page's tables, by the heading above them."""
    found = {}
    for section in PAGE.read_text().split("\n## ")[1:]:
        rows = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
        names = {name.rpartition(".")[2] for row in rows for name in re.findall(r"`([^`]+)`", row)}
        found[section.partition("\n")[0]] = names
    return {heading: names for heading, names in found.items() if names}


def main() -> None:
    for wheel in map(Path, sys.argv[1:]):
        print(wheel.name, "lacks", ", ".join(lacking(wheel)) or "none of them")
    if sys.argv[1:]:
        return
    names = {use.name: set[str]() for use in uses()}
    for mode in MODES:
        for name in reached(mode):
            names[name].add(mode)
    for name, modes in sorted(names.items(), key=lambda one: (sorted(one[1], reverse=True), one[0])):
        files = sorted({use.file for use in uses() if use.name == name})
        print(f"{name:45} {', '.join(sorted(modes)) or '-':32} {' '.join(files)}")
    print({mode: sum(mode in modes for modes in names.values()) for mode in MODES}, len(names))


if __name__ == "__main__":
    main()
