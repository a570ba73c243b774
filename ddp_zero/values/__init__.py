"""Values: shapes, parts and chunks, trees of tensors, the values of a model, and tensors that are not here."""

from ddp_zero.values.chunks import Chunk
from ddp_zero.values.live_model import LiveModel, by_group, ddp_models_in, group_of, is_extra, the_ddp_model_in
from ddp_zero.values.parts import boxes_of, part_of, state_of_part
from ddp_zero.values.shapes import Part, Value
from ddp_zero.values.tree import (
    TensorSpec,
    Tree,
    check_declared,
    fill,
    flatten,
    flatten_states,
    memory_of,
    restore,
    specs_in,
    state_class,
    unflatten,
)

__all__ = ["LiveModel", "by_group", "ddp_models_in", "group_of", "is_extra", "the_ddp_model_in"]
__all__ += ["Chunk", "Part", "Value", "boxes_of", "part_of", "state_of_part"]
__all__ += ["TensorSpec", "Tree", "check_declared", "fill", "flatten", "flatten_states", "memory_of", "restore"]
__all__ += ["specs_in", "state_class", "unflatten"]
