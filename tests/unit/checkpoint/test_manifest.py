import copy
import hashlib
import json
import math
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ddp_zero.checkpoint.tensor_file import (
    FileSpan,
    StoredTensor,
    decode_part,
    encode_part,
    stored_in,
    text_and_tensors,
)
from ddp_zero.values.shapes import is_dense
from ddp_zero.values.tree import Tree, fill, flatten, specs_in
from tests.unit.values.trees import assert_same, trees

FITTING = "0123456789abcdef" * 4


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def places(count: int) -> list[FileSpan]:
    return [FileSpan("__0_0.distcp", 64 * number, 60, 64 * number + 8, FITTING) for number in range(count)]


def decode(text: str) -> Tree:
    """Decode what somebody has written, with a digest that fits."""
    return decode_part(text, sha(text), "part-3.json")


def assert_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^Expected a part of a checkpoint in part-3\.json, got \w+: "):
        decode(text)


ROW = ["__0_0.distcp", 0, 60, 8, FITTING]


def leaf(number: Any = 0, shape: Any = (2, 3), stride: Any = None, dtype: Any = "float32", kind: Any = "cpu") -> Any:
    """A tensor as it stands in the tree of a part."""
    return {"tensor": number, "spec": [shape, stride, dtype, kind]}


def part_of(tree: Any, rows: Any = (ROW,)) -> str:
    return json.dumps({"tensors": rows, "tree": tree})


# There and back


@given(trees)
def test_any_tree_comes_back_with_its_tensors_stored(tree: Any) -> None:
    text, tensors = text_and_tensors(tree, "here")
    lying = places(len(tensors))
    decoded = decode(encode_part(text, lying))
    assert [one.span for one in stored_in(decoded)] == lying
    assert [one.spec for one in stored_in(decoded)] == specs_in(text)
    assert_same(tree, fill(decoded, StoredTensor, lambda one: tensors[lying.index(one.span)]))


def test_a_part_is_json_that_any_reader_takes_apart() -> None:
    text, _ = flatten({"a": torch.zeros(2, 3)})
    content = json.loads(encode_part(text, places(1)), parse_constant=pytest.fail)
    assert content == {
        "tensors": [["__0_0.distcp", 0, 60, 8, FITTING]],
        "tree": {"dict": [["a", {"tensor": 0, "spec": [[2, 3], [3, 1], "float32", "cpu"]}]]},
    }


def test_a_digest_that_does_not_fit_is_refused() -> None:
    text = encode_part(*(flatten(None)[0], []))
    for wrong in ("", sha(text + " "), sha(text).upper(), sha(text)[:-1]):
        with pytest.raises(
            ValueError, match=r"^Expected part-3\.json to fit its checksum, .* earlier step\. \[ZERO-622\]$"
        ):
            decode_part(text, wrong, "part-3.json")


def test_a_part_with_any_character_changed_is_refused() -> None:
    text, _ = flatten({"a": torch.zeros(2)})
    whole = encode_part(text, places(1))
    for position, character in enumerate(whole):
        damaged = whole[:position] + chr(ord(character) ^ 1) + whole[position + 1 :]
        with pytest.raises(ValueError, match="damaged"):
            decode_part(damaged, sha(whole), "part-3.json")


def test_text_that_no_file_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        decode_part("\ud800", FITTING, "part-3.json")


# What is no part


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "null", "3", "1.5", "NaN", "true", '"tree"', "[]", '["tree", "tensors"]', "{}", "[[]]"),
        *('{"tree": null}', '{"tensors": []}', '{"tree": null, "tensors": null}', '{"tree": null, "tensors": 3}'),
        *('{"tree": null, "tensors": NaN}', '{"tree": null, "tensors": [3]}', '{"tree": null, "tensors": [[]]}'),
        *('{"tree": null, "tensors": ["abcde"]}', '{"tree": null, "tensors": {"abcde": 1}}', '{"tree": {}}'),
        *('{"tree": 1' + "0" * 5000 + ', "tensors": []}', '{"tree": 1, "tensors": [] } x', "\0", "\ufeff{}"),
    ],
    ids=lambda text: repr(text[:40]),
)
def test_text_that_is_no_part_is_refused(text: str) -> None:
    assert_refused(text)


