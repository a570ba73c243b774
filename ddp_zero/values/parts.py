"""A part of a parameter: consecutive elements in the order of its memory, as a 1-D tensor; and its optimizer state.

Parameters that are cut are dense, so this order is a function of shape and strides: the same on every rank.

A tensor in a state is *per element* if it has the shape of the stepped tensor: the parameter, or its 1-D part.
Everything else, such as a step counter, is equal for all parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ddp_zero.values.chunks import Chunk
from ddp_zero.values.shapes import Part, is_dense, shape_of


def run_of(tensor: Tensor) -> Tensor:
    """All elements of a dense tensor, 1-D, in the order of its memory; a view."""
    return tensor.as_strided((tensor.numel(),), (1,))


@torch.no_grad()
def part_of(value: Tensor, param: Tensor, part: Part) -> Tensor:
    """The elements of a part of a value in the parameter's shape; a view if the strides are the parameter's."""
    if part is None:
        return value
    if value.stride() != param.stride():
        value = torch.empty_like(param, dtype=value.dtype, device=value.device).copy_(value)
    return run_of(value.detach())[part]


def boxes_of(run: Tensor, held: Tensor, part: Part) -> Iterator[tuple[Chunk, Tensor]]:
    """The chunks of a tensor that a part of it makes up, each with its view of the part's elements."""
    if part is None:
        yield Chunk.whole(held.shape), run
        return
    dims = sorted(range(held.dim()), key=held.stride, reverse=True)
    back = [dims.index(dim) for dim in range(held.dim())]
    begin = 0
    for chunk in Chunk.of_run([held.shape[dim] for dim in dims], part.start, part.stop):
        offsets, sizes = (tuple(one[place] for place in back) for one in (chunk.offsets, chunk.sizes))
        yield Chunk(offsets, sizes), run[begin : begin + chunk.numel].reshape(chunk.sizes).permute(back)
        begin += chunk.numel


def whole_of(run: Tensor, param: Tensor) -> Tensor:
    """All elements of a parameter, 1-D and contiguous, in its shape and strides; a view."""
    return run.as_strided(param.shape, param.stride())


def check_can_be_cut(param: Tensor, label: str) -> None:
    """Check that a parameter's elements fill one run of memory; ValueError if not."""
    if not is_dense(param.shape, param.stride()):
        raise ValueError(
            f"Expected parameters without gaps or overlaps in memory with partition='elements', got {label} with "
            f"strides {list(param.stride())}. Use partition='parameters'. [ZERO-114]"
        )


def narrow_state(state: Any, param: Tensor, have: Part, want: Part) -> Any:
    """The state of the part ``want`` of a parameter, from that of ``have``; tensors are views where possible."""
    if want is None:
        return state
    return {key: narrow_value(value, param, have, want) for key, value in state.items()}


def own_state(whole: Mapping[str, Any], param: Tensor, part: Part) -> Mapping[str, Any]:
    """The state of a part of a parameter, copied from the state of the whole; if it is all, that state itself."""
    if part is None:
        return whole
    return {
        key: item.clone() if isinstance(item, Tensor) and item is not whole[key] else item
        for key, item in narrow_state(whole, param, None, part).items()
    }


def narrow_value(value: Any, param: Tensor, have: Part, want: Part) -> Any:
    if want is None or not _is_per_element(value, param, have):
        return value
    return part_of(value, param, want) if have is None else value[want.start - have.start : want.stop - have.start]


def join_parts(parts: Sequence[tuple[Part, Any]], param: Tensor, want: Part) -> Any:
    """The state of several parts that lie end to end, given in any order, joined.

    ``want`` is None for the shape of the parameter, of which the parts are all elements; else the result is 1-D.
    """
    if parts[0][0] == want:
        return parts[0][1]
    runs = sorted(((part, state) for part, state in parts if part is not None), key=lambda run: run[0].start)
    states = [state for _, state in runs]
    for (part, state), first in zip(runs, states[:1] * len(runs), strict=True):
        assert state.keys() == first.keys(), f"{list(first)}, but {list(state)} from element {part.start} on"
    found = {}
    for key, value in states[0].items():
        if _is_per_element(value, param, runs[0][0]):
            run = torch.cat([state[key] for state in states]) if len(states) > 1 else value
            value = run if want is not None else whole_of(run.contiguous(), param)
        found[key] = value
    return found


def join_states(found: Mapping[int, Sequence[tuple[Part, Any]]], params: Sequence[Tensor]) -> dict[int, Any]:
    """The states of whole parameters, by index, from those of the parts of each."""
    return {index: join_parts(parts, params[index], None) for index, parts in found.items()}


def _is_per_element(value: Any, param: Tensor, part: Part) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == shape_of(param.shape, part)
