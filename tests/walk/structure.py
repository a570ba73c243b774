"""Counts in the text of the library: chains of attributes, private reach, lines, and comments."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.walk.steps import PACKAGE

CORE = ("core",)
"""Packages of the core; the files at the root belong to it too."""
HOPS = 3


def trees() -> dict[str, ast.Module]:
    """Every file of the library, parsed."""
    return {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def lines_of(paths: list[Path]) -> int:
    """Lines in all of them."""
    return sum(len(path.read_text().splitlines()) for path in paths)


def chains(tree: ast.Module) -> Iterator[str]:
    """Chains from an object of the library through at least `HOPS` attributes, such as ``a.b.c.d``; not of modules.

    Whole names of imported modules are no reach into an object.
    """
    modules = {
        alias.asname or alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names, root = _names(node)
            hops = len(names) - (root in {"self", "cls"} and len(names) > 0)
            if root not in modules and hops >= HOPS:
                yield ".".join([root, *names])


def _names(node: ast.expr) -> tuple[list[str], str]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return names, node.id if isinstance(node, ast.Name) else ""


def private_reach(tree: ast.Module) -> Iterator[str]:
    """Uses of an object's private attributes in a file that does not define them."""
    own = {
        name
        for node in ast.walk(tree)
        for name in (
            [node.attr]
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            else [node.name]
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            else [node.target.id]
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            else []
        )
    }
    for node in ast.walk(tree):
        is_own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
        if isinstance(node, ast.Attribute) and node.attr in _OURS and node.attr not in own and not is_own:
            yield ast.unparse(node)


_OURS = {"_engine", "_shard", "_members", "_hook"}
"""Private attributes of façades, which files of other rooms have reached for."""
