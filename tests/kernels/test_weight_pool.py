"""Repacking: every code, width and rule against `functional.narrow`; switches in place.

The reference runs here, the kernel on a GPU and under Triton's interpreter (`test_interpreter.py`).
"""

import copy
import importlib.util
import os
import pickle

import pytest
import torch
from torch import Tensor

from bitdial import functional as bf
from bitdial.errors import ConfigError, PlanError
from bitdial.kernels.host_weight_pool import HostWeightPool
from bitdial.kernels.ops import repack_
from bitdial.kernels.repack import REPACK_BLOCK
from bitdial.kernels.weight_pool import PackedWeightPool
from bitdial.kernels.word_layout import packed_fields, unpack_words

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = pytest.mark.interpreter
HAS_TRITON = importlib.util.find_spec("triton") is not None


def layers(high: int) -> dict[str, Tensor]:
    """A layer of several blocks with random codes, and a small one with every code."""
    least, most = bf.code_range(high)
    generator = torch.Generator().manual_seed(high)
    several = torch.randint(least, most + 1, (40, 600), generator=generator).char()
    return {"several": several, "every": torch.arange(least, most + 1).char().repeat(3, 1)}


def check(pool: PackedWeightPool, codes: dict[str, Tensor]) -> None:
    for name, stored in codes.items():
        bits = pool.bits[name]
        read = unpack_words(pool.words(name), packed_fields(bits), bits, *stored.shape).cpu()
        wanted = bf.narrow(stored, high=pool.high, low=bits, scheme=pool.scheme, ties=pool.ties)
        assert torch.equal(read, wanted), (name, bits)


@pytest.mark.parametrize(
    ("scheme", "ties"), [("double_rounding", "even"), ("double_rounding", "up"), ("truncate", "even")]
)
@pytest.mark.parametrize("high", [8, 7, 6, 3])
def test_every_width_is_narrowed_from_the_master(high: int, scheme: str, ties: str) -> None:
    codes = layers(high)
    choices = range(2, high + 1)
    pool = PackedWeightPool(codes, high=high, bit_choices=choices, scheme=scheme, ties=ties, device=DEVICE)
    for plan in [*choices, {"several": 2, "every": high}, {"every": 2}, 3, high]:
        pool.set_bits(plan)
        check(pool, codes)


def test_switches_keep_addresses_and_touch_only_what_changes() -> None:
    codes = layers(8)
    pool = PackedWeightPool(codes, high=8, bit_choices=(6, 4, 2), device=DEVICE)
    addresses = {name: pool.words(name).data_ptr() for name in codes}
    held, master = [getattr(pool, part).data_ptr() for part in pool.on_device], pool.master.clone()
    pool.set_bits({"several": 4, "every": 2})
    pool.words("every").fill_(-1)  # a layer that does not change is not written
    pool.set_bits({"several": 2})
    assert bool((pool.words("every") == -1).all())
    pool.set_bits({"every": 4})
    check(pool, codes)
    assert {name: pool.words(name).data_ptr() for name in codes} == addresses
    assert torch.equal(pool.master, master)
    assert [getattr(pool, part).data_ptr() for part in pool.on_device] == held


@pytest.mark.parametrize("kind", [PackedWeightPool, HostWeightPool])
def test_joined_layers_at_one_width_are_one_layer(kind: type[PackedWeightPool]) -> None:
    generator = torch.Generator().manual_seed(1)
    rows = {"a": 32, "alone": 20, "b": 16, "c": 48}
    codes = {n: torch.randint(-128, 128, (r, 300), generator=generator).char() for n, r in rows.items()}
    names = ["b", "a", "c"]
    pool = kind(codes, high=8, bit_choices=(8, 4, 3), joined=[names], device=DEVICE)
    whole = kind({"abc": torch.cat([codes[n] for n in names])}, high=8, bit_choices=(8, 4, 3), device=DEVICE)
    assert pool.active.numel() == kind(codes, high=8, bit_choices=(8, 4, 3), device=DEVICE).active.numel()
    for plan in (8, 3, {"a": 8}, {"c": 4, "alone": 8}, 4, {"b": 3}, 3):
        pool.set_bits(plan)
        check(pool, codes)
        if isinstance(plan, int):
            whole.set_bits(plan)
            one = whole.words("abc")
            assert torch.equal(torch.cat([pool.words(n) for n in names], dim=1), one)
            first = pool.words("b")
            assert torch.equal(first.as_strided(one.shape, one.stride()), one), "without a gap"


