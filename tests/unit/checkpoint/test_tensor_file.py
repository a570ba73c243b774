import hashlib
import io
import os
import re
import struct
import tempfile
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.serialization import config

from ddp_zero.checkpoint import tensor_file
from ddp_zero.checkpoint.tensor_file import StoredTensor, pieces, read, read_into, verify, write_tensors
from ddp_zero.values.tree import flatten, specs_in
from tests.unit.checkpoint.bits import bits, of_random_bits
from tests.unit.checkpoint.things import at_once, thing

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

CPU = torch.device("cpu")
FILE = "__0_0.distcp"
CHUNK = 48
"""A multiple of 16, the size of the largest element."""


NEVER_PLAIN = re.compile(r"torch\.(q.*|u?int[1-7])")
"""Quantized dtypes, and those of less than a byte, which torch itself does not save."""

DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and not NEVER_PLAIN.fullmatch(str(value))
    },
    key=str,
)


def store(folder: Path, *tensors: Tensor) -> list[StoredTensor]:
    """Write tensors to the file of rank 0."""
    text, _ = flatten(list(tensors))
    written = write_tensors(folder / FILE, tensors)
    return [StoredTensor.of(spec, span) for spec, span in zip(specs_in(text), written, strict=True)]


def moved(stored: StoredTensor, **fields: Any) -> StoredTensor:
    """The tensor said to lie elsewhere."""
    return StoredTensor.of(stored.spec, replace(stored.span, **fields))


def of_shape(stored: StoredTensor, *shape: int) -> StoredTensor:
    """The tensor said to have another shape."""
    return StoredTensor.of(replace(stored.spec, shape=shape, stride=None), stored.span)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", CHUNK)


class _StrictZipFile(zipfile.ZipFile):
    """Refuses an archive whose last records are not where they say they are, as newer Pythons do."""

    def __init__(self, file: Any) -> None:
        end = file.seek(0, os.SEEK_END)
        file.seek(end - 42)  # the locator of the zip64 record, then the end record
        signature, _, place, _ = struct.unpack("<4sLQL", file.read(20))
        assert signature == b"PK\6\7"
        file.seek(place)
        assert file.read(4) == b"PK\6\6"
        assert place + 56 + 42 == end, "an earlier archive's record"
        super().__init__(file)


def test_neighbouring_archives_of_equal_size_are_not_confused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """python/cpython#139702: zipfile takes the record of an earlier archive for that of a later archive."""
    monkeypatch.setattr(zipfile, "ZipFile", _StrictZipFile)
    tensors = [of_random_bits((5, 3), torch.float32, seed) for seed in range(3)]
    for tensor, stored in zip(tensors, store(tmp_path, *tensors), strict=True):
        assert bits(read(tmp_path, stored, CPU)) == bits(tensor)


LAYOUTS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "matrix": lambda dtype: of_random_bits((5, 7), dtype),
    "scalar": lambda dtype: of_random_bits((), dtype),
    "one element": lambda dtype: of_random_bits((1, 1), dtype),
    "no elements": lambda dtype: of_random_bits((3, 0, 2), dtype),
    "transposed": lambda dtype: of_random_bits((5, 7), dtype).t(),
    "channels last": lambda dtype: of_random_bits((2, 4, 5, 3), dtype).permute(0, 3, 1, 2),
    "rows of a larger one": lambda dtype: of_random_bits((9, 7), dtype)[3:5],
    "columns of a larger one": lambda dtype: of_random_bits((9, 7), dtype)[:, 1:3],
    "every other": lambda dtype: of_random_bits((20,), dtype)[::2],
    "one of many": lambda dtype: of_random_bits((20,), dtype)[7::20],
    "expanded": lambda dtype: of_random_bits((3,), dtype).expand(4, 3),
}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


# There and back


@every_dtype
def test_a_tensor_of_any_dtype_and_layout_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {layout: make(dtype) for layout, make in LAYOUTS.items()}
    for (layout, tensor), stored in zip(tensors.items(), store(tmp_path, *tensors.values()), strict=True):
        verify(tmp_path, [stored])
        assert b"".join(bytes(piece) for piece in pieces(tmp_path, stored)) == bits(tensor), layout
        came = read(tmp_path, stored, CPU)
        assert (came.dtype, came.shape, bits(came)) == (dtype, tensor.shape, bits(tensor)), layout
        assert stored.span.checksum == hashlib.sha256(bits(tensor)).hexdigest(), layout


