"""The house rules that a machine can check: who imports, communicates, moves parameters, looks into DDP; and sizes.

A failure here is a question about the design. Answer it in the table below and in docs/design.md, or in the code.
"""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests import HANG

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "ddp_zero"

FLOORS = {
    "tools.files": 0,
    "ground": 0,
    "tools.explain_code": 0,
    "deepspeed.config": 1,
    "checkpoint.foreign": 1,
    "values": 1,
    "core.plan": 2,
    "core.local": 3,
    "core.comm": 4,
    "launch": 5,
    "core.step": 6,
    "core.ddp": 7,
    "core.backward": 8,
    "core.state": 8,
    "tools.needs": 9,
    "core.engine": 9,
    "insight": 10,
    "tools.check": 10,
    "tools.estimate": 10,
    "tools.postmortem": 11,
    "front": 11,
    "tools.monitor": 12,
    "parallel": 12,
    "checkpoint": 13,
    "doors": 13,
    "deepspeed": 14,
    "snapshots": 14,
    "integrations": 15,
}
"""The rooms. Files at the root: `options`, `loss_scale` and `error_codes`, the ground; `shard` and what imports it, the
doors; and every other file, the front.

Imports between them go down.
"""

OF_THE_CORE = {"parallel", "front", "doors"}
"""The core's own storeys above its rooms: ranks that hold different parameters, and what users hold."""

ROOFS = {"core", "tools"}
"""Packages that hold rooms, and nothing of their own; a room is a folder, or one file."""

FRAMEWORKS = {
    "integrations.transformers": {"transformers", "accelerate"},
    "integrations.accelerate": {"accelerate"},
    "integrations.lightning": {"lightning"},
    "integrations.torchft": {"torchft"},
    "integrations.ray": {"ray"},
    "tools.files": {"tqdm"},
    "__main__": {"shtab"},
}
"""What a file may import besides torch."""

GROUND = {"options", "loss_scale", "error_codes"}
"""What `core` may import from outside, besides `values`: users import the options from the root, every package ends
messages with codes, and none of them imports anything but another of them."""
DOORS = {"__init__", "__main__", "public", "shard"}

NAMES_OF_THE_CORE = 92
NAMES_OUTSIDE = 42
"""The bounds on the names in the faces of the core's rooms, and on those that packages beside the core use: lower them
when one goes, and do not raise them."""

WITHOUT_TORCH = {
    *("core.plan", "values.chunks", "values.shapes", "core.comm.recorder", "core.backward.overlap_machine"),
    *("launch.job", "launch.guard", "insight.record_format"),
}
"""Rooms and files above floor 0 that are pure as well."""

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


