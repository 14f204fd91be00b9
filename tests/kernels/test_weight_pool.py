"""Repacking: every code, width and rule against `functional.narrow`; switches in place.

The reference runs here. The kernel runs on a GPU; elsewhere this file runs itself once more with Triton's interpreter.
"""

import copy
import importlib.util
import os
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.errors import ConfigError, PlanError
from bitdial.kernels import weight_pool as arena_module
from bitdial.kernels.weight_pool import PackedArena, repack_
from bitdial.kernels.word_layout import packed_fields, unpack_words

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_TRITON = importlib.util.find_spec("triton") is not None


@pytest.mark.skipif(INTERPRETED or DEVICE == "cuda", reason="already runs here")
@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_all_of_this_under_the_interpreter(run_under_the_interpreter: Callable[[str], None]) -> None:
    run_under_the_interpreter(__file__)


def layers(high: int) -> dict[str, Tensor]:
    """A layer of several blocks with random codes, and a small one with every code."""
    least, most = bf.code_range(high)
    generator = torch.Generator().manual_seed(high)
    several = torch.randint(least, most + 1, (40, 600), generator=generator).char()
    return {"several": several, "every": torch.arange(least, most + 1).char().repeat(3, 1)}


def check(arena: PackedArena, codes: dict[str, Tensor]) -> None:
    for name, stored in codes.items():
        bits = arena.bits[name]
        read = unpack_words(arena.words(name), packed_fields(bits), bits, *stored.shape).cpu()
        wanted = bf.narrow(stored, high=arena.high, low=bits, scheme=arena.scheme, ties=arena.ties)
        assert torch.equal(read, wanted), (name, bits)


@pytest.mark.parametrize(
    ("scheme", "ties"), [("double_rounding", "even"), ("double_rounding", "up"), ("truncate", "even")]
)
@pytest.mark.parametrize("high", [8, 7, 6, 3])
def test_every_width_is_narrowed_from_the_master(high: int, scheme: str, ties: str) -> None:
    codes = layers(high)
    choices = range(2, high + 1)
    arena = PackedArena(codes, high=high, bit_choices=choices, scheme=scheme, ties=ties, device=DEVICE)
    for plan in [*choices, {"several": 2, "every": high}, {"every": 2}, 3, high]:
        arena.set_bits(plan)
        check(arena, codes)


def test_switches_keep_addresses_and_touch_only_what_changes() -> None:
    codes = layers(8)
    arena = PackedArena(codes, high=8, bit_choices=(6, 4, 2), device=DEVICE)
    addresses = {name: arena.words(name).data_ptr() for name in codes}
    held, master = arena.bytes_held(), arena.master.clone()
    arena.set_bits({"several": 4, "every": 2})
    assert arena.bytes_moved({"several": 2}) == 4 * 3 * 3 * 128 * (8 + 2)
    arena.words("every").fill_(-1)  # a layer that does not change is not written
    arena.set_bits({"several": 2})
    assert bool((arena.words("every") == -1).all())
    arena.set_bits({"every": 4})
    check(arena, codes)
    assert {name: arena.words(name).data_ptr() for name in codes} == addresses
    assert torch.equal(arena.master, master)
    assert arena.bytes_held() == held
    assert arena.bytes_moved(arena.bits) == 0


def test_any_sequence_of_switches_ends_as_a_fresh_arena_does() -> None:
    codes, generator = layers(8), torch.Generator().manual_seed(0)
    arena = PackedArena(codes, high=8, bit_choices=(8, 4, 3, 2), device=DEVICE)
    for _ in range(12):
        picks = torch.randint(4, (2,), generator=generator).tolist()
        arena.set_bits({name: arena.bit_choices[i] for name, i in zip(codes, picks, strict=True)})
    fresh = PackedArena(codes, high=8, bit_choices=(8, 4, 3, 2), device=DEVICE)
    fresh.set_bits(arena.bits)
    assert all(torch.equal(arena.words(name), fresh.words(name)) for name in codes)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_recorded_switch_serves_every_width() -> None:
    codes = layers(8)
    arena = PackedArena(codes, high=8, bit_choices=(8, 4, 2), device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        arena.repack()
    for bits in (4, 2, 8):
        arena._bits.fill_(bits)
        graph.replay()
        arena.bits = dict.fromkeys(codes, bits)
        check(arena, codes)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_blocks_are_those_of_the_kernel() -> None:
    from bitdial.kernels.triton.packed import repack as triton_repack

    assert triton_repack.BLOCK == arena_module._BLOCK


@pytest.mark.skipif(INTERPRETED, reason="the op is declared once; opcheck needs its reference only")
def test_the_op_is_declared_well() -> None:
    arena = PackedArena(layers(8), high=8, bit_choices=(8, 4), device=DEVICE)
    arena._bits.fill_(4)
    tables = arena._blocks, arena._layers, arena._bits, arena._held
    torch.library.opcheck(repack_, (arena.master, arena.active, *tables, 8, 8, "double_rounding", "even"))


def test_words_are_those_of_the_buffer_in_use() -> None:
    codes = layers(8)
    arena = PackedArena(codes, high=8, bit_choices=(8, 4), device=DEVICE)
    plan = dict.fromkeys(codes, 8) | {"several": 4}
    arena.set_bits(plan)
    plan["several"] = 8
    assert arena.bits["several"] == 4
    check(arena, codes)
    assert arena.words("several") is arena.words("several")
    for twin in (copy.deepcopy(arena), pickle.loads(pickle.dumps(arena))):
        assert twin.words("several").untyped_storage().data_ptr() == twin.active.data_ptr() != arena.active.data_ptr()
        twin.set_bits(8)
        check(twin, codes)
        check(arena, codes)
        assert arena.bits["several"] == 4
    twin.move(torch.device("meta"))
    assert twin.words("several").is_meta


def test_bad_plans_are_refused_by_name() -> None:
    arena = PackedArena(layers(8), high=8, bit_choices=(8, 4), device=DEVICE)
    with pytest.raises(PlanError, match=r"layer 'several': bits=3 is not in bit_choices \(8, 4\)"):
        arena.set_bits({"several": 3})
    with pytest.raises(PlanError, match="layer 'other' is not in the arena"):
        arena.set_bits({"other": 4})
    assert set(arena.bits.values()) == {8}
    with pytest.raises(ConfigError, match="'lsq' has no codes to repack"):
        PackedArena(layers(8), high=8, bit_choices=(8,), scheme="lsq")
    with pytest.raises(ConfigError, match="bit_choices from 2 to high=4"):
        PackedArena(layers(3), high=4, bit_choices=(8,))