@every_dtype
def test_torch_loads_a_tensor_from_its_slice_of_the_file(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {layout: make(dtype) for layout, make in LAYOUTS.items()}
    spans = [stored.span for stored in store(tmp_path, *tensors.values())]
    raw = (tmp_path / FILE).read_bytes()
    for (layout, tensor), place in zip(tensors.items(), spans, strict=True):
        loaded = torch.load(io.BytesIO(raw[place.begin : place.begin + place.length]), weights_only=True)
        assert (type(loaded), loaded.dtype, loaded.shape) == (Tensor, dtype, tensor.shape), layout
        assert bits(loaded) == bits(tensor), layout
        assert raw[place.offset : place.offset + len(bits(tensor))] == bits(tensor), layout


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("count", [0, 1, 11, 12, 13, 23, 24, 25, 100])
def test_pieces_of_any_number_are_put_together(count: int, tmp_path: Path) -> None:
    tensor = torch.arange(float(count))
    (stored,) = store(tmp_path, tensor)
    assert len(list(pieces(tmp_path, stored))) == -(-count * 4 // CHUNK)
    assert torch.equal(read(tmp_path, stored, CPU), tensor)


def test_reading_takes_the_memory_of_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 4096)
    (stored,) = store(tmp_path, torch.zeros(1 << 18))
    tracemalloc.start()
    verify(tmp_path, [stored])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 17


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=4)))
    tensor = of_random_bits(shape, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 9)))
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    return tensor[:: draw(st.integers(1, 2))] if shape else tensor


@given(st.lists(tensors(), max_size=5), st.integers(1, 4))
def test_tensors_are_stored_without_overlap_and_read_bit_for_bit(several: list[Tensor], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        patch.setattr(tensor_file, "CHUNK_BYTES", 16 * chunk)
        stored = store(folder, *several)
        verify(folder, stored)
        assert [bits(read(folder, one, CPU)) for one in stored] == [bits(tensor) for tensor in several]
        size = (folder / FILE).stat().st_size
    end = 0
    for one in stored:
        assert one.span.begin >= end
        assert one.span.begin < one.span.offset
        end = one.span.begin + one.span.length
        assert one.span.offset + one.nbytes < end
    assert end == size


# Strides and devices


@pytest.mark.parametrize("layout", ["matrix", "transposed", "channels last", "scalar", "no elements"])
def test_strides_without_gaps_come_back(layout: str, tmp_path: Path) -> None:
    tensor = LAYOUTS[layout](torch.float32)
    (stored,) = store(tmp_path, tensor)
    assert read(tmp_path, stored, CPU).stride() == tensor.stride()


def test_read_leaves_cpu_tensors_on_the_cpu_and_moves_others_to_the_device(tmp_path: Path) -> None:
    (stored,) = store(tmp_path, torch.arange(3.0))
    there = replace(stored, spec=replace(stored.spec, device_type="cuda"))
    assert read(tmp_path, stored, torch.device("meta")).tolist() == [0, 1, 2]
    assert read(tmp_path, there, CPU).tolist() == [0, 1, 2]
    assert read(tmp_path, there, torch.device("meta")).device.type == "meta"


# Writing


def test_of_a_view_only_its_elements_are_written(tmp_path: Path) -> None:
    large = torch.zeros(1 << 18)
    stored = store(tmp_path, large[5:9], large.view(512, 512)[3], large.view(512, 512).t()[:2, :2], large[:0])
    assert (tmp_path / FILE).stat().st_size < 16_000
    assert [one.span.length < 4096 for one in stored] == [True] * 4


def test_elements_lie_at_multiples_of_64_bytes(tmp_path: Path) -> None:
    stored = store(tmp_path, *(torch.zeros(count, dtype=torch.uint8) for count in range(70)))
    assert {one.span.offset % 64 for one in stored} == {one.span.begin % 64 for one in stored} == {0}


@pytest.mark.parametrize("alignment", [64, 4096])
@pytest.mark.parametrize("checks", [True, False])
def test_options_of_torch_save_make_no_difference(alignment: int, checks: bool, tmp_path: Path) -> None:
    several = [torch.arange(3.0), torch.arange(100)]
    options: Any = config
    with options.patch({"save.storage_alignment": alignment, "save.compute_crc32": checks}):
        stored = store(tmp_path, *several)
    assert (stored[1].span.length > 4096) == (alignment == 4096)
    assert [read(tmp_path, one, CPU).tolist() for one in stored] == [tensor.tolist() for tensor in several]


def test_a_parameter_is_written_as_a_plain_tensor(tmp_path: Path) -> None:
    param = nn.Parameter(torch.ones(3))
    (place,) = write_tensors(tmp_path / FILE, [param])
    loaded = torch.load(io.BytesIO((tmp_path / FILE).read_bytes()), weights_only=True)
    assert (type(loaded), loaded.requires_grad, loaded.tolist()) == (Tensor, False, [1, 1, 1])
    assert place.begin == 0


def test_tensors_are_taken_one_after_the_other(tmp_path: Path) -> None:
    sizes = []

    def made() -> Any:
        for _ in range(3):
            sizes.append((tmp_path / FILE).stat().st_size)
            yield torch.zeros(1 << 15)

    assert len(write_tensors(tmp_path / FILE, made())) == 3
    assert sizes[0] == 0
    assert sizes[1] > 1 << 16
    assert sizes[2] > 1 << 17


def test_a_file_is_never_written_over_another(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("mine")
    with pytest.raises(FileExistsError):
        write_tensors(tmp_path / FILE, [torch.ones(1)])
    assert (tmp_path / FILE).read_text() == "mine"


def test_the_file_is_on_disk_when_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_size))
    write_tensors(tmp_path / FILE, [torch.ones(3), torch.ones(3)])
    assert synced == [(tmp_path / FILE).stat().st_size]