def name_of(path: Path) -> str:
    """``step.binding``, or ``step`` for the `__init__` of a package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def read(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text(), filename=name)


@cache
def nodes_of(tree: ast.Module) -> list[ast.AST]:
    """All nodes, walked once: the tests below look at the same trees again and again."""
    return list(ast.walk(tree))


def package_of(name: str) -> str:
    parts = name.split(".")
    rooms = [room for length in (2, 1) if (room := ".".join(parts[:length])) in FLOORS]
    return rooms[0] if rooms else "ground" if name in GROUND else "doors" if name in DOORS else "front"


def bindings(tree: ast.Module) -> dict[str, str]:
    """What each imported name stands for: ``import a.b as c`` makes c a.b, ``from a import b`` makes b a.b."""
    found: dict[str, str] = {}
    for node in nodes_of(tree):
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


@cache
def imported(tree: ast.Module) -> frozenset[str]:
    """Full dotted names of everything that is imported, at the top or within functions."""
    found = set[str]()
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, ["ddp_zero" if node.level else "", node.module]))
            found |= {f"{module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def files_imported(tree: ast.Module) -> set[str]:
    """Files of this library that the code imports, itself or names out of them."""
    found = set()
    for name in imported(tree):
        root, *parts = name.split(".")
        if root == "ddp_zero":
            candidates = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
            found.add(next((one for one in candidates if one in FILES), "__init__"))
    return found


def dotted(node: ast.expr, bound: dict[str, str]) -> str | None:
    """``d.all_gather`` as ``torch.distributed.all_gather``; None for what is not a chain of names."""
    if isinstance(node, ast.Name):
        return bound.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        stem = dotted(node.value, bound)
        return stem and f"{stem}.{node.attr}"
    return None


def communications(tree: ast.Module) -> list[str]:
    """What in the code communicates, as ``line: name``; a mention is enough, since a function can be called later.

    A generator is sent one value, a rank three arguments.
    """
    bound = bindings(tree)
    calls = (one for one in nodes_of(tree) if isinstance(one, ast.Call) and isinstance(one.func, ast.Attribute))
    to_generators = {one.func for one in calls if len(one.args) == 1 and not one.keywords}
    found = []
    for node in nodes_of(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            stem, _, last = (dotted(node, bound) or "").rpartition(".")
            if stem.startswith("torch.") and "distributed" in stem and last in COMMUNICATING:
                found.append(f"{node.lineno}: {stem}.{last}")
                continue
        if isinstance(node, ast.Attribute) and node.attr in GROUP_METHODS:
            if node.attr == "send" and node in to_generators:
                continue
            found.append(f"{node.lineno}: .{node.attr}")
    return found


def moves(tree: ast.Module) -> list[int]:
    """Lines that re-point a tensor: ``x.data = y`` in any form of assignment, ``setattr``, ``set_`` or a swap."""
    lines = []
    for node in nodes_of(tree):
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
    for node in nodes_of(tree):
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


def violations(look: Callable[[str], object]) -> dict[str, object]:
    """What a look at each file finds, by file; empty if all keep the rule."""
    return {name: found for name in FILES if (found := look(name))}


# Who imports whom


def test_every_folder_is_a_room_and_the_core_has_at_most_eight() -> None:
    folders = {path.parent.relative_to(PACKAGE).as_posix().replace("/", ".") for path in FILES.values()}
    alone = {name for name, path in FILES.items() if path.parent.name in ROOFS and path.name != "__init__.py"}
    assert folders - {"."} | alone == (set(FLOORS) | ROOFS) - {"ground", "front", "doors"}
    assert len([room for room in FLOORS if room.startswith("core.")]) <= 8


def test_imports_between_packages_go_down() -> None:
    def upward(name: str) -> list[str]:
        mine = package_of(name)
        others = [other for other in files_imported(read(name)) if other not in ROOFS and package_of(other) != mine]
        return [other for other in others if FLOORS[package_of(other)] >= FLOORS[mine]]

    assert violations(upward) == {}


def test_imports_have_no_cycles() -> None:
    """Whoever imports a file of another room imports the room's face before."""
    graph = {name: files_imported(read(name)) for name in FILES}
    for name, others in graph.items():
        others |= {room for room in map(package_of, others) if room in FACED and room != package_of(name)}
    assert sorted(TopologicalSorter(graph).static_order()) == sorted(FILES)


def packages_imported(graph: Mapping[str, Collection[str]]) -> dict[str, set[str]]:
    """Which packages each package imports, out of which files each file imports; a file at the root is a package."""
    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        package = name.partition(".")[0]
        found.setdefault(package, set()).update(other.partition(".")[0] for other in others)
        found[package].discard(package)
    return found


def test_imports_of_packages_have_no_cycle() -> None:
    graph = packages_imported({name: files_imported(read(name)) for name in FILES})
    assert {"core", "insight", "tools", "optimizer", "checkpoint"} <= graph.keys()
    assert sorted(TopologicalSorter(graph).static_order()) == sorted(graph)


def test_a_circle_of_packages_is_found_where_files_have_none() -> None:
    files = {"core.comm.a": {"tools.b"}, "optimizer": {"core.plan.c"}, "tools.d": {"optimizer"}, "tools.b": set()}
    TopologicalSorter(files).prepare()
    with pytest.raises(CycleError):
        TopologicalSorter(packages_imported(files)).prepare()


