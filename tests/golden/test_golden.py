"""Files that version 997216b wrote, and the logits that it gave: they stay as they are, bit for bit, on every engine.

`make_golden.py` made them, and says why float kernels can be held to the bits too. In the files called `odd` they are
held to a tolerance. Only public names are used here.
"""

import copy
import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from bitdial import (
    BitdialError,
    BitPlan,
    Sensitivity,
    at_bits,
    code_exact,
    get_bits,
    load,
    load_trainable,
    read_artifact,
    save,
    set_bits,
    view_at_bits,
)

FOLDER = Path(__file__).resolve().parent
FILES = FOLDER / "files"
ODD_TOLERANCE = 1e-5  # of the largest logit; float32 sums of at most 54 terms in four layers, no code changes
FLOOR_SCHEMES = ("nested", "truncate", "adabits")  # one buffer for all widths
RENAMED = {"nested": "centred"}  # what the files of format version 1 call otherwise


def _networks() -> dict[str, Any]:
    """NETWORKS of the module beside this one."""
    spec = importlib.util.spec_from_file_location("golden_networks", FOLDER / "networks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.NETWORKS


NETWORKS = _networks()
with safe_open(FOLDER / "expected.safetensors", framework="pt") as _file:
    CASES: dict[str, dict[str, Any]] = json.loads(_file.metadata()["golden"])["cases"]
    TENSORS = {name: _file.get_tensor(name) for name in _file.keys()}  # noqa: SIM118
EXACT = [name for name, entry in CASES.items() if not entry["odd"]]
WEIGHT_ONLY = [name for name, entry in CASES.items() if entry["packed"]]


def path_of(name: str) -> Path:
    """The artifact of a case."""
    return FILES / f"{name}.safetensors"


def network(name: str) -> tuple[nn.Module, ...]:
    """The float network of a case for `load`; nothing where the file says itself how to build it."""
    found = CASES[name]["network"]
    return (NETWORKS[found](),) if isinstance(found, str) else ()


def bits_of(setting: Any) -> Any:
    """A setting from its JSON form: a width, a pair, a stored plan's name or a plan."""
    if isinstance(setting, dict):
        return BitPlan.from_dict(setting)
    return tuple(setting) if isinstance(setting, list) else setting


def expected(name: str, kind: str = "logits") -> Iterator[tuple[Any, Tensor]]:
    """(setting, logits) of a case."""
    for setting, logits in zip(CASES[name]["settings"], TENSORS[f"{name}/{kind}"], strict=True):
        yield bits_of(setting), logits


def same(found: Tensor, wanted: Tensor) -> bool:
    """Equal in type and value, bit for bit but for the sign of zero."""
    return found.dtype == wanted.dtype and torch.equal(found.cpu(), wanted)


@torch.no_grad()
def check(name: str, model: nn.Module, *, within: float = 0.0, kind: str = "logits") -> None:
    """Fail unless `model` gives the logits of a case at each of its settings."""
    dtype = torch.float32 if kind == "logits" else getattr(torch, kind)
    device = next(iter([*model.parameters(), *model.buffers()])).device
    x = TENSORS[f"{name}/x"].to(device, dtype)
    for setting, logits in expected(name, kind):
        set_bits(model, setting)
        found = model(x)
        if within:
            torch.testing.assert_close(found, logits, rtol=0, atol=within * CASES[name]["largest"])
        else:
            assert same(found, logits), f"{name} at {setting}: {found} instead of {logits}"


def test_every_file_is_known() -> None:
    """And none is missing: a case without its file would be no test."""
    assert sorted(CASES) == sorted(path.stem for path in FILES.iterdir())
    assert len(EXACT) >= 29
    assert len(CASES) - len(EXACT) >= 6
    assert {entry["scheme"] for entry in CASES.values()} == {
        "double_rounding", "nested", "truncate", "adabits", "lsq", "dorefa",
    }  # fmt: skip


def test_manifests() -> None:
    """Digest, scheme, widths, plans and sensitivities are read as they were written."""
    for name, entry in CASES.items():
        artifact = read_artifact(path_of(name))
        assert artifact.digest == entry["digest"], name
        assert artifact.file_bytes == path_of(name).stat().st_size
        assert artifact.scheme == RENAMED.get(entry["scheme"], entry["scheme"]), name
        assert artifact.manifest["ties"] == entry["ties"], name
        assert artifact.bit_choices == tuple(entry["bit_choices"]), name
        assert artifact.plans == {plan: BitPlan.from_dict(values) for plan, values in entry["plans"].items()}, name
        assert list(artifact.plans) == ["mixed", "2.5 bits"]
        wanted = entry["sensitivity"] and Sensitivity.from_dict(entry["sensitivity"])
        assert artifact.sensitivity == wanted, name
    assert any(entry["sensitivity"] for entry in CASES.values())


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    """Digests are looked at: one bit of the last tensor is enough."""
    content = bytearray(path_of("nested").read_bytes())
    content[-1] ^= 1
    path = tmp_path / "changed.safetensors"
    path.write_bytes(content)
    with pytest.raises(BitdialError, match="digest"):
        read_artifact(path)


def test_float_kernels() -> None:
    """Sums without rounding are the same in any order, so these too have one right answer."""
    for name in CASES:
        check(name, load(path_of(name), *network(name), kernels="float"), within=0 if name in EXACT else ODD_TOLERANCE)


def test_code_exact() -> None:
    """The definition, also for files with arbitrary numbers."""
    for name in CASES:
        check(name, code_exact(load(path_of(name), *network(name))))


def test_integer_kernels() -> None:
    """Integer sums, also for files with arbitrary numbers."""
    for name in CASES:
        check(name, load(path_of(name), *network(name), kernels="integer"))


def test_trainable() -> None:
    """A model to train on from gives the live one's logits."""
    for name in CASES:
        model = load_trainable(path_of(name), *network(name)).eval()
        check(name, model, within=0 if name in EXACT else ODD_TOLERANCE)


def test_saved_again(tmp_path: Path) -> None:
    """What is loaded to train on and saved is the same file, but for the version that wrote it."""
    for name in CASES:
        artifact = read_artifact(path_of(name))
        model = load_trainable(artifact, *network(name))
        parts = {"plans": artifact.plans, "metrics": artifact.metrics, "sensitivity": artifact.sensitivity}
        save(model, tmp_path / name, **parts)
        again = read_artifact(tmp_path / name)
        assert again.tensors.keys() == artifact.tensors.keys(), name
        for key, tensor in artifact.tensors.items():
            if name == "odd_adabits" and key.endswith("/weight_scale"):  # through atanh and tanh: off by one bit or two
                torch.testing.assert_close(again.tensors[key], tensor, rtol=2**-22, atol=0)
            else:
                assert same(again.tensors[key], tensor), f"{name}: {key}"
        assert again.manifest.pop("graph"), "which the version that made the files did not write"
        assert again.manifest | {"written_by": ""} == artifact.manifest | {"written_by": ""}, name


@pytest.mark.slow
@torch.no_grad()
def test_random_walks() -> None:
    """Where a model comes from does not matter: at each setting, whatever was set before, its logits are the same."""
    for seed, name in enumerate(CASES):
        walk, x, wanted = random.Random(seed), TENSORS[f"{name}/x"], list(expected(name))
        float_model = load(path_of(name), *network(name), kernels="float")
        live = float_model if name in EXACT else code_exact(float_model)
        for model in (live, load(path_of(name), *network(name), kernels="integer")):
            for setting, logits in walk.choices(wanted, k=8):
                set_bits(model, setting)
                before = get_bits(model)
                inside, inner = walk.choice(wanted)
                with at_bits(model, inside):
                    assert same(model(x), inner), f"{name} at {inside}"
                assert get_bits(model) == before
                assert same(model(x), logits), f"{name} at {setting}"


def test_packed_words() -> None:
    """Weight-only files in 16 bits; on the CPU sums are in float64, so arbitrary numbers have one answer too."""
    for name in WEIGHT_ONLY:
        for kind in CASES[name]["packed"]:
            check(name, load(path_of(name), *network(name), kernels="packed", dtype=getattr(torch, kind)), kind=kind)


@torch.no_grad()
def test_packed_words_otherwise() -> None:
    """In float32, with fewer widths, with the codes in host memory, as a copy and as views."""
    for name in WEIGHT_ONLY:
        entry, parts = CASES[name], (path_of(name), *network(name))
        within = 0 if name in EXACT else ODD_TOLERANCE
        check(name, load(*parts, kernels="packed"), within=within)
        packed = {"kernels": "packed", "dtype": torch.bfloat16}
        low = entry["bit_choices"][1:]
        fewer = load(*parts, **packed, bit_choices=low)
        copied = copy.deepcopy(load(*parts, **packed))
        by_width = dict(list(expected(name, "bfloat16"))[: len(entry["bit_choices"])])
        x = TENSORS[f"{name}/x"].bfloat16()
        for bits in low:
            set_bits(fewer, bits)
            set_bits(copied, bits)
            assert same(fewer(x), by_width[bits]), f"{name} at {bits}"
            assert same(copied(x), by_width[bits]), f"{name} at {bits}"
        if entry["scheme"] not in FLOOR_SCHEMES:
            check(name, load(*parts, **packed, master="host"), kind="bfloat16")
        views = {bits: view_at_bits(copied, bits) for bits in by_width}
        for bits, view in views.items():
            assert same(view(x), by_width[bits]), f"{name} at {bits}"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    """The engines whose sums are exact wherever they run."""
    for name in CASES:
        check(name, load(path_of(name), *network(name), kernels="integer", device="cuda"))
        check(name, code_exact(load(path_of(name), *network(name), kernels="float", device="cuda")))
    for name in {*WEIGHT_ONLY} & {*EXACT} - {"weights_mixed"}:  # its convolution is cuDNN's
        for kind in CASES[name]["packed"]:
            dtype = getattr(torch, kind)
            check(name, load(path_of(name), *network(name), kernels="packed", dtype=dtype, device="cuda"), kind=kind)
