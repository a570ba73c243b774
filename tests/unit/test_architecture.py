"""The house rules that a machine can check: who imports, communicates, moves parameters, looks into DDP; and sizes.

A failure here is a question about the design. Answer it in the table below and in docs/design.md, or in the code.
"""

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "ddp_zero"


@dataclass(frozen=True)
class Room:
    """A file: its floor, the files of this package that it imports, and what it takes from `torch.distributed`."""

    floor: int
    imports: frozenset[str] = frozenset()
    from_distributed: frozenset[str] = frozenset()


def room(floor: int, imports: str = "", from_distributed: str = "") -> Room:
    return Room(floor, frozenset(imports.split()), frozenset(from_distributed.split()))


ROOMS = {
    "partition": room(0),
    "plan": room(0, "partition"),
    "memory_layout": room(0),
    "overlap": room(0),
    "regime": room(0, "overlap"),
    "loss_scale": room(0),
    "config": room(0, "loss_scale"),
    "fitting": room(0),
    "parameters": room(1, "memory_layout payload plan"),
    "flat": room(1, "memory_layout partition plan"),
    "local_step": room(1),
    "inner": room(1, "arguments local_step parameters precision"),
    "precision": room(1, "awaited local_step parameters"),
    "step_record": room(1),
    "watch": room(1),
    "awaited": room(1),
    "payload": room(1, "awaited memory_layout"),
    "side_stream": room(1),
    "absent": room(1),
    "buffers": room(1),
    "reducer": room(1, "memory_layout", "torch.distributed.GradBucket"),
    "tracing": room(1),
    "live_model": room(1, "fitting parameters", "torch.distributed.ProcessGroup"),
    "checkpoint_folder": room(1),
    "manifest": room(1, "memory_layout payload"),
    "tensor_file": room(1, "checkpoint_folder manifest"),
    "dcp_metadata": room(
        1,
        "manifest payload",
        "torch.distributed.checkpoint.filesystem.FileSystemWriter "
        "torch.distributed.checkpoint.filesystem._StorageInfo "
        "torch.distributed.checkpoint.metadata.BytesStorageMetadata "
        "torch.distributed.checkpoint.metadata.ChunkStorageMetadata "
        "torch.distributed.checkpoint.metadata.Metadata "
        "torch.distributed.checkpoint.metadata.MetadataIndex "
        "torch.distributed.checkpoint.metadata.TensorProperties "
        "torch.distributed.checkpoint.metadata.TensorStorageMetadata "
        "torch.distributed.checkpoint.storage.WriteResult",
    ),
    "saved_checkpoint": room(1, "checkpoint_folder manifest payload"),
    "collectives": room(2, "attempt exchange groups partition payload"),
    "peers": room(
        2,
        "partition",
        "torch.distributed.ProcessGroup torch.distributed.get_world_size torch.distributed.is_available "
        "torch.distributed.is_initialized",
    ),
    "agreement": room(2, "parameters partition peers"),
    "param_sync": room(2, "awaited collectives exchange flat plan step_errors tracing"),
    "grad_reduce": room(2, "collectives exchange partition"),
    "binding": room(3, "collectives flat memory_layout param_sync parameters partition plan tracing"),
    "state_transfer": room(3, "agreement collectives inner local_step parameters partition payload precision"),
    "admission": room(3, "parameters reducer sharded_step"),
    "before_forward": room(3, "awaited sharded_step"),
    "late_changes": room(3, "absent awaited local_step sharded_step"),
    "forward_passes": room(3, "reducer"),
    "backward_step": room(
        3, "gradients join reducer sharded_step side_stream tracing", "torch.distributed.algorithms.join.Joinable"
    ),
    "decision": room(
        3, "absent clipping config local_step loss_scale partition precision sharded_step step_record watch"
    ),
    "hook": room(
        3,
        "admission backward_step forward_passes gradients join late_changes overlap plan reducer regime "
        "sharded_step side_stream step_record tracing watch",
        "torch.distributed.GradBucket torch.distributed.algorithms.join.Joinable",
    ),
    "gradients": room(
        3,
        "collectives reducer sharded_step side_stream watch",
        "torch.distributed.GradBucket torch.distributed.ProcessGroup",
    ),
    "accumulation": room(
        3, "awaited grad_bucket gradients reducer sharded_step side_stream visible", "torch.distributed.GradBucket"
    ),
    "grad_bucket": room(3, "buffers collectives grad_reduce plan reducer sharded_step side_stream tracing"),
    "bucket_memory": room(3, "grad_bucket reducer tracing"),
    "visible": room(3, "absent grad_bucket grad_reduce sharded_step"),
    "grad_partition": room(
        3,
        "accumulation admission awaited bucket_memory forward_passes grad_bucket grad_reduce gradients "
        "reducer sharded_step side_stream tracing visible",
        "torch.distributed.GradBucket",
    ),
    "clipping": room(3, "absent precision sharded_step"),
    "join": room(
        3,
        "binding collectives local_step parameters partition sharded_step",
        "torch.distributed.algorithms.join.JoinHook torch.distributed.algorithms.join._JoinConfig",
    ),
    "report": room(3, "plan"),
    "sharded_step": room(
        3, "binding collectives coupling local_step parameters partition precision state_transfer step_record tracing"
    ),
    "consolidation": room(4, "collectives decision hook partition payload precision sharded_step state_transfer"),
    "own_state": room(
        4, "consolidation inner live_model overlap state_transfer", "torch.distributed.algorithms.join._JoinConfig"
    ),
    "reach_gradients": room(
        4,
        "absent clipping decision forward_passes grad_bucket hook late_changes overlap reducer sharded_step visible",
        "torch.distributed.algorithms.join._JoinConfig",
    ),
    "take_step": room(
        4,
        "absent awaited collectives decision hook join overlap reach_gradients reducer step_record",
        "torch.distributed.algorithms.join.Join torch.distributed.algorithms.join.Joinable",
    ),
    "optimizer": room(
        4,
        "admission agreement arguments before_forward binding collectives config decision forward_passes "
        "forwarding grad_bucket grad_partition gradients hook inner join local_step loss_scale overlap "
        "own_state parameters partition precision report sharded_step side_stream",
        "torch.distributed.ProcessGroup torch.distributed.algorithms.join.JoinHook "
        "torch.distributed.algorithms.join.Joinable",
    ),
    "api": room(5, "agreement arguments collectives gradients live_model loss_scale optimizer"),
    "optimizer_state": room(5, "inner optimizer parameters partition state_transfer"),
    "capture": room(5, "live_model optimizer_state partition payload saved_checkpoint"),
    "restore": room(
        5,
        "fitting live_model manifest optimizer_state partition peers precision saved_checkpoint "
        "state_transfer tensor_file",
    ),
    "saving": room(
        5,
        "agreement checkpoint_folder collectives dcp_metadata manifest peers saved_checkpoint tensor_file tracing",
        "torch.distributed.ProcessGroup",
    ),
    "export": room(5, "checkpoint_folder manifest saved_checkpoint tensor_file"),
    "checkpoint": room(
        6,
        "agreement capture checkpoint_folder collectives export live_model manifest optimizer_state "
        "peers restore saved_checkpoint saving",
        "torch.distributed.ProcessGroup",
    ),
    "__init__": room(6, "api compacting loss_scale optimizer overlap shardable step_record"),
    "attempt": room(2, "", "torch.distributed.PrefixStore torch.distributed.Store"),
    "exchange": room(2, "", "torch.distributed.Work"),
    "groups": room(2, "", "torch.distributed.ProcessGroup"),
    "launch": room(
        6,
        "attempt",
        "torch.distributed.constants.default_pg_timeout torch.distributed.init_process_group "
        "torch.distributed.is_torchelastic_launched torch.distributed.rendezvous.rendezvous",
    ),
    "step_errors": room(2, "collectives exchange partition"),
    "coupling": room(2, "local_step partition peers"),
    "forwarding": room(4, "agreement hook overlap sharded_step take_step"),
    "shardable": room(3, "coupling inner local_step partition payload"),
    "arguments": room(1, "", "torch.distributed.GroupMember torch.distributed.ProcessGroup"),
    "compacting": room(1, "awaited"),
}