@pytest.mark.parametrize("depth", [1000, 100_000])
@pytest.mark.parametrize(
    ("opening", "closing"),
    [("[", "]"), ('{"tuple": [', "]}"), ('{"dict": [["a", ', "]]}"), ('{"spec": ', "}"), ('{"tensor": ', "}")],
)
def test_a_tree_that_is_too_deep_is_refused(opening: str, closing: str, depth: int) -> None:
    assert_refused('{"tensors": [], "tree": ' + opening * depth + "0" + closing * depth + "}")


# Places that lead elsewhere, tensors that cannot exist, and values that are none

NO_NUMBERS = [-1, -(1 << 70), 1 << 62, 1 << 64, 10**400, True, False, 0.0, 1.5, 1e300, float("nan"), float("inf")]
NO_NUMBERS_AT_ALL: list[Any] = [None, "", "0", [], [0], {}]
NEITHER = [*NO_NUMBERS, *NO_NUMBERS_AT_ALL]

FILES: list[Any] = [
    *("../x", "/etc/passwd", "__0_0.distcp/../..", "../__0_0.distcp", "./__0_0.distcp", "/__0_0.distcp"),
    *("__0_0.distcp\0", "__0_0.distcp\n", "\n__0_0.distcp", "__0_0.distcp/", "a/__0_0.distcp", "..", ".", ""),
    *("__0_1.distcp", "part-0.json", ".metadata", "__-1_0.distcp", "__1234567890_0.distcp", "__0_0xdistcp"),
    *("__0_0.DISTCP", "~", "file:///etc/passwd", "__0_0.distcp:stream", "C:\\x", "\ud800"),
    *(None, 0, True, 1.5, [], {}, ["__0_0.distcp"], {"__0_0.distcp": 1}),
]
DIGESTS: list[Any] = [
    *("", FITTING[:-1], FITTING + "0", FITTING.upper(), FITTING + "\n", "g" * 64, "٣" * 64, None, 0, [], list(FITTING))
]
PLACES: list[Any] = [ROW[:4], [*ROW, 0], [], None, 0, "__0_0", {}, dict.fromkeys("abcde", 0)]
STRIDES: list[tuple[Any, Any]] = [
    *(([2, 3], stride) for stride in ([4, 1], [0, 1], [1, 1], [3, 2], [1], [3, 1, 1], [])),
    *(([3], [0]), ([3], [2]), ([], [1]), ([2], "1"), ([2], 1), ([2], {"1": 1}), ([2], True)),
    ([2, 2, 2], [1, 2, 1 << 61]),
]
DTYPES: list[Any] = [
    *("nn", "load", "save", "Tensor", "float32.itemsize", "__name__", "__dict__", "", "torch.float32", "Float32"),
    *("quint8", "qint8", "qint32", "quint4x2", "quint2x4", "strided", "no_such", "float32 ", "float32\0", "\ud800"),
    *(None, 0, True, 1.5, [], ["float32"], {}),
]
PLAIN_DTYPES: list[Any] = ["nn", "load", "float32.itemsize", "", None, 0, [], {}]
KINDS: list[Any] = [None, 0, True, 1.5, [], {}]
SPECS: list[Any] = [None, 0, "abcd", [], [[2], None, "float32"], [[2], None, "float32", "cpu", 1], {}]
NUMBERS: list[Any] = [-1, 1 << 62, 10**300, "0", 0.0, float("nan"), None, [0], {}]
TREES: list[tuple[Any, int]] = [
    *((None, 1), (leaf(), 0), (leaf(), 2), ([leaf(0), leaf(1)], 1), ([leaf(0), leaf(1)], 3)),
    *(([leaf(0), leaf(2)], 2), ([leaf(0), leaf(2)], 3), ([leaf(0), leaf(0)], 2), (leaf(1), 1), (leaf(1), 2)),
    *((leaf(number), 1) for number in NUMBERS),
    *((leaf(-1), 0), ({"tensor": 0}, 1), ({"spec": leaf()["spec"]}, 0), ({"dict": [[leaf(), 1]]}, 1)),
]
PLAIN: list[Any] = [
    *({}, {"other": 1}, {"dict": 1}, {"dict": None}, {"dict": [1]}, {"dict": [["a"]]}, {"dict": [["a", 1, 2]]}),
    *({"dict": [[[], 1]]}, {"dict": [[{}, 1]]}, {"dict": [[["a"], 1]]}, {"dict": [None]}, {"dict": "abc"}),
    *({"dict": [[{"tuple": [1]}, 1]]}, {"tuple": 1}, {"tuple": None}, {"size": 1}, {"size": None}),
    *({"size": [1.5]}, {"size": ["1"]}, {"size": [None]}, {"size": "12"}),
]
NO_PARTS: dict[str, list[str]] = {
    "a file elsewhere, or of another kind": [part_of(leaf(), [[file, *ROW[1:]]]) for file in FILES],
    "begin, length or offset that are no numbers of bytes": [
        part_of(leaf(), [[*ROW[:at], number, *ROW[at + 1 :]]]) for at in (1, 2, 3) for number in NEITHER
    ],
    "a checksum that is none": [part_of(leaf(), [[*ROW[:4], digest]]) for digest in DIGESTS],
    "a place without five fields": [part_of(leaf(), [row]) for row in PLACES],
    "sizes that are no numbers": [part_of(leaf(shape=shape)) for one in NEITHER for shape in ([one], [2, one, 3])],
    "strides that are no numbers": [part_of(leaf(shape=[1, 2], stride=[number, 1])) for number in NEITHER],
    "a shape that is no list": [part_of(leaf(shape=shape)) for shape in (None, 2, 1.5, "23", {"2": 1}, True)],
    "more dimensions than torch has": [part_of(leaf(shape=[1] * dims)) for dims in (65, 10_000)],
    "strides with gaps or of another length": [part_of(leaf(shape=shape, stride=one)) for shape, one in STRIDES],
    "a dtype that plain tensors have not": [part_of(leaf(dtype=dtype)) for dtype in DTYPES],
    "no dtype among plain values": [part_of({"dict": [["a", {"dtype": one}]]}, []) for one in PLAIN_DTYPES],
    "a kind of device that is no string": [part_of(leaf(kind=kind)) for kind in KINDS],
    "a spec without four fields": [part_of({"tensor": 0, "spec": spec}) for spec in SPECS],
    "places that are not those of one tensor each": [part_of(tree, [ROW] * count) for tree, count in TREES],
    "plain values that are none": [part_of(value, []) for value in PLAIN],
    "and deep inside": [part_of({"dict": [["deep", [1, {"tuple": [value]}]]]}, []) for value in PLAIN],
}


