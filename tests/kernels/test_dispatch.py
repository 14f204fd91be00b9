"""Where Triton kernels run: on GPUs that are new enough, on the CPU only under the interpreter."""

import pytest
import torch

from bitdial.kernels import dispatch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(dispatch, "triton_installed", lambda: True)
    dispatch._missing_on_gpu.cache_clear()
    yield
    dispatch._missing_on_gpu.cache_clear()


def test_the_cpu_has_kernels_under_the_interpreter_only(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1)
    assert dispatch.missing_on(CPU) == "it is no GPU"
    assert not dispatch.use_triton(x)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.missing_on(CPU) is None
    assert [dispatch.use_triton(x.to(kind)) for kind in (torch.float32, torch.bfloat16, torch.float16)] == [True] * 3
    assert not dispatch.use_triton(x.double())
    assert dispatch.triton_runs(x.double())
    monkeypatch.setattr(dispatch, "triton_installed", lambda: False)
    assert dispatch.missing_on(CPU) == "Triton is not installed"
    assert not dispatch.triton_runs(x)


@pytest.mark.parametrize("capability, missing", [((9, 0), None), ((8, 0), None), ((7, 5), "7.5, below 8.0")])
def test_gpus_must_be_new_enough(
    capability: tuple[int, int], missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert (dispatch.missing_on(GPU) or "").endswith(missing or "")
    assert (dispatch.missing_on(GPU) is None) == (missing is None)


def test_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "triton_installed", lambda: False)
    assert dispatch.missing_on(GPU) == "Triton is not installed"