# Reading into what is there


TARGETS: dict[str, Callable[[torch.dtype], Tensor]] = {
    "plain": lambda dtype: torch.full((4, 6), 7, dtype=dtype),
    "parameter": lambda dtype: nn.Parameter(torch.full((4, 6), 7, dtype=dtype), dtype.is_floating_point),
    "transposed": lambda dtype: torch.full((6, 4), 7, dtype=dtype).t(),
    "columns": lambda dtype: torch.full((4, 9), 7, dtype=dtype)[:, 2:8],
    "every other": lambda dtype: torch.full((8, 12), 7, dtype=dtype)[::2, 1::2],
    "middle of a flat one": lambda dtype: torch.full((40,), 7, dtype=dtype)[8:32].view(4, 6),
}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16, torch.int16], ids=str)
@pytest.mark.parametrize("target", TARGETS)
def test_a_target_takes_the_values_in_its_own_dtype_and_memory(
    target: str, saved: torch.dtype, dtype: torch.dtype, tmp_path: Path
) -> None:
    tensor = torch.linspace(-60, 60, 24).view(4, 6).to(saved)
    (stored,) = store(tmp_path, tensor)
    into = TARGETS[target](dtype)
    outside = into.untyped_storage().nbytes() // dtype.itemsize - 24
    place, stride = into.data_ptr(), into.stride()
    read_into(tmp_path, stored, into)
    assert torch.equal(into, tensor.to(dtype))
    assert (into.dtype, into.data_ptr(), into.stride()) == (dtype, place, stride)
    flat = torch.empty(0, dtype=dtype).set_(into.detach().untyped_storage())
    assert flat.numel() == 24 + outside
    assert int((flat == 7).sum()) - int((into == 7).sum()) == outside


def test_one_element_of_many_is_filled_alone(tmp_path: Path) -> None:
    (stored,) = store(tmp_path, torch.tensor([3.0]))
    base = torch.zeros(10)
    read_into(tmp_path, stored, base[5::10])
    assert base.tolist() == [0, 0, 0, 0, 0, 3, 0, 0, 0, 0]


def test_a_target_in_a_graph_stays_a_leaf_and_counts_the_change(tmp_path: Path) -> None:
    (stored,) = store(tmp_path, torch.ones(3))
    param = nn.Parameter(torch.zeros(3))
    version = param._version
    read_into(tmp_path, stored, param)
    assert param.is_leaf
    assert param.requires_grad
    assert param._version > version


# Damage