def test_any_sequence_of_switches_ends_as_a_fresh_pool_does() -> None:
    codes, generator = layers(8), torch.Generator().manual_seed(0)
    pool = PackedWeightPool(codes, high=8, bit_choices=(8, 4, 3, 2), device=DEVICE)
    for _ in range(12):
        picks = torch.randint(4, (2,), generator=generator).tolist()
        pool.set_bits({name: pool.bit_choices[i] for name, i in zip(codes, picks, strict=True)})
    fresh = PackedWeightPool(codes, high=8, bit_choices=(8, 4, 3, 2), device=DEVICE)
    fresh.set_bits(pool.bits)
    assert all(torch.equal(pool.words(name), fresh.words(name)) for name in codes)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_recorded_switch_serves_every_width() -> None:
    codes = layers(8)
    pool = PackedWeightPool(codes, high=8, bit_choices=(8, 4, 2), device=DEVICE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.repack()
    for bits in (4, 2, 8):
        pool._bits.fill_(bits)
        graph.replay()
        pool.bits = dict.fromkeys(codes, bits)
        check(pool, codes)


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_blocks_are_those_of_the_kernel() -> None:
    from bitdial.kernels.triton.packed import repack as triton_repack

    assert triton_repack.BLOCK == REPACK_BLOCK


@pytest.mark.skipif(INTERPRETED, reason="the op is declared once; opcheck needs its reference only")
def test_the_op_is_declared_well() -> None:
    pool = PackedWeightPool(layers(8), high=8, bit_choices=(8, 4), device=DEVICE)
    pool._bits.fill_(4)
    tables = pool._blocks, pool._layers, pool._bits, pool._held
    torch.library.opcheck(repack_, (pool.master, pool.active, *tables, 8, 8, "double_rounding", "even"))


def test_words_are_those_of_the_buffer_in_use() -> None:
    codes = layers(8)
    pool = PackedWeightPool(codes, high=8, bit_choices=(8, 4), device=DEVICE)
    plan = dict.fromkeys(codes, 8) | {"several": 4}
    pool.set_bits(plan)
    plan["several"] = 8
    assert pool.bits["several"] == 4
    check(pool, codes)
    assert pool.words("several") is pool.words("several")
    for twin in (copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))):
        assert twin.words("several").untyped_storage().data_ptr() == twin.active.data_ptr() != pool.active.data_ptr()
        twin.set_bits(8)
        check(twin, codes)
        check(pool, codes)
        assert pool.bits["several"] == 4
    twin.move(torch.device("meta"))
    assert twin.words("several").is_meta


def test_bad_plans_are_refused_by_name() -> None:
    pool = PackedWeightPool(layers(8), high=8, bit_choices=(8, 4), device=DEVICE)
    with pytest.raises(PlanError, match=r"layer 'several': bits=3 is not in bit_choices \(8, 4\)"):
        pool.set_bits({"several": 3})
    with pytest.raises(PlanError, match="layer 'other' is not in the pool"):
        pool.set_bits({"other": 4})
    assert set(pool.bits.values()) == {8}
    with pytest.raises(ConfigError, match="'lsq' has no codes to repack"):
        PackedWeightPool(layers(8), high=8, bit_choices=(8,), scheme="lsq")
    with pytest.raises(ConfigError, match="bit_choices from 2 to high=4"):
        PackedWeightPool(layers(3), high=4, bit_choices=(8,))