COMMUNICATING = {
    *("send", "recv", "isend", "irecv", "send_object_list", "recv_object_list", "batch_isend_irecv", "P2POp"),
    *("broadcast", "broadcast_object_list", "all_reduce", "all_reduce_coalesced", "reduce", "barrier"),
    *("monitored_barrier", "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
    *("gather", "gather_object", "scatter", "scatter_object_list", "reduce_scatter", "reduce_scatter_tensor"),
    *("all_to_all", "all_to_all_single", "_all_gather_base", "_reduce_scatter_base", "_coalescing_manager"),
    *("new_group", "new_subgroups", "init_process_group", "destroy_process_group", "split_group"),
}
"""Functions of `torch.distributed` that send, receive or wait for peers."""

GROUP_METHODS = {
    *("allreduce", "allreduce_coalesced", "allgather", "allgather_coalesced", "_allgather_base", "alltoall"),
    *("alltoall_base", "broadcast", "barrier", "monitored_barrier", "reduce_scatter", "_reduce_scatter_base"),
    *("send", "recv", "recv_anysource", "isend", "irecv"),
}
"""Methods of a process group that do; none is a method of a tensor."""

DDP_INTERNALS = {
    *("reducer", "logger", "static_graph", "find_unused_parameters", "gradient_as_bucket_view", "device_ids"),
    *("require_forward_param_sync", "require_backward_grad_sync", "bucket_bytes_cap"),
}
"""What `DistributedDataParallel` keeps on itself."""

BACKWARD_INTERNALS = {"_execution_engine", "_current_graph_task_id", "queue_callback", "GradBucket"}
"""Names of torch's backward: the engine, where it is, and what DDP hands to a hook."""


# Reading the code


def read(name: str) -> ast.Module:
    return ast.parse((PACKAGE / f"{name}.py").read_text(), filename=name)


def bindings(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for: ``import a.b as c`` makes c a.b, ``from a import b`` makes b a.b."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ["ddp_zero" if node.level else "", node.module]))
            for alias in node.names:
                found[alias.asname or alias.name] = f"{module}.{alias.name}"
    return found


def imported(tree: ast.Module) -> set[str]:
    """Full dotted names of everything that is imported, at the top or within functions."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ["ddp_zero" if node.level else "", node.module]))
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return found


def rooms_imported(tree: ast.Module) -> set[str]:
    names = [name.split(".") for name in imported(tree)]
    return {parts[1] if len(parts) > 1 else "__init__" for parts in names if parts[0] == "ddp_zero"}


def dotted(node: ast.expr, bound: dict[str, str]) -> str | None:
    """``d.all_gather`` as ``torch.distributed.all_gather``; None for what is not a chain of names."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        stem = dotted(node.value, bound)
        return stem and f"{stem}.{node.attr}"
    return None


def mentions_of_distributed(tree: ast.Module) -> set[str]:
    """Every full name below `torch.distributed` that the code imports or spells out, under whatever alias."""
    bound = bindings(tree)
    expressions = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
    names = imported(tree) | {name for node in expressions if (name := dotted(node, bound))}
    return {name for name in names if re.fullmatch(r"torch\.(_C\._)?distributed(\..*|_.*)?", name)}


def communications(tree: ast.Module) -> list[str]:
    """What in the code communicates, as ``line: name``; a mention is enough, since a function can be called later."""
    bound = bindings(tree)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            stem, _, last = (dotted(node, bound) or "").rpartition(".")
            if stem.startswith("torch.") and "distributed" in stem and last in COMMUNICATING:
                found.append(f"{node.lineno}: {stem}.{last}")
                continue
        if isinstance(node, ast.Attribute) and node.attr in GROUP_METHODS:
            found.append(f"{node.lineno}: .{node.attr}")
    return found


def moves(tree: ast.Module) -> list[int]:
    """Lines that re-point a tensor: ``x.data = y`` in any form of assignment, ``setattr``, ``set_`` or a swap."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "data" and not isinstance(node.ctx, ast.Load):
            lines.append(node.lineno)
        elif isinstance(node, ast.Attribute) and node.attr in ("set_", "set_data", "swap_tensors"):
            lines.append(node.lineno)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            lines.append(node.lineno)
    return lines


def internals(tree: ast.Module) -> set[str]:
    """What in the code is known of DDP and of autograd's engine only, spelled as a name, an attribute or a string."""
    bound = bindings(tree)
    found = {name.rpartition(".")[2] for name in imported(tree)} & BACKWARD_INTERNALS
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            name = dotted(node, bound) or (node.attr if isinstance(node, ast.Attribute) else "")
            if re.match(r"torch\._C\b", name):
                found.add("torch._C")
        if isinstance(node, ast.Attribute):
            found |= {node.attr} & (DDP_INTERNALS | BACKWARD_INTERNALS)
        elif isinstance(node, ast.Name):
            found |= {node.id} & BACKWARD_INTERNALS
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} & (DDP_INTERNALS | BACKWARD_INTERNALS)
    return found


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Name and length in lines of every function, decorators and docstring included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield node.name, (node.end_lineno or node.lineno) - first + 1


every_room = pytest.mark.parametrize("name", ROOMS)


# Who imports whom


def test_every_file_is_a_room() -> None:
    assert {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")} == {f"{name}.py" for name in ROOMS}


@every_room
def test_a_room_imports_exactly_what_the_table_says(name: str) -> None:
    assert rooms_imported(read(name)) == ROOMS[name].imports


@every_room
def test_imports_go_to_the_same_floor_or_down(name: str) -> None:
    assert {other for other in ROOMS[name].imports if ROOMS[other].floor > ROOMS[name].floor} == set()


def test_imports_have_no_cycles() -> None:
    order = list(TopologicalSorter({name: room.imports for name, room in ROOMS.items()}).static_order())
    assert sorted(order) == sorted(ROOMS)


@every_room
def test_torch_is_the_only_dependency_and_the_ground_floor_has_none(name: str) -> None:
    roots = {imported_name.split(".")[0] for imported_name in imported(read(name))} - set(sys.stdlib_module_names)
    assert roots <= ({"ddp_zero", "torch"} if ROOMS[name].floor else {"ddp_zero"})


def test_the_ground_floor_runs_where_there_is_no_torch() -> None:
    """The package's own `__init__` imports the upper floors, so an empty package stands in for it."""
    ground = [name for name, room in ROOMS.items() if room.floor == 0]
    program = f"""
import importlib, sys, types
sys.modules["torch"] = None  # importing it raises
package = types.ModuleType("ddp_zero")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["ddp_zero"] = package
for name in {ground!r}:
    importlib.import_module("ddp_zero." + name)
print(sorted(name for name in sys.modules if name.startswith("ddp_zero.")))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (result.stderr, result.stdout.strip()) == ("", str([f"ddp_zero.{name}" for name in sorted(ground)]))


def test_the_design_page_shows_the_same_rooms() -> None:
    page = (REPOSITORY / "docs" / "design.md").read_text()
    (section,) = re.findall(r"^## The rooms\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| *(\d+) *\| *`(\w+)\.py` *\|", section, flags=re.MULTILINE)
    assert sorted((name, int(floor)) for floor, name in rows) == sorted((n, room.floor) for n, room in ROOMS.items())


# Who communicates


@every_room
def test_only_collectives_communicates(name: str) -> None:
    if name == "collectives":
        assert len(communications(read(name))) > 5
    elif name == "launch":
        assert {line.split()[1] for line in communications(read(name))} == {"torch.distributed.init_process_group"}
    else:
        assert communications(read(name)) == []


@pytest.mark.parametrize("name", [name for name in ROOMS if name != "collectives"])
def test_a_room_takes_from_torch_distributed_only_what_the_table_says(name: str) -> None:
    allowed = ROOMS[name].from_distributed
    parts_of_allowed = tuple(f"{one}." for one in allowed)
    mentioned = mentions_of_distributed(read(name))
    assert {mention for mention in mentioned if not mention.startswith(parts_of_allowed)} == allowed


def test_the_names_that_communicate_are_names_of_this_torch() -> None:
    assert {name for name in COMMUNICATING if not hasattr(dist, name)} <= {"all_gather_coalesced"}
    assert {name for name in GROUP_METHODS if hasattr(torch.Tensor, name)} == set()


@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.distributed.barrier()",
        "import torch.distributed\ntorch.distributed.send(x, 1)",
        "import torch.distributed as d\nd.all_reduce(x)",
        "import torch as t\nt.distributed.scatter(x)",
        "from torch import distributed as d\ndef f():\n    d.reduce(x, 0)",
        "from torch.distributed import all_gather as ag\nlater = [ag]",
        "def f():\n    from torch.distributed.distributed_c10d import broadcast\n    broadcast(x)",
        "import torch.distributed.distributed_c10d as c\nc._all_gather_base(x, y)",
        "def f(comm):\n    comm.process_group.allreduce(x).wait()",
    ],
)
def test_the_scan_sees_through_aliases(code: str) -> None:
    assert len(communications(ast.parse(code))) == 1


@pytest.mark.parametrize(
    "code",
    [
        "from functools import reduce\nreduce(f, x)",
        "import torch\ntorch.gather(x, 0, y)\ny = x.scatter(0, i, x)",
        "from torch.distributed import ProcessGroup\ncomm.send_tree(x)",
        "import torch.distributed as dist\ndist.get_rank()",
    ],
)
def test_the_scan_lets_others_pass(code: str) -> None:
    assert communications(ast.parse(code)) == []


# Who points tensors elsewhere


@every_room
def test_only_flat_moves_parameters_and_only_reducer_the_views_of_gradients(name: str) -> None:
    if name in ("flat", "reducer"):
        assert len(moves(read(name))) == 2
    else:
        assert moves(read(name)) == []


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ("p.data = q", 1),
        ("a, p.data = q", 1),
        ("p.data: T = q", 1),
        ("p.data += q", 1),
        ("for p.data in q: pass", 1),
        ("setattr(p, 'data', q)", 1),
        ("p.set_(q)", 1),
        ("q = p.data", 0),
        ("p.grad = q", 0),
    ],
)
def test_the_scan_for_moves_sees_every_assignment(code: str, count: int) -> None:
    assert len(moves(ast.parse(code))) == count


# Who looks into DDP and into backward


@every_room
def test_only_the_reducers_room_looks_into_ddp_and_into_backward(name: str) -> None:
    """Reductions and hooks name the type of what a hook is given; two rooms have subclasses of tensors."""
    found = internals(read(name))
    if name == "reducer":
        assert {"_execution_engine", "_current_graph_task_id", "torch._C", "static_graph"} <= found
    elif name in ("absent", "awaited"):
        assert found == {"torch._C"}
    else:
        takes_buckets = name in ("accumulation", "collectives", "gradients", "grad_partition", "hook")
        assert found == ({"GradBucket"} if takes_buckets else set())


def test_the_names_of_internals_are_names_of_this_torch() -> None:
    engine = torch.autograd.Variable._execution_engine
    assert hasattr(engine, "queue_callback")
    assert hasattr(torch._C, "_current_graph_task_id")
    assert hasattr(dist, "GradBucket")
    source = inspect.getsource(DistributedDataParallel)
    assert {name for name in DDP_INTERNALS if f"self.{name} = " not in source} == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("ddp.reducer._rebuild_buckets()", {"reducer"}),
        ("getattr(self.ddp, 'reducer')", {"reducer"}),
        ("import torch\ntorch._C._current_graph_task_id()", {"torch._C", "_current_graph_task_id"}),
        ("from torch._C import _current_graph_task_id as f\nf()", {"torch._C", "_current_graph_task_id"}),
        ("import torch\nq = torch.autograd.Variable._execution_engine", {"_execution_engine"}),
        ("from torch.distributed import GradBucket as B\ndef f(b: B): pass", {"GradBucket"}),
        ("import torch.distributed as dist\ndef f(b: 'dist.GradBucket', c: dist.GradBucket): pass", {"GradBucket"}),
        ("if model.static_graph: pass", {"static_graph"}),
        ("from ddp_zero.tracing import logger\nlogger.debug('the reducer is done')", set()),
        ("reducer = 1\nddp.register_comm_hook(None, f)", set()),
    ],
)
def test_the_scan_for_internals_sees_names_attributes_and_strings(code: str, found: set[str]) -> None:
    assert internals(ast.parse(code)) == found


# Sizes and messages


@every_room
def test_no_file_is_over_400_lines_and_no_function_over_60(name: str) -> None:
    assert len((PACKAGE / f"{name}.py").read_text().splitlines()) <= 400
    assert [f"{function}: {lines} lines" for function, lines in functions(read(name)) if lines > 60] == []


@every_room
def test_every_raise_says_something(name: str) -> None:
    """``raise`` alone hands on an exception that has a message already."""
    silent = [
        node.lineno
        for node in ast.walk(read(name))
        if isinstance(node, ast.Raise) and node.exc and not (isinstance(node.exc, ast.Call) and node.exc.args)
    ]
    assert silent == []


@every_room
def test_no_assertion_is_silent(name: str) -> None:
    assert [node.lineno for node in ast.walk(read(name)) if isinstance(node, ast.Assert) and not node.msg] == []


WRITES_FOR_TORCH = {"tensor_file", "dcp_metadata", "export"}
"""Rooms that write what torch's own tools unpickle; nothing here reads it that way."""


@every_room
def test_nothing_pickles(name: str) -> None:
    """Neither the module nor the calls of torch that use it."""
    tree = read(name)
    bound = bindings(tree)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)]
    names = Counter(dotted(node, bound) for node in nodes)
    pickling = {"pickle", "torch.load", "torch.save", "torch.package"} | {
        f"torch.distributed.{function}" for function in COMMUNICATING if "object" in function
    }
    assert {root for root in imported(tree) if root.split(".")[0] in ("pickle", "marshal", "shelve", "dill")} == set()
    assert pickling & set(names) == ({"torch.save"} if name in WRITES_FOR_TORCH else set())
