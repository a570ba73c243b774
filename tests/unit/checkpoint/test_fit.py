from collections.abc import Iterable, Mapping, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_zero.checkpoint.loading import Fit, fit_groups, fit_values, list_lines
from ddp_zero.parallel.names import rename_all
from ddp_zero.values.shapes import Value

MATRIX = Value((2, 3), "float32")
VECTOR = Value((3,), "float32")
NO_TENSOR = Value(None, None)


def of_values(saved: Mapping[str, Value], live: Mapping[str, Value]) -> Fit:
    fit = Fit()
    fit_values(saved, live, fit)
    return fit


def of_groups(
    saved: Sequence[Sequence[str]],
    live: Sequence[Sequence[str]],
    *,
    values: str | None = None,
    was_frozen: str = "",
    is_frozen: str = "",
) -> Fit:
    """What fits where all names, or those in ``values``, fit as values."""
    names = {name for group in [*saved, *live] for name in group}
    fit = Fit(values=sorted(names) if values is None else values.split())
    fit_groups(saved, live, names - set(was_frozen.split()), names - set(is_frozen.split()), fit)
    return fit


# Renaming


def renamed(names: Iterable[str], rename: Mapping[str, str]) -> dict[str, str]:
    return rename_all(names, rename, "rename=", "the checkpoint")


def test_rename_of_names_that_are_not_saved_is_refused_with_all_of_them() -> None:
    with pytest.raises(ValueError, match=r"^Expected names in rename= that the checkpoint has, got \['b', 'w', 'zz'\]"):
        renamed(["a.w", "bb.w"], {"zz": "x", "a": "y", "b": "z", "w": "v"})


@pytest.mark.parametrize(
    ("names", "rename"),
    [(["a.w", "b.w"], {"a": "b"}), (["a.w", "b.w"], {"a": "c", "b": "c"}), (["a.w", "b.w"], {"a.w": "c.w", "b": "c"})],
    ids=["onto one that stays", "two onto a third", "a name and a prefix"],
)
def test_rename_to_the_same_name_is_refused(names: list[str], rename: dict[str, str]) -> None:
    with pytest.raises(
        ValueError, match=r"a name of its own, got several parameters of the checkpoint under \['[bc]\.w'\]"
    ):
        renamed(names, rename)


dotted = st.lists(st.sampled_from("ab"), min_size=1, max_size=3).map(".".join)


@given(st.lists(dotted, unique=True, max_size=6), st.dictionaries(dotted, dotted, max_size=3))
def test_renaming_replaces_the_longest_leading_parts_or_raises(names: list[str], rename: dict[str, str]) -> None:
    expected, used = {}, set()
    for name in names:
        parts = name.split(".")
        stems = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        stem = next((stem for stem in stems if stem in rename), None)
        used.add(stem)
        rest = parts[len(stem.split(".")) :] if stem else []
        expected[name] = ".".join([rename[stem], *rest]) if stem else name
    if set(rename) - used or len(set(expected.values())) < len(names):
        with pytest.raises(ValueError, match="rename="):
            renamed(names, rename)
    else:
        assert renamed(names, rename) == expected
        assert list(renamed(names, rename)) == names


# Values


def test_a_value_that_was_not_saved_is_a_misfit() -> None:
    assert of_values({}, {"a": MATRIX}) == Fit(misfits=["'a' of the model is not in the checkpoint"])


def test_a_saved_value_that_the_model_lacks_is_a_misfit() -> None:
    assert of_values({"a": MATRIX}, {}) == Fit(misfits=["'a' of the checkpoint is not in the model"])


def test_another_shape_is_a_misfit_that_cannot_be_loaded() -> None:
    fit = of_values({"a": Value((3, 2), "bfloat16")}, {"a": MATRIX})
    assert fit == Fit(misfits=["'a' has shape [2, 3], saved is [3, 2]"])


def test_another_dtype_is_a_misfit_that_can_be_converted() -> None:
    fit = of_values({"a": Value((2, 3), "bfloat16")}, {"a": MATRIX})
    assert fit == Fit(values=["a"], misfits=["'a' has dtype float32, saved is bfloat16"])


def test_a_tensor_in_place_of_another_value_is_a_misfit() -> None:
    fit = of_values({"a": NO_TENSOR, "b": VECTOR}, {"a": VECTOR, "b": NO_TENSOR})
    assert fit == Fit(
        misfits=[
            "'a' has shape [3], saved is none: it is no tensor",
            "'b' has shape none: it is no tensor, saved is [3]",
        ]
    )


values = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(Value, st.sampled_from([(), (1,), (2, 3)]), st.sampled_from(["float32", "bfloat16"]))
    | st.just(NO_TENSOR),
)


@given(values, values)
def test_every_value_fits_or_has_its_one_line(saved: dict[str, Value], live: dict[str, Value]) -> None:
    fit = of_values(saved, live)
    same_shape = [name for name in live if name in saved and saved[name].shape == live[name].shape]
    assert fit.values == same_shape
    unequal = [name for name in {**live, **saved} if saved.get(name) != live.get(name)]
    assert sorted(line.split("'")[1] for line in fit.misfits) == sorted(unequal)
    assert fit.notes == []