@pytest.mark.parametrize("text", [text for texts in NO_PARTS.values() for text in texts], ids=lambda text: text[-60:])
def test_forged_parts_are_refused(text: str) -> None:
    assert_refused(text)


def test_as_many_dimensions_as_torch_has_are_read() -> None:
    assert len(decode(part_of(leaf(shape=[1] * 64))).spec.shape) == 64


def test_the_largest_offset_is_one_that_no_sum_overflows() -> None:
    row = ["__0_0.distcp", (1 << 62) - 1, (1 << 62) - 1, (1 << 62) - 1, FITTING]
    assert decode(part_of(leaf(), [row])).span.offset == (1 << 62) - 1


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ([1 << 61], "float16"),
        ([1 << 60], "float32"),
        ([1 << 58], "complex128"),
        ([1 << 31, 1 << 31], "uint8"),
        ([1 << 40] * 60, "uint8"),
    ],
)
def test_more_bytes_than_there_can_be_are_refused_without_asking_for_them(shape: list[int], dtype: str) -> None:
    text = part_of(leaf(shape=shape, dtype=dtype))
    tracemalloc.start()
    assert_refused(text)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_large_tensor_is_decoded_without_memory_for_it() -> None:
    (one,) = stored_in(decode(part_of(leaf(shape=[1 << 50], dtype="uint8"))))
    assert one.nbytes == 1 << 50


def test_the_last_of_equal_keys_counts() -> None:
    assert decode('{"tensors": [1], "tree": 1, "tensors": [], "tree": {"dict": [["a", 2], ["a", 3]]}}') == {"a": 3}


