"""Pools whose master stays in host memory: the words of a pool on the device, after any switches."""

import copy

import pytest
import torch

from bitdial.kernels.host_weight_pool import HostWeightPool
from bitdial.kernels.weight_pool import PackedWeightPool

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CODES = {
    name: torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(len(name))).char()
    for name, shape in {"several": (40, 600), "small": (3, 17)}.items()
}


@pytest.mark.interpreter
def test_words_are_those_of_a_pool_on_the_device() -> None:
    host, device = (
        kind(CODES, high=8, bit_choices=(8, 4, 2), device=DEVICE) for kind in (HostWeightPool, PackedWeightPool)
    )
    assert host.master.device.type == "cpu"
    assert "master" not in host.on_device
    addresses = {name: host.words(name).data_ptr() for name in CODES}
    for plan in (8, 2, {"small": 8}, {"several": 4, "small": 2}, 4, 8):
        for pool in (host, device):
            pool.set_bits(plan)
        assert all(torch.equal(host.words(name), device.words(name)) for name in CODES), plan
    assert {name: host.words(name).data_ptr() for name in CODES} == addresses
    host.active.zero_()
    host._held.zero_()
    host.repack()
    assert all(torch.equal(host.words(name), device.words(name)) for name in CODES)


def test_a_copy_has_buffers_of_its_own() -> None:
    pool = HostWeightPool(CODES, high=8, bit_choices=(8, 4), device=DEVICE)
    twin = copy.deepcopy(pool)
    twin.set_bits(4)
    assert pool.bits == dict.fromkeys(CODES, 8)
    fresh = PackedWeightPool(CODES, high=8, bit_choices=(8, 4), device=DEVICE)
    assert all(torch.equal(pool.words(name), fresh.words(name)) for name in CODES)
