"""Small checkpoints to read, and forged checkpoints whose checksums all fit."""

import copy
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ddp_zero import checkpoint
from ddp_zero.checkpoint.folder import MARKER, part_name, tensor_file_name
from ddp_zero.checkpoint.tensor_file import FileSpan, encode_part
from ddp_zero.values.tree import Tree, flatten


class Tied(nn.Module):
    """A model with two names for one weight, a frozen parameter, buffers, and state that is no tensor."""

    note: Tree

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.bfloat16), requires_grad=False)
        self.note = {"epoch": 7, "seen": [1, 2]}

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.norm(self.embedding(tokens)))
        return hidden

    def get_extra_state(self) -> Tree:
        return self.note

    def set_extra_state(self, state: Tree) -> None:
        self.note = state


TENSORS = [
    *("frozen", "embedding.weight", "norm.weight", "norm.bias"),
    *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
]
"""Names of the model's tensors, without the second name ``head.weight``."""


def train(model: nn.Module, optimizer: Optimizer, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randint(0, 5, (8,), generator=generator)).square().mean().backward()
    optimizer.step()


def adamw(model: nn.Module) -> AdamW:
    """An optimizer of two groups, one of them with a tensor among its options."""
    decayed = [param for param in model.parameters() if param.requires_grad and param.dim() > 1]
    others = [param for param in model.parameters() if param.requires_grad and param.dim() == 1]
    return AdamW([{"params": others, "weight_decay": 0.0}, {"params": decayed, "lr": torch.tensor(0.25)}], lr=0.125)


def sgd(model: nn.Module) -> SGD:
    """An optimizer that also has the frozen parameter, of which it has no state."""
    return SGD(model.parameters(), lr=0.5, momentum=0.9)


def trained(make: Callable[[nn.Module], Optimizer] = adamw, steps: int = 2) -> tuple[Tied, Optimizer]:
    """A model and an optimizer after some steps, the same every time."""
    return copy.deepcopy(_trained(make, steps))


@lru_cache
def _trained(make: Callable[[nn.Module], Optimizer], steps: int) -> tuple[Tied, Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Tied()
    optimizer = make(model)
    for step in range(steps):
        train(model, optimizer, step)
    return model, optimizer


def save(root: Path, model: nn.Module, optimizer: Optimizer | None = None, **options: Any) -> Path:
    """Save without `torch.distributed`; the folder of the checkpoint."""
    return checkpoint.save(root, model, optimizer, **options).wait()


# Forging


def whole_rows(model: dict[Any, Any], state: dict[Any, dict[Any, Any]]) -> list[Any]:
    """The rows of values that one rank has whole, by name, and of states, by name and key."""
    values = [(name, None, value) for name, value in model.items()]
    return [*values, *((name, key, value) for name, states in state.items() for key, value in states.items())]


MODEL: dict[str, Any] = {"w": torch.zeros(2, 3), "b": torch.zeros(3), "_extra_state": {"epoch": 1}}
MODEL_1: dict[str, Any] = {"c": torch.zeros(1)}
STATE: dict[str, Any] = {"b": {"step": torch.zeros(())}, "w": {"exp_avg": torch.zeros(2, 3), "n": 3}}


def rank_0(*, model: Any = MODEL, state: Any = STATE, **changed: Any) -> dict[str, Any]:
    """The tree of a part that has everything, as rank 0 writes it."""
    tree: dict[str, Any] = {
        "rows": [*changed.pop("rows", []), *whole_rows(model, state)],
        "births": {"b": (0, 1), "w": (0, 0)},
        "rank_extra": {"rng": torch.zeros(4, dtype=torch.uint8)},
        "shared": {
            "optimizer": "torch.optim.adamw.AdamW",
            "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": ["w"]}, {"lr": 0.25, "params": ["b"]}],
            "other_state": {"calls": 3},
            "loss_scale": {"scale": 2.0},
            "trainable": ["w", "b"],
            "aliases": {"tied": "w"},
            "extra": {"scheduler": [1, 2.5, None]},
        },
    }
    shared = {key: changed.pop(key) for key in list(changed) if key in tree["shared"]}
    return {**tree, **changed, **({"shared": {**tree["shared"], **shared}} if shared else {})}


def rank_1(*, model: Any = MODEL_1, **changed: Any) -> dict[str, Any]:
    """The tree of a part as another rank writes it."""
    tree: dict[str, Any] = {
        "rows": [*changed.pop("rows", []), *whole_rows(model, changed.pop("state", {}))],
        "births": {},
        "rank_extra": None,
        "shared": None,
    }
    return {**tree, **changed}


def forge(folder: Path, *trees: Tree) -> Path:
    """A checkpoint of these parts, whose checksums fit, but whose tensors lie nowhere."""
    texts = []
    for rank, tree in enumerate(trees):
        text, tensors = flatten(tree)
        spans = [FileSpan(tensor_file_name(rank), 0, 1, 64 * at, "0" * 64) for at in range(len(tensors))]
        texts.append(encode_part(text, spans))
    return forge_texts(folder, texts)


def forge_texts(folder: Path, texts: Sequence[str]) -> Path:
    """A checkpoint whose parts are these texts; what it had before besides parts and marker stays."""
    folder.mkdir(exist_ok=True)
    for rank, text in enumerate(texts):
        (folder / part_name(rank)).write_text(text, encoding="utf-8")
    return mark(folder, [hashlib.sha256(text.encode()).hexdigest() for text in texts])


def mark(folder: Path, digests: Sequence[Any], step: int = 3) -> Path:
    """Mark a folder as complete."""
    line = json.dumps({"format": "ddp_zero", "version": 4, "step": step, "parts": list(digests)})
    (folder / MARKER).write_text(f"{hashlib.sha256(line.encode()).hexdigest()}\n{line}\n", encoding="utf-8")
    return folder


def without(tree: Any, *path: Any) -> Any:
    """A copy without what lies at a path."""
    tree = copy.deepcopy(tree)
    inside = tree
    for key in path[:-1]:
        inside = inside[key]
    del inside[path[-1]]
    return tree


def replaced(tree: Any, path: Sequence[Any], value: Any) -> Any:
    """A copy with another value at a path."""
    if not path:
        return value
    key, *rest = path
    if isinstance(tree, dict):
        return {one: replaced(inner, rest, value) if one == key else inner for one, inner in tree.items()}
    kind = list if isinstance(tree, list) else tuple  # a `torch.Size` takes whole numbers alone
    return kind(replaced(inner, rest, value) if at == key else inner for at, inner in enumerate(tree))


def paths(tree: Any) -> list[tuple[Any, ...]]:
    """The way to each value in a tree, and to each key's value."""
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list | tuple) else ()
    return [(), *((key, *rest) for key in keys for rest in paths(tree[key]))]
