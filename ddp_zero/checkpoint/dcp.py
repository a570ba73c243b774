"""The index that the tools of `torch.distributed.checkpoint` require next to the files of tensors.

It is written for those tools and never read here, because reading it means unpickling it.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ddp_zero.checkpoint.manifest import CutTensor, Source, StoredTensor
from ddp_zero.core.local.tree import Tree
from ddp_zero.core.plan.boxes import Box

OBJECTS_FILE = "__0_1.distcp"
"""The file of the values that are not tensors, each as `torch.save` writes it."""

_Path = tuple[str | int, ...]


def write_dcp_metadata(folder: Path, tree: Tree) -> None:
    """Write the index, and a file with the values that are not tensors, and wait until they are on disk.

    Args:
        folder: the folder of the files of tensors.
        tree: the tree that a reader gets: dicts of stored tensors and plain values. A value's key in the index is its
            path joined by dots.

    Raises:
        ValueError: if two values have the same key.
    """
    entries: dict[str, Any] = {}
    results: list[WriteResult] = []
    paths: dict[str, _Path] = {}
    with (folder / OBJECTS_FILE).open("xb") as file:
        for path, value in _leaves(tree, ()):
            key = ".".join(map(str, path))
            if key in entries:
                raise ValueError(f"Expected keys that differ when joined by dots, got {key!r} twice.")
            paths[key] = path
            if isinstance(value, StoredTensor):
                entries[key], written = _tensor_entry(key, value)
                results += written
            else:
                begin = file.tell()
                torch.save(value, file)
                info = _StorageInfo(OBJECTS_FILE, begin, file.tell() - begin)
                entries[key] = BytesStorageMetadata()
                results.append(WriteResult(MetadataIndex(key), info.length, info))
        file.flush()
        os.fsync(file.fileno())
    FileSystemWriter(folder).finish(Metadata(entries, planner_data=paths), [results])


def _leaves(tree: Tree, path: _Path) -> Iterator[tuple[_Path, Any]]:
    """Stored tensors, and the largest subtrees without any that are not dicts, with their paths."""
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*path, str(key)))
    elif isinstance(tree, list | tuple) and _has_tensors(tree):
        for position, value in enumerate(tree):
            yield from _leaves(value, (*path, position))
    else:
        yield path, tree


def _has_tensors(tree: Tree) -> bool:
    if isinstance(tree, dict | list | tuple):
        return any(_has_tensors(value) for value in (tree.values() if isinstance(tree, dict) else tree))
    return isinstance(tree, StoredTensor)


def _tensor_entry(key: str, stored: StoredTensor) -> tuple[TensorStorageMetadata, list[WriteResult]]:
    size = torch.Size(stored.spec.shape)
    whole = Box.whole(size)
    sources = stored.sources if isinstance(stored, CutTensor) else (Source(stored, whole, whole),)
    chunks, results = [], []
    for source in sources:
        offsets, span = torch.Size(source.place.offsets), source.stored.span
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(source.place.sizes)))
        info = _StorageInfo(span.file, span.begin, span.length)
        results.append(WriteResult(MetadataIndex(key, offsets), info.length, info))
    return TensorStorageMetadata(TensorProperties(dtype=stored.spec.dtype), size, chunks), results