def test_each_damaged_byte_of_the_elements_is_found_and_no_other(tmp_path: Path) -> None:
    first, second, empty = store(tmp_path, torch.arange(5.0), torch.arange(7, dtype=torch.int8), torch.ones(0))
    elements = [range(one.span.offset, one.span.offset + one.nbytes) for one in (first, second)]
    whole = (tmp_path / FILE).read_bytes()
    with (tmp_path / FILE).open("r+b", buffering=0) as file:
        for position, byte in enumerate(whole):
            file.seek(position)
            file.write(bytes([byte ^ (1 << position % 8)]))
            for one, inside in zip((first, second), elements, strict=True):
                if position in inside:
                    with pytest.raises(ValueError, match=rf"fit its checksum, got damaged bytes in .*{FILE}"):
                        verify(tmp_path, [empty, one])
                else:
                    verify(tmp_path, [empty, one])
            file.seek(position)
            file.write(bytes([byte]))
    verify(tmp_path, [first, second, empty])


@pytest.mark.parametrize(("offset", "shape"), [(4, (4,)), (-4, (4,)), (0, (3,)), (0, (5,)), (64, (4,)), (0, (0,))])
def test_verify_refuses_another_place_or_size(offset: int, shape: tuple[int, ...], tmp_path: Path) -> None:
    (stored,) = store(tmp_path, torch.arange(1.0, 5.0))
    elsewhere = of_shape(moved(stored, offset=stored.span.offset + offset), *shape)
    with pytest.raises(ValueError, match="fit its checksum"):
        verify(tmp_path, [elsewhere])


def test_a_file_that_is_cut_off_within_the_elements_is_refused(tmp_path: Path) -> None:
    (stored,) = store(tmp_path, torch.arange(6.0))
    end = stored.span.offset + stored.nbytes
    for size in [*range(end - 1, stored.span.offset - 2, -1), 1, 0]:
        os.truncate(tmp_path / FILE, size)
        with pytest.raises(ValueError, match=rf"Expected at least {end} bytes, got {size} in .*{FILE}"):
            verify(tmp_path, [stored])


@pytest.mark.parametrize("beyond", [1, 1 << 20, (1 << 62) - 1])
def test_an_offset_beyond_the_end_is_refused(beyond: int, tmp_path: Path) -> None:
    several = store(tmp_path, torch.arange(6.0), torch.ones(0))
    size = (tmp_path / FILE).stat().st_size
    for stored in several:
        with pytest.raises(ValueError, match=rf"Expected at least \d+ bytes, got {size} in .*{FILE}"):
            verify(tmp_path, [moved(stored, offset=size + beyond)])


def test_a_file_that_is_cut_off_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK_BYTES", 1 << 16)
    (stored,) = store(tmp_path, torch.zeros(1 << 18))
    came = pieces(tmp_path, stored)
    next(came)
    os.truncate(tmp_path / FILE, 0)
    with pytest.raises(ValueError, match=rf"Expected \d+ more bytes, got the end of .*{FILE}"):
        list(came)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.complex128], ids=str)
def test_a_tensor_of_a_petabyte_is_refused_without_memory_for_it(dtype: torch.dtype, tmp_path: Path) -> None:
    (stored,) = store(tmp_path, of_random_bits((4,), dtype))
    huge = of_shape(stored, (1 << 50) // dtype.itemsize)
    assert huge.nbytes == 1 << 50
    tracemalloc.start()
    with pytest.raises(ValueError, match=rf"Expected at least {stored.span.offset + (1 << 50)} bytes"):
        verify(tmp_path, [huge])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= tensor_file.CHUNK_BYTES + (1 << 16)


# What is no file


@pytest.mark.parametrize("shape", [(3,), (0,)], ids=["some elements", "no elements"])
@pytest.mark.parametrize("kind", ["nothing", "link to a file", "pipe", "folder", "link to an endless device"])
def test_files_that_are_not_regular_are_refused_without_blocking(
    kind: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    (stored,) = store(tmp_path, torch.ones(shape))
    (tmp_path / FILE).unlink()
    thing(tmp_path / FILE, kind)
    uses: list[Callable[[], Any]] = [
        lambda: verify(tmp_path, [stored]),
        lambda: read(tmp_path, stored, CPU),
        lambda: read_into(tmp_path, stored, torch.ones(shape)),
    ]
    for use in uses:
        with pytest.raises(ValueError, match=f"^Expected a regular file.*{FILE}"):
            at_once(use)