def test_core_imports_of_other_packages_are_of_the_ground_alone() -> None:
    graph = packages_imported({name: files_imported(read(name)) for name in FILES})
    assert graph["core"] == GROUND | {"values"}
    assert set().union(*(graph[name] for name in (*GROUND, "values"))) <= GROUND


FACED = {"values", *(room for room in FLOORS if room.startswith("core."))}
"""Rooms whose `__init__` is a face: files of the core import their files, all others names of the face."""


def face_of(room: str) -> list[str]:
    """The names that a room has for the packages outside the core."""
    return [name for node in read(room).body if isinstance(node, ast.Assign | ast.AugAssign) for name in strings(node)]


def strings(tree: ast.AST) -> list[str]:
    return [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def used_of_faces(files: Iterable[str]) -> set[str]:
    """The names of faces that files import, each as ``ddp_zero.room.name``."""
    faces = {f"ddp_zero.{room}.{name}" for room in FACED for name in face_of(room)}
    return faces & set().union(*(imported(read(name)) for name in files))


def test_imports_of_core_from_outside_are_of_faces_alone() -> None:
    def behind_a_face(name: str) -> set[str]:
        theirs = {one for one in files_imported(read(name)) if package_of(one) in FACED - {package_of(name)}}
        return set() if name.startswith("core") else theirs - FACED

    assert violations(behind_a_face) == {}


def test_every_name_of_a_face_is_used_outside() -> None:
    faces = {room: face_of(room) for room in FACED}
    used = used_of_faces(name for name in FILES if not name.startswith("core"))
    for room, names in faces.items():
        tree = read(room)
        kinds = [type(node) for node in tree.body if not isinstance(node, ast.Expr | ast.Assign | ast.AugAssign)]
        assert ast.get_docstring(tree), room
        assert set(kinds) <= {ast.ImportFrom}, room
        assert files_imported(tree) <= {name for name in FILES if name.startswith(f"{room}.")}
        assert sorted(bindings(tree)) == sorted(names)
        assert {name for name in names if f"ddp_zero.{room}.{name}" not in used} == set()
    assert sum(len(names) for room, names in faces.items() if room != "values") <= NAMES_OF_THE_CORE


def test_packages_beside_the_core_use_few_of_its_names() -> None:
    beside = {name for name in FILES if not name.startswith("core") and package_of(name) not in OF_THE_CORE}
    used = {name for name in used_of_faces(beside) if name.startswith("ddp_zero.core.")}
    assert len(used) <= NAMES_OUTSIDE, sorted(used)


DOORS_OF_AN_OPTIMIZER = {"engine_of", "shard_of", "states_of"}
CALLS_OF_DOORS = 29
"""The bound on calls of these outside the core and its mesh storey: a file that asks often holds the answer."""


def calls_of(names: Collection[str], tree: ast.Module) -> list[int]:
    """Lines that call functions of these names."""
    calls = [node.func for node in nodes_of(tree) if isinstance(node, ast.Call)]
    return [func.lineno for func in calls if isinstance(func, ast.Name) and func.id in names]


def test_the_inside_of_an_optimizer_is_asked_for_in_few_places() -> None:
    files = {name for name in FILES if package_of(name) != "parallel"}
    calls = {name: lines for name in files if (lines := calls_of(DOORS_OF_AN_OPTIMIZER, read(name)))}
    assert sum(map(len, calls.values())) <= CALLS_OF_DOORS, calls


def test_other_init_files_hold_a_docstring_alone() -> None:
    """Importing a low file must not import the whole of its package. The others are what their users import."""
    users = {"__init__", "checkpoint", "deepspeed", "launch", "parallel", "snapshots"}
    inits = {name for name, path in FILES.items() if path.name == "__init__.py"} - users
    assert {name for name in inits - FACED if not ast.get_docstring(read(name)) or len(read(name).body) > 1} == set()


def is_pure(name: str) -> bool:
    return FLOORS[package_of(name)] == 0 or not WITHOUT_TORCH.isdisjoint({name, package_of(name)})


def test_torch_is_the_only_dependency_and_the_ground_floor_has_none() -> None:
    def foreign(name: str) -> set[str]:
        roots = {one.split(".")[0] for one in imported(read(name))} - set(sys.stdlib_module_names)
        return roots - FRAMEWORKS.get(name, set()) - ({"ddp_zero"} if is_pure(name) else {"ddp_zero", "torch"})

    assert violations(foreign) == {}


def test_packages_that_need_no_torch_run_without_it() -> None:
    """Some packages' `__init__` import upper floors, so empty files stand in for them."""
    ground = sorted(name for name in FILES if is_pure(name))
    program = f"""
import importlib, sys, types
sys.modules["torch"] = None  # importing it raises
stubs = ["checkpoint", "deepspeed", "launch", "values", "core.backward", "core.comm"]
for name in ("ddp_zero", *("ddp_zero." + stub for stub in stubs)):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [{str(REPOSITORY)!r} + "/" + name.replace(".", "/")]
for name in {ground!r}:
    importlib.import_module("ddp_zero." + name)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG, check=False)
    assert (result.stderr, result.returncode) == ("", 0)


def test_the_design_page_shows_the_same_packages() -> None:
    page = (REPOSITORY / "docs" / "design.md").read_text()
    (section,) = re.findall(r"^## The packages\n(.*?)(?=^## |\Z)", page, flags=re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| *(\d+) *\| *`?([\w.]+)", section, flags=re.MULTILINE)
    assert {name: int(floor) for floor, name in rows} == FLOORS


# Who communicates


def test_collectives_are_called_in_core_comm_alone() -> None:
    """`launch` calls `init_process_group`, which is what it is for; torchft's manager is no group of this library's."""
    found = {name: lines for name in FILES if (lines := communications(read(name)))}
    assert len(found.pop("core.comm.communicator")) > 5
    assert {line.split()[1] for line in found.pop("launch")} == {"torch.distributed.init_process_group"}
    assert {line.split()[1] for line in found.pop("integrations.torchft")} == {".allreduce"}
    assert {name: lines for name, lines in found.items() if package_of(name) != "core.comm"} == {}


def test_the_names_that_communicate_are_names_of_this_torch() -> None:
    assert {name for name in COMMUNICATING if not hasattr(dist, name)} <= {"all_gather_coalesced"}
    assert {name for name in GROUP_METHODS if hasattr(torch.Tensor, name)} == set()


# Who points tensors elsewhere


def test_only_storage_moves_parameters() -> None:
    counts = {name: len(lines) for name in FILES if (lines := moves(read(name)))}
    assert counts == {"core.local.storage": 2, "core.local.parameters": 1}  # the last: views of parts


# Names


def names_of_modules_taken(package: str, tree: ast.Module) -> set[str]:
    """Names in the `__init__` of a package that stand for anything but the module of this name in it."""
    inside = "" if package == "__init__" else f"{package}."
    defined = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    bound = bindings(tree) | dict(zip(defined, defined, strict=True))
    modules = {name for name in bound if f"{inside}{name}" in FILES}
    return {name for name in modules if bound[name] != f"ddp_zero.{inside}{name}"}


def test_no_function_takes_the_name_of_a_module() -> None:
    """Else ``import ddp_zero.x as m`` gives the function, and ``ddp_zero.x.y`` is not found."""
    packages = [name for name, path in FILES.items() if path.name == "__init__.py"]
    assert len(packages) > 15
    assert {name: taken for name in packages if (taken := names_of_modules_taken(name, read(name)))} == {}


# Who asks whether a parameter is cut

ASKS_WHETHER_CUT = {
    *("core.local.parameters", "core.step.rank_shard", "core.backward.visible_gradients", "checkpoint.rows"),
    "integrations.torchft",
}
"""Besides the plan, values, and `parallel`, whose cuts are of whole matrices. Others ask these for what is right for
a part of a parameter and for all of it alike: parts by index, elements of a value, the state of a part."""


def asks_whether_cut(tree: ast.Module) -> list[int]:
    """Lines that use a predicate of the plan, or compare a part with None, which stands for all of a parameter."""
    lines = []
    for node in nodes_of(tree):
        match node:
            case ast.Name(id="is_cut") | ast.Attribute(attr="is_cut" | "cuts", ctx=ast.Load()):
                lines.append(node.lineno)
            case ast.Compare(left=left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None)]):
                text = ast.unparse(left).strip("()")
                lines += [node.lineno] if re.search(r"\bpart(\(.*)?$|parts(\.get\(|\[)", text) else []
    return lines


def test_few_files_ask_whether_a_parameter_is_cut() -> None:
    elsewhere = {name: lines for name in FILES if (lines := asks_whether_cut(read(name)))}
    allowed = {name for name in elsewhere if package_of(name) in ("core.plan", "values", "parallel")}
    assert {name: lines for name, lines in elsewhere.items() if name not in allowed | ASKS_WHETHER_CUT} == {}
    assert ASKS_WHETHER_CUT <= elsewhere.keys(), "an exception that is needed no more"
    assert len(ASKS_WHETHER_CUT) <= 5


# Who looks into DDP and into backward


def test_internals_of_ddp_and_autograd_are_used_in_core_ddp_reducer_alone() -> None:
    """Hooks and reductions name the type of buckets; stand-ins are subclasses of tensors; messages open no ranges."""
    found = {name: names for name in FILES if (names := internals(read(name)))}
    assert {"_execution_engine", "_current_graph_task_id", "torch._C", "static_graph"} <= found.pop("core.ddp.reducer")
    assert found.pop("core.comm") == {"logger"}  # its own, which its face names
    below_python = {name: names for name, names in found.items() if names == {"torch._C"}}
    assert set(below_python) == {*("core.comm.exchange", "core.local.compiler", "values.placeholders", "insight.stats")}
    takes_buckets = {name: names for name, names in found.items() if name not in below_python}
    assert set(takes_buckets) == {
        *("core.comm.communicator", "core.ddp.registered_hook", "core.backward.planned_reducer")
    }
    assert all(names == {"GradBucket"} for names in takes_buckets.values())


def test_the_names_of_internals_are_names_of_this_torch() -> None:
    engine = torch.autograd.Variable._execution_engine
    assert hasattr(engine, "queue_callback")
    assert hasattr(torch._C, "_current_graph_task_id")
    assert hasattr(dist, "GradBucket")
    source = inspect.getsource(DistributedDataParallel)
    assert {name for name in DDP_INTERNALS if f"self.{name} = " not in source} == set()


# What tests reach into

DOOR = "internals.py"
"""The one file of the tests that reads and replaces private attributes of the library."""

OF_FRAMEWORKS = {
    ("frameworks/test_transformers_config.py", "_get_grad_norm")  # of a Trainer without this library
}
"""Private names that a test reads of an object that is not the library's."""


@cache
def private_names() -> frozenset[str]:
    """Private attributes, functions and constants that any file of the library defines."""
    found = set()
    for node in (one for name in FILES for one in nodes_of(read(name))):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return frozenset(name for name in found if re.match(r"_[^_]", name))


def reaches(tree: ast.Module) -> list[str]:
    """Private names of the library that code reads of anything but ``self``, imports, or replaces by name."""
    return [f"{line}: {name}" for line, name in _reaches(tree) if name in private_names()]


def _reaches(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super"))):
                pass
            case ast.Attribute(attr=name):
                yield node.lineno, name
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("ddp_zero"):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.Call(func=ast.Attribute(attr="multiple"), keywords=keywords):  # of mock.patch
                yield from ((node.lineno, keyword.arg) for keyword in keywords if keyword.arg)
            case ast.Call(args=args):  # of getattr, monkeypatch.setattr, mock.patch.object
                texts = [one.value for one in args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
                yield from ((node.lineno, text) for text in texts)
            case ast.Constant(value=str(text)) if text.startswith("ddp_zero."):  # of mock.patch
                yield from ((node.lineno, part) for part in text.split("."))
            case ast.Constant(value=str(text)) if "import ddp_zero" in text or "from ddp_zero" in text:
                with suppress(SyntaxError):  # a program for another process
                    yield from ((node.lineno + line - 1, name) for line, name in _reaches(ast.parse(text)))


def test_tests_reach_into_the_library_through_one_door() -> None:
    tests = REPOSITORY / "tests"
    found = {path.relative_to(tests).as_posix(): path for path in sorted(tests.rglob("*.py"))}
    assert reaches(ast.parse(found.pop(DOOR).read_text()))
    del found["unit/test_architecture.py"]  # its examples below
    texts = {name: path.read_text() for name, path in found.items()}
    wrong = {
        (name, reach.split(": ")[1]): reach
        for name, text in texts.items()
        if not private_names().isdisjoint(re.findall(r"\b_\w+", text))
        for reach in reaches(ast.parse(text))
    }
    assert {place: reach for place, reach in wrong.items() if place not in OF_FRAMEWORKS} == {}
    assert OF_FRAMEWORKS <= wrong.keys(), "an exception that is needed no more"


IMPORT_OF_A_TEST = re.compile(
    r"^\s*(?:from|import) tests\.(?:\w+\.)*test_\w+|^\s*from tests[\w.]* import .*\btest_\w+", re.M
)


def test_imports_from_test_files_are_absent() -> None:
    """What several use is in a file of its own: nobody looks for a model or a loop in the tests of something else."""
    files = sorted((REPOSITORY / "tests").rglob("*.py"))
    assert {str(path): found for path in files if (found := IMPORT_OF_A_TEST.findall(path.read_text()))} == {}
    for wrong in ("from tests.multiproc.test_stage2 import Tower", "    from tests.multiproc import test_stage2"):
        assert IMPORT_OF_A_TEST.search(wrong)


# Sizes and messages


FACADE = "optimizer"
"""Documents every public method, which is most of it."""


def test_methods_of_the_facade_are_calls_of_the_engine() -> None:
    """At most four statements, apart from construction and copies."""
    (facade,) = (node for node in read(FACADE).body if isinstance(node, ast.ClassDef))
    methods = [node for node in ast.walk(facade) if isinstance(node, ast.FunctionDef)]
    counts = {method.name: sum(isinstance(node, ast.stmt) for node in ast.walk(method)) for method in methods}
    documented = {method.name for method in methods if ast.get_docstring(method)}
    found = {name: counts[name] - 1 - (name in documented) for name in counts}
    assert {name for name, count in found.items() if count > 4} == {"__init__", "__deepcopy__"}


def test_no_object_asks_whether_it_has_been_built() -> None:
    """An object is whole when its constructor returns, and nothing calls its methods before."""
    assert violations(lambda name: re.findall(r"hasattr\(self\b.*", "\n".join(map(ast.unparse, read(name).body)))) == {}


def test_every_raise_and_every_assertion_says_something() -> None:
    """``raise`` alone hands on an exception that has a message already."""

    def silent(name: str) -> list[int]:
        nodes = nodes_of(read(name))
        raises = [node for node in nodes if isinstance(node, ast.Raise) and node.exc]
        return [
            *(node.lineno for node in raises if not (isinstance(node.exc, ast.Call) and node.exc.args)),
            *(node.lineno for node in nodes if isinstance(node, ast.Assert) and not node.msg),
        ]

    assert violations(silent) == {}


WRITES_FOR_TORCH = {
    *("checkpoint.tensor_file", "checkpoint.export", "checkpoint.foreign.deepspeed", "deepspeed.engine")
}
"""Files that write what torch's own tools, or DeepSpeed, unpickle; nothing here reads it that way."""

PICKLING = {"pickle", "torch.load", "torch.save", "torch.package"} | {
    f"torch.distributed.{function}" for function in COMMUNICATING if "object" in function
}


def test_pickle_is_used_to_write_for_torch_alone() -> None:
    """Neither the module nor the calls of torch that use it."""

    def pickles(name: str) -> set[str | None]:
        tree = read(name)
        bound = bindings(tree)
        nodes = [node for node in nodes_of(tree) if isinstance(node, ast.Name | ast.Attribute)]
        modules = {one for one in imported(tree) if one.split(".")[0] in ("pickle", "marshal", "shelve", "dill")}
        calls = PICKLING & {dotted(node, bound) for node in nodes}
        return {*modules, *calls}

    assert violations(pickles) == {name: {"torch.save"} for name in WRITES_FOR_TORCH}


# What the looks above see

SEEN: list[tuple[Callable[[ast.Module], Collection[object]], str, object]] = [
    (communications, "import torch\ntorch.distributed.barrier()", 1),
    (communications, "import torch.distributed as d\nd.all_reduce(x)", 1),
    (communications, "from torch import distributed as d\ndef f():\n    d.reduce(x, 0)", 1),
    (communications, "from torch.distributed import all_gather as ag\nlater = [ag]", 1),
    (communications, "import torch.distributed.distributed_c10d as c\nc._all_gather_base(x, y)", 1),
    (communications, "def f(comm):\n    comm.process_group.allreduce(x).wait()", 1),
    (communications, "from functools import reduce\nreduce(f, x)", 0),
    (communications, "import torch\ntorch.gather(x, 0, y)\ny = x.scatter(0, i, x)", 0),
    (moves, "a, p.data = q", 1),
    (moves, "p.data += q", 1),
    (moves, "for p.data in q: pass", 1),
    (moves, "setattr(p, 'data', q)", 1),
    (moves, "p.set_(q)", 1),
    (moves, "q = p.data\np.grad = q", 0),
    (partial(names_of_modules_taken, "__init__"), "from ddp_zero.core.plan import launch", {"launch"}),
    (partial(names_of_modules_taken, "__init__"), "from ddp_zero import launch", set()),
    (partial(names_of_modules_taken, "checkpoint"), "def loading(): ...", {"loading"}),
    (asks_whether_cut, "if is_cut(pieces) or binding.cuts: pass", 2),
    (asks_whether_cut, "if (part := target.part) is not None: pass", 1),
    (asks_whether_cut, "x = self._parts.get(index) is None", 1),
    (asks_whether_cut, "x = part_of(value, param, part)\ny = apart is None or part.shared is None", 0),
    (internals, "getattr(self.ddp, 'reducer')", {"reducer"}),
    (internals, "from torch._C import _current_graph_task_id as f\nf()", {"torch._C", "_current_graph_task_id"}),
    (internals, "import torch\nq = torch.autograd.Variable._execution_engine", {"_execution_engine"}),
    (internals, "from torch.distributed import GradBucket as B\ndef f(b: B): pass", {"GradBucket"}),
    (internals, "logger.debug('the reducer is done')\nreducer = 1", set()),
    (reaches, "f(opt)._engine.hook", 1),
    (reaches, "monkeypatch.setattr(opt, '_engine', None)", 1),
    (reaches, "mock.patch.multiple(opt, _engine=None)", 1),
    (reaches, "mock.patch('ddp_zero.core.engine.engine.Engine._take_step', f)", 1),
    (reaches, "from ddp_zero.core.engine.attachment import _DROPPED", 1),
    (reaches, "PROGRAM = 'import ddp_zero\\nopt._engine.step()'", 1),
    (reaches, "self._engine\nsuper()._take_step()\nopt._unheard_of", 0),
]


@pytest.mark.parametrize(("look", "code", "found"), SEEN, ids=[code for _, code, _ in SEEN])
def test_each_search_of_the_code_finds_what_it_is_for_and_nothing_else(
    look: Callable[[ast.Module], Collection[object]], code: str, found: object
) -> None:
    seen = look(ast.parse(code))
    assert (len(seen) if isinstance(found, int) else seen) == found
