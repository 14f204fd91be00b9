"""Several widths at once from one set of weights."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import BitPlan, at_bits, get_bits, load, set_bits, view_at_bits
from bitdial.errors import ConfigError

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIXED = BitPlan({"first": 2, "early": 3, "late": 8, "head": (4, 8)}, default=6)


@pytest.fixture
def live(saved: Callable[..., Path], decoder: nn.Module) -> Callable[..., nn.Module]:
    """Loads the decoder on packed kernels."""

    def make(scheme: str, **options: Any) -> nn.Module:
        return load(saved(scheme), decoder, kernels="packed", device=DEVICE, **options)

    return make


def run(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model(tokens.to(DEVICE)).cpu()


def test_two_threads_at_two_widths(live: Callable[..., nn.Module], tokens: Tensor) -> None:
    packed = live("nested", dtype=torch.float16)
    wanted = {}
    for bits in (2, 8):
        with at_bits(packed, bits):
            wanted[bits] = run(packed, tokens)
    assert not torch.equal(wanted[2], wanted[8])
    barrier = threading.Barrier(2, timeout=30)

    def wait(*_: object) -> None:
        barrier.wait()

    # Both threads are in the same layer at once, and each waits there for the other before and after.
    packed.down.register_forward_pre_hook(wait)
    packed.down.register_forward_hook(wait)
    found: dict[int, list[Tensor]] = {2: [], 8: []}

    def serve(bits: int) -> None:
        view = view_at_bits(packed, bits)
        for _ in range(3):
            found[bits].append(run(view, tokens))

    threads = [threading.Thread(target=serve, args=(bits,)) for bits in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for bits, outputs in found.items():
        assert len(outputs) == 3
        assert all(torch.equal(y, wanted[bits]) for y in outputs)
    assert set(get_bits(packed).values()) == {(8, 8)}


def test_views_share_every_tensor_and_no_dial(live: Callable[..., nn.Module], tokens: Tensor) -> None:
    packed = live("truncate")
    view = view_at_bits(torch.compile(packed, backend="eager"), MIXED)
    mine, theirs = dict(packed.named_buffers()), dict(view.named_buffers())
    assert mine.keys() == theirs.keys()
    assert all(theirs[name] is tensor for name, tensor in mine.items())
    assert all(a is b for a, b in zip(packed.parameters(), view.parameters(), strict=True))
    with at_bits(packed, MIXED):
        assert torch.equal(run(packed, tokens), run(view, tokens))
    set_bits(view, 2)
    assert set(get_bits(packed).values()) == {(8, 8)}


def test_weights_that_are_rewritten_have_no_views(
    live: Callable[..., nn.Module], saved: Callable[..., Path], decoder: nn.Module
) -> None:
    for model, kind in ((live("double_rounding"), "packed kernels"), (load(saved("nested"), decoder), "float kernels")):
        with pytest.raises(ConfigError, match=rf"layer '\w+' \({kind}\) rewrites its weight .* scheme nested"):
            view_at_bits(model, 4)