def test_floats_that_json_has_not_are_read() -> None:
    nan, infinite, minus = decode('{"tensors": [], "tree": [NaN, Infinity, -1e999]}')
    assert math.isnan(nan)
    assert (infinite, minus) == (math.inf, -math.inf)


# Anything at all


VALID = json.loads(
    encode_part(
        flatten(
            {
                "model": {"w": torch.zeros(2, 3), "b": torch.zeros(3, dtype=torch.bfloat16), 3: None},
                "births": [(0, 1, "w"), (0, 2, "b")],
                "extra": [torch.zeros(2, 3).t(), torch.float16, torch.Size([2]), 1.5, True, "text"],
            }
        )[0],
        places(3),
    )
)

junk = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 1, 2, 1 << 31, 1 << 61, 1 << 62, 1 << 63, 1 << 64, 10**300])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["float32", "qint8", "nn", "cpu", "../x", "__1_0.distcp", FITTING, "w", "size"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["tensor", "spec", "dict", "tuple", "dtype", "size", "x"]), inner, max_size=2)
        | inner.map(lambda value: {"dict": [["a", value]]})
        | inner.map(lambda value: leaf(0, [value]))
    ),
    max_leaves=6,
)


def paths(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to each value in a JSON document."""
    keys = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    return [path, *(found for key in keys for found in paths(content[key], (*path, key)))]


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """A part in which some values were replaced, taken away, doubled or swapped."""
    content = copy.deepcopy(VALID)
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(paths(content)[1:]))
        inside = content
        for key in way:
            inside = inside[key]
        change = draw(st.sampled_from(["replace", "replace", "replace", "take away", "double", "swap"]))
        if change == "replace" or isinstance(inside, dict):
            inside[last] = draw(junk)
        elif change == "take away":
            del inside[last]
        elif change == "double":
            inside.insert(last, copy.deepcopy(inside[last]))
        else:
            other = draw(st.integers(0, len(inside) - 1))
            inside[last], inside[other] = inside[other], inside[last]
        if len(paths(content)) < 2:
            break
    return content


def assert_value_error_or_sound(text: str) -> None:
    """Decode what must be refused or harmless, in little memory."""
    tree, told = None, "part-3.json"
    tracemalloc.start()
    try:
        tree = decode(text)
    except ValueError as error:
        told = str(error)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert "part-3.json" in told
    assert peak < 4 << 20
    for one in stored_in(tree):
        spec, place = one.spec, one.span
        numbers = [*spec.shape, *(spec.stride or ()), place.begin, place.length, place.offset]
        assert all(type(number) is int and 0 <= number < 1 << 62 for number in numbers)
        assert "/" not in place.file
        assert place.file.endswith("_0.distcp")
        assert one.nbytes < 1 << 62
        assert spec.stride is None or is_dense(spec.shape, spec.stride)
        assert isinstance(spec.dtype, torch.dtype)
        assert isinstance(spec.device_type, str)


@given(mutated())
def test_a_forged_part_is_refused_or_harmless(content: Any) -> None:
    assert_value_error_or_sound(json.dumps(content))


@given(st.data())
def test_text_that_was_scribbled_into_is_refused_or_harmless(data: st.DataObject) -> None:
    text = json.dumps(VALID)
    begin = data.draw(st.integers(0, len(text) - 1))
    end = begin + data.draw(st.integers(0, 3))
    scribble = data.draw(st.text(alphabet='{}[]",:-0123456789eE.ntNaIu\\ ', max_size=4))
    assert_value_error_or_sound(text[:begin] + scribble + text[end:])


# Trees of stored tensors


def test_a_value_that_needs_pickle_is_refused_with_its_place_and_the_remedy() -> None:
    with pytest.raises(TypeError) as caught:
        text_and_tensors({"extra": [1, {"rng": object()}]}, "a checkpoint")
    message = str(caught.value)
    assert message.startswith("Expected values that can be saved without pickle in a checkpoint. ")
    assert "builtins.object at ['extra'][1]['rng']" in message
    assert "state dicts" in message
