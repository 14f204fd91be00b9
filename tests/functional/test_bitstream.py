"""Packing against a bit stream built from Python integers; every width, every code."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bitdial.errors import BitdialError, ConfigError, QuantizationError
from bitdial.functional import bitstream as packing
from bitdial.functional.bitstream import pack_bytes, pack_planes, unpack_bytes, unpack_planes

WIDTHS = range(1, 9)
KINDS = [(bits, signed) for bits in WIDTHS for signed in (True, False)]
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


def code_range(bits: int, signed: bool) -> range:
    """Return every code of this width, in order."""
    return range(-(1 << bits - 1), 1 << bits - 1) if signed else range(1 << bits)


def reference_bytes(codes: list[int], bits: int) -> bytes:
    """Build the stream as one big integer: code i at bit i * bits."""
    stream = 0
    for i, code in enumerate(codes):
        stream |= (code & ((1 << bits) - 1)) << (i * bits)
    return stream.to_bytes((len(codes) * bits + 7) // 8, "little")


def random_codes(count: int, bits: int, signed: bool, seed: int = 0) -> list[int]:
    """Return ``count`` codes drawn evenly from the whole range."""
    return random.Random(seed).choices(code_range(bits, signed), k=count)


def check(codes: list[int], bits: int, signed: bool, device: str = "cpu") -> None:
    """Compare the stream with the reference, and read it back."""
    tensor = torch.tensor(codes, dtype=torch.int16, device=device)
    packed = pack_bytes(tensor, bits, signed=signed)
    assert (packed.dtype, packed.device, packed.dim()) == (torch.uint8, tensor.device, 1)
    assert bytes(packed.tolist()) == reference_bytes(codes, bits)
    read = unpack_bytes(packed, bits, len(codes), signed=signed)
    assert read.dtype == (torch.int8 if signed else torch.uint8)
    assert read.shape == (len(codes),)
    assert read.tolist() == codes


@pytest.mark.parametrize("device", DEVICES)
def test_every_code(device: str) -> None:
    for bits, signed in KINDS:
        check(list(code_range(bits, signed)), bits, signed, device)


@pytest.mark.parametrize("bits", WIDTHS)
def test_every_code_at_every_position_of_a_group(bits: int) -> None:
    """One code among zeros: a bit that leaks into a neighbour shows."""
    for signed in (True, False):
        for position in range(8):
            for code in code_range(bits, signed):
                check([0] * position + [code] + [0] * (9 - position), bits, signed)


@pytest.mark.parametrize("device", DEVICES)
def test_every_length(device: str) -> None:
    for bits, signed in KINDS:
        for count in (*range(18), 63, 64, 65, 1001):
            check(random_codes(count, bits, signed, seed=count), bits, signed, device)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), bits=st.integers(1, 8), signed=st.booleans(), count=st.integers(0, 200))
def test_any_codes(data: st.DataObject, bits: int, signed: bool, count: int) -> None:
    allowed = code_range(bits, signed)
    code = st.integers(allowed[0], allowed[-1])
    check(data.draw(st.lists(code, min_size=count, max_size=count)), bits, signed)


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_CHUNK", 16)
    for bits, signed in KINDS:
        for count in (15, 16, 17, 31, 32, 33, 100):
            check(random_codes(count, bits, signed), bits, signed)


@pytest.mark.parametrize("bits", WIDTHS)
def test_more_codes_than_one_chunk_holds(bits: int) -> None:
    count = packing._CHUNK + 13
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(-(1 << bits - 1), 1 << bits - 1, (count,), generator=generator)
    assert torch.equal(unpack_bytes(pack_bytes(codes, bits), bits, count).long(), codes)


def test_the_example_of_the_docstring() -> None:
    codes = torch.tensor([1, -2, 3, -4])
    assert pack_bytes(codes, 3).tolist() == [0xF1, 0x08]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_every_integer_dtype_packs_alike(dtype: torch.dtype) -> None:
    codes = [0, 1, 2, 3, 3, 2, 1, 0, 2]
    tensor = torch.tensor(codes, dtype=dtype)
    assert bytes(pack_bytes(tensor, 3).tolist()) == reference_bytes(codes, 3)
    assert bytes(pack_bytes(tensor, 2, signed=False).tolist()) == reference_bytes(codes, 2)


@pytest.mark.parametrize("shape", [(), (3, 5), (2, 3, 4, 5), (0,), (4, 0, 3)])
def test_shapes_are_read_in_row_major_order(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, shape, generator=generator, dtype=torch.int8)
    flat = codes.flatten().tolist()
    assert unpack_bytes(pack_bytes(codes, 4), 4, len(flat)).tolist() == flat


def views() -> list[Tensor]:
    """Return tensors whose memory order is not their row-major order."""
    base = torch.arange(-8, 8, dtype=torch.int8).repeat(4)
    return [
        base.view(8, 8).t(),
        base[::3],
        base.view(4, 16)[:, 2:9],
        torch.tensor([[5]], dtype=torch.int8).expand(3, 7),
        base.view(1, 4, 4, 4).to(memory_format=torch.channels_last),
    ]


@pytest.mark.parametrize("codes", views())
def test_non_contiguous_codes(codes: Tensor) -> None:
    before = codes.clone()
    flat = codes.flatten().tolist()
    assert bytes(pack_bytes(codes, 4).tolist()) == reference_bytes(flat, 4)
    assert torch.equal(codes, before)


def test_non_contiguous_buffers() -> None:
    codes = torch.arange(-4, 4).repeat(5)
    packed = pack_bytes(codes, 3)
    spread = torch.stack([packed, packed ^ 0xFF], dim=1)[:, 0]
    assert not spread.is_contiguous()
    assert unpack_bytes(spread, 3, 40).tolist() == codes.tolist()


def test_results_own_exactly_their_bytes_and_inputs_stay() -> None:
    codes = torch.tensor([3, -4, 2], dtype=torch.int8)
    packed = pack_bytes(codes, 3)
    kept = packed.clone()
    assert packed.untyped_storage().nbytes() == 2
    unpack_bytes(packed, 3, 3).zero_()
    pack_bytes(codes, 8).zero_()
    assert torch.equal(packed, kept)
    assert codes.tolist() == [3, -4, 2]


def test_codes_just_outside_the_range() -> None:
    for bits, signed in KINDS:
        allowed = code_range(bits, signed)
        for bad in (allowed[0] - 1, allowed[-1] + 1, -(2**40), 2**40, 256 + allowed[0]):
            found = min(bad, 0), max(bad, 0)
            with pytest.raises(QuantizationError, match=rf"min {found[0]} and max {found[1]},"):
                pack_bytes(torch.tensor([0, bad]), bits, signed=signed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.complex64])
def test_codes_that_are_not_integers(dtype: torch.dtype) -> None:
    with pytest.raises(QuantizationError, match=f"dtype {dtype}"):
        pack_bytes(torch.zeros(3, dtype=dtype), 4)


@pytest.mark.parametrize("bits", [0, -1, 9, 64, 4.0, True, None])
def test_widths_that_are_not_offered(bits) -> None:
    codes, packed = torch.zeros(8, dtype=torch.int8), torch.zeros(4, dtype=torch.uint8)
    for call in (
        lambda: pack_bytes(codes, bits),
        lambda: unpack_bytes(packed, bits, 8),
    ):
        with pytest.raises(ConfigError, match="bits="):
            call()


@pytest.mark.parametrize("count", [0, 1, 8, 9, 11, 1000])
def test_bytes_of_the_wrong_length(count: int) -> None:
    """Ten 3-bit codes take four bytes; so does no other count but nine or ten."""
    packed = pack_bytes(torch.zeros(10, dtype=torch.int8), 3)
    if count == 9:  # the same number of bytes, and the padding is zero: a valid stream
        assert unpack_bytes(packed, 3, count).tolist() == [0] * 9
        return
    with pytest.raises(QuantizationError, match=f"count={count} codes take"):
        unpack_bytes(packed, 3, count)


@pytest.mark.parametrize("bits", WIDTHS)
def test_each_padding_bit_is_checked(bits: int) -> None:
    for count in range(1, 17):
        packed = pack_bytes(torch.zeros(count, dtype=torch.int8), bits)
        for bit in range(count * bits, packed.numel() * 8):
            damaged = packed.clone()
            damaged[bit // 8] |= 1 << bit % 8
            with pytest.raises(QuantizationError, match="padding"):
                unpack_bytes(damaged, bits, count)


def test_buffers_of_the_wrong_kind() -> None:
    good = torch.zeros(3, dtype=torch.uint8)
    with pytest.raises(QuantizationError, match=r"torch\.int8"):
        unpack_bytes(good.view(torch.int8), 3, 8)
    with pytest.raises(QuantizationError, match="1 axis"):
        unpack_bytes(good.view(3, 1), 3, 8)
    with pytest.raises(QuantizationError, match="count=-1 is negative"):
        unpack_bytes(good, 3, -1)


def test_errors_share_the_root() -> None:
    with pytest.raises(BitdialError):
        pack_bytes(torch.tensor([4]), 3)


# --- bit planes ---------------------------------------------------------------------------------------


def reference_planes(codes: list[int], bits: int) -> list[bytes]:
    """Plane k has bit bits - 1 - k of each code; bit i % 8 of byte i // 8 is that of code i."""
    planes = []
    for k in range(bits):
        plane = bytearray(-(-len(codes) // 8))
        for i, code in enumerate(codes):
            plane[i // 8] |= ((code >> (bits - 1 - k)) & 1) << (i % 8)
        planes.append(bytes(plane))
    return planes


@pytest.mark.parametrize("bits", WIDTHS)
def test_planes_of_every_length_and_every_cut(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_CHUNK", 16)  # most lengths take several
    for count in (1, 7, 8, 9, 15, 16, 17, 31, 33, 100):
        codes = random_codes(count, bits, signed=True, seed=count)
        tensor = torch.tensor(codes, dtype=torch.int8)
        planes = pack_planes(tensor, bits)
        assert [bytes(plane.tolist()) for plane in planes] == reference_planes(codes, bits)
        assert torch.equal(unpack_planes(planes, bits, count), tensor)
        for cut in range(1, bits):
            upper, lower = planes[:cut], planes[cut:]
            known, rest = unpack_planes(upper, bits, count), unpack_planes(lower, bits, count, first=cut)
            assert known.tolist() == [code >> (bits - cut) << (bits - cut) for code in codes]
            assert torch.equal(known | rest, tensor)


def test_planes_of_the_docstring() -> None:
    assert pack_planes(torch.tensor([1, -2, 3, -4]), 3).flatten().tolist() == [0x0A, 0x06, 0x05]


def test_planes_that_cannot_be() -> None:
    good = pack_planes(torch.tensor([1, -2, 3]), 3)
    for planes, first, problem in (
        (good[:, :0], 0, "holds 0 bytes"),
        (good.int(), 0, "int32"),
        (good[0], 0, "are not some of 3 from plane 0"),
        (good, 1, "are not some of 3 from plane 1"),
        (good[:0], 0, "are not some of 3 from plane 0"),
        (good | 8, 0, "padding bits"),
    ):
        with pytest.raises(QuantizationError, match=problem):
            unpack_planes(planes, 3, 3, first=first)
    with pytest.raises(QuantizationError, match="max 4"):
        pack_planes(torch.tensor([4]), 3)