# Groups


@given(st.permutations(range(4)), st.randoms(use_true_random=False))
def test_groups_in_another_order_have_the_options_of_their_parameters(order: list[int], random: Random) -> None:
    saved = [["a", "b", "c"], ["d"], ["e", "f"], ["g", "h"]]
    live = [random.sample(saved[position], len(saved[position])) for position in order]
    fit = of_groups(saved, live)
    assert fit.groups == order
    assert fit.states == [name for names in live for name in names]
    assert fit.misfits == fit.notes == []


def test_both_halves_of_a_group_that_was_split_take_its_options() -> None:
    fit = of_groups([["a", "b"], ["c"]], [["a"], ["c"], ["b"]])
    assert (fit.groups, fit.misfits, fit.notes) == ([0, 1, 0], [], [])
    assert fit.states == ["a", "c", "b"]


def test_groups_that_were_joined_are_a_misfit_and_take_the_options_of_most() -> None:
    fit = of_groups([["a"], ["b", "c"]], [["a", "b", "c"]])
    assert fit.groups == [1]
    assert fit.misfits == ["group 0 has parameters of the saved groups [0, 1]"]
    assert fit.states == ["a", "b", "c"]


def test_of_groups_with_equally_many_parameters_the_first_saved_one_gives_the_options() -> None:
    fit = of_groups([["a"], ["b"], ["c"]], [["a"], ["c", "b"]])
    assert (fit.groups, fit.misfits) == ([0, 1], ["group 1 has parameters of the saved groups [1, 2]"])


def test_a_trainable_parameter_that_was_not_in_the_optimizer_is_a_misfit() -> None:
    fit = of_groups([["a"]], [["a", "b"]])
    assert (fit.states, fit.misfits, fit.notes) == (["a"], ["'b' of the optimizer is not in the saved one"], [])


def test_a_parameter_that_was_frozen_and_not_in_the_optimizer_is_a_note() -> None:
    fit = of_groups([["a"]], [["a", "b"]], was_frozen="b")
    assert (fit.states, fit.misfits) == (["a"], [])
    assert fit.notes == ["'b' starts without state: it was frozen and not in the optimizer"]


def test_a_trainable_parameter_that_left_the_optimizer_is_a_misfit() -> None:
    fit = of_groups([["a", "b"]], [["a"]])
    assert (fit.states, fit.misfits, fit.notes) == (["a"], ["'b' of the saved optimizer is not in this one"], [])


def test_a_parameter_that_is_frozen_and_left_the_optimizer_is_a_note() -> None:
    fit = of_groups([["a", "b"]], [["a"]], is_frozen="b")
    assert (fit.states, fit.misfits) == (["a"], [])
    assert fit.notes == ["the state of 'b' is left out: it is frozen and not in the optimizer"]


def test_a_frozen_parameter_in_both_optimizers_keeps_its_state() -> None:
    fit = of_groups([["a", "b"]], [["a", "b"]], was_frozen="a", is_frozen="b")
    assert (fit.states, fit.misfits, fit.notes) == (["a", "b"], [], [])


def test_a_group_of_parameters_that_were_all_frozen_keeps_its_options() -> None:
    fit = of_groups([["a"]], [["b"], ["a"]], was_frozen="b")
    assert (fit.groups, fit.misfits) == ([None, 0], [])
    assert fit.notes == [
        "group 0 keeps its options: the saved optimizer has none of its parameters",
        "'b' starts without state: it was frozen and not in the optimizer",
    ]


def test_a_group_without_parameters_keeps_its_options_silently() -> None:
    fit = of_groups([["a"], []], [[], ["a"]])
    assert (fit.groups, fit.misfits, fit.notes) == ([None, 0], [], [])


def test_groups_have_no_misfit_of_parameters_whose_values_are_missing() -> None:
    fit = of_groups([["a", "gone"]], [["a", "new"]], values="a")
    assert (fit.groups, fit.states, fit.misfits, fit.notes) == ([0], ["a"], [], [])


def test_parameters_whose_values_do_not_fit_have_no_say_in_the_options() -> None:
    fit = of_groups([["a"], ["b", "c"]], [["a", "b", "c"]], values="a")
    assert (fit.groups, fit.states, fit.misfits) == ([0], ["a"], [])


# Messages


def test_a_list_of_lines_has_a_dash_before_each() -> None:
    assert list_lines([]) == ""
    assert list_lines(["one", "two"]) == "\n  - one\n  - two"


def test_of_many_lines_the_first_are_listed() -> None:
    lines = [str(number) for number in range(25)]
    assert list_lines(lines).count("\n") == 21
    assert list_lines(lines).endswith("\n  - 19\n  and 5 more")
    assert list_lines(lines, 25).endswith("\n  - 24")
    assert list_lines(lines[:3], 2) == "\n  - 0\n  - 1\n  and 1 more"
