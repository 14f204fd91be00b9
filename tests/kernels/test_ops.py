"""Operators as such: all declared, each on the backend of its device. Their results are tested by the files beside."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from bitdial.errors import QuantizationError
from bitdial.kernels import dispatch, ops
from bitdial.kernels.epilogue import Epilogue

WITH_KERNELS = (
    "integer_conv2d", "integer_finish", "fixed_point_conv2d", "sample_powers", "fixed_point_mean", "max_pool_codes",
    "switch_", "repack_",
)  # fmt: skip
EVERY = (*WITH_KERNELS, "integer_sums")


@pytest.mark.parametrize("name", EVERY)
def test_every_operator_has_a_schema_a_reference_and_a_fake(name: str) -> None:
    op = getattr(torch.ops.bitdial, name).default
    assert op is getattr(ops, name)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"bitdial::{name}", "CompositeExplicitAutograd")
    for device in ("CPU", "CUDA"):
        own = torch._C._dispatch_has_kernel_for_dispatch_key(f"bitdial::{name}", device)
        assert own == (name != "integer_sums"), device
    assert torch.Tag.pt2_compliant_tag in op.tags


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_every_kernel_is_a_function_of_the_backends_file() -> None:
    from bitdial.kernels.triton import ops as triton_ops

    assert all(callable(getattr(triton_ops, name)) for name in WITH_KERNELS)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("interpreted", [False, True])
def test_the_cpu_runs_the_reference_or_the_interpreters_kernel(
    interpreted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitdial.kernels.triton import ops as triton_ops
    from bitdial.kernels.triton.inference import sample_scales

    calls: list[str] = []
    monkeypatch.setattr(sample_scales, "sample_powers", lambda x, bits: calls.append("triton") or x.new_zeros(2, 3))
    monkeypatch.setattr(dispatch, "interpreted", lambda: interpreted)
    monkeypatch.setattr(torch.cuda, "device_of", lambda x: torch.no_grad())
    assert ops.sample_powers(torch.ones(3, 4), 8).shape == (2, 3)
    assert calls == (["triton"] if interpreted else [])
    monkeypatch.setattr(triton_ops, "INDEXABLE", 12)
    ops.sample_powers(torch.ones(3, 4), 8)  # of as many numbers it is the reference again
    assert calls == (["triton"] if interpreted else [])


def test_other_devices_run_the_reference() -> None:
    x = torch.zeros(2, 3, 4, 5, device="meta")
    value, codes, _ = ops.integer_finish(x, *Epilogue(quantizer_a=torch.zeros(5, device="meta")))
    assert value.shape == codes.shape == x.shape
    assert codes.dtype == torch.int8
    with pytest.raises(QuantizationError, match="expected images"):
        ops.max_pool_codes(torch.zeros(3, 4, dtype=torch.int8, device="meta"), [2, 2], [2, 2], [0, 0], [1, 1])


def test_a_gradient_is_not_lost_in_silence() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    value, _, _ = ops.integer_finish(x, *Epilogue())
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        value.sum().backward()


def test_triton_is_not_imported_with_bitdial() -> None:
    check = "import sys, bitdial, bitdial.kernels.ops; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)
