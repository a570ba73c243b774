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


def boxes_of(run: Tensor, tensor: Tensor, part: Part) -> Iterator[tuple[Chunk, Tensor]]:
    """The boxes of ``tensor`` that make up its part ``part``, each with its elements, a view of ``run``.

    ``run`` has the part's elements, 1-D in the order of the tensor's memory; or all, for a part of None.
    """
    if part is None:
        yield Chunk.whole(tensor.shape), run
        return
    dims = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    original_order = [dims.index(dim) for dim in range(tensor.dim())]
    begin = 0
    for chunk in Chunk.of_run([tensor.shape[dim] for dim in dims], part.start, part.stop):
        offsets, sizes = (tuple(per_dim[place] for place in original_order) for per_dim in (chunk.offsets, chunk.sizes))
        yield Chunk(offsets, sizes), run[begin : begin + chunk.numel].reshape(chunk.sizes).permute(original_order)
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
    """The state of a part ``want`` of a parameter, from the state of a part ``have`` that has it; views if possible."""
    if want is None:
        return state
    return {key: narrow_value(value, param, have, want) for key, value in state.items()}


def state_of_part(whole: Mapping[str, Any], param: Tensor, part: Part) -> Mapping[str, Any]:
    """The state of a part of a parameter, its tensors copied from ``whole``; for all elements ``whole`` itself."""
    if part is None:
        return whole
    return {
        key: item.clone() if isinstance(item, Tensor) and item is not whole[key] else item
        for key, item in narrow_state(whole, param, None, part).items()
    }


def narrow_value(value: Any, param: Tensor, have: Part, want: Part) -> Any:
    """As `narrow_state`, for one value of a state; a value that is not per element is returned as it is."""
    if want is None or not _is_per_element(value, param, have):
        return value
    return part_of(value, param, want) if have is None else value[want.start - have.start : want.stop - have.start]


def join_parts(parts: Sequence[tuple[Part, Any]], param: Tensor, want: Part) -> Any:
    """The state of several parts that lie end to end, given in any order, joined.

    ``want`` is None for the shape of the parameter, of which the parts are all elements; else the result is 1-D.
    """
    if parts[0][0] == want:
        return parts[0][1]
    ordered = sorted(((part, state) for part, state in parts if part is not None), key=lambda run: run[0].start)
    states = [state for _, state in ordered]
    for (part, state), first in zip(ordered, states[:1] * len(ordered), strict=True):
        assert state.keys() == first.keys(), f"{list(first)}, but {list(state)} from element {part.start} on"
    joined = {}
    for key, value in states[0].items():
        if _is_per_element(value, param, ordered[0][0]):
            run = torch.cat([state[key] for state in states]) if len(states) > 1 else value
            value = run if want is not None else whole_of(run.contiguous(), param)
        joined[key] = value
    return joined


def join_states(parts_of_index: Mapping[int, Sequence[tuple[Part, Any]]], params: Sequence[Tensor]) -> dict[int, Any]:
    """Join the states of parts of parameters to states of whole parameters; both by index."""
    return {index: join_parts(parts, params[index], None) for index, parts in parts_of_index.items()}


def _is_per_element(value: Any, param: Tensor, part: Part) -> bool:
    return isinstance(value, Tensor) and tuple(value.shape) == shape_of(param.shape, part)
