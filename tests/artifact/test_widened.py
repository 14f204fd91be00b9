"""Models in 16 bits: what stays float is stored in its own type, and nothing that training changed is rounded."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    JointStep,
    QuantConfig,
    Rule,
    TrainConfig,
    describe,
    load,
    load_trainable,
    prepare,
    read_artifact,
    save,
    set_bits,
)  # fmt: skip
from bitdial.artifact import amend, sizes
from bitdial.errors import ArtifactError
from bitdial.files.container import read_container, write_container

WORDS = torch.arange(20).reshape(4, 5)


class Net(nn.Module):
    """Tokens to scores; `a` and `b` are quantised, the rest stays float."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a, self.norm = nn.Embedding(20, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("table", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.norm(self.a(self.words(x).mean(1)).relu() * self.table)))


def made(dtype: torch.dtype = torch.bfloat16) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().to(dtype)


def prepared(model: nn.Module, **settings: Any) -> Any:
    config = QuantConfig(bit_choices=(8, 4), start="max", activations="float", **settings)
    return prepare(model, config, WORDS)


def outputs(model: Any) -> list[Tensor]:
    found = []
    for bits in (8, 4):
        set_bits(model, bits)
        with torch.no_grad():
            found.append(model.eval()(WORDS))
    return found


def same(left: Any, right: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(outputs(left), outputs(right), strict=True))


KEPT = {".float/head.bias", ".float/head.weight", ".float/norm.bias", ".float/norm.weight", ".float/table",
        ".float/words.weight", "a/bias", "b/bias"}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_stays_float_is_stored_in_its_own_type(tmp_path: Path, dtype: torch.dtype) -> None:
    given, wide = made(dtype), made(torch.float32)
    model = prepared(given)
    save(model, tmp_path / "m")
    artifact = read_artifact(tmp_path / "m")
    assert set(artifact.manifest["widened"]) == KEPT
    state = given.state_dict()
    for name in KEPT:
        key = name.removeprefix(".float/").replace("/", ".")
        assert artifact.tensors[name].dtype == dtype
        assert torch.equal(artifact.tensors[name], state[key]), "exactly"
    assert describe(model).file_bytes == sizes(artifact)["tensors"]
    assert describe(model).width_bytes == sizes(artifact)["separate"]
    assert describe(model).float_bytes == sum(t.nbytes for t in state.values())
    for live in (load(tmp_path / "m", given), load(tmp_path / "m", wide), load_trainable(tmp_path / "m", given)):
        assert {t.dtype for t in live.parameters()} == {torch.float32}
        assert same(live, model)
    short = load(tmp_path / "m", given, dtype=dtype)
    own = {f".float/{name}": value for name, value in short.state_dict().items()}
    for name in KEPT - {"a/bias", "b/bias"}:
        assert torch.equal(own[name], artifact.tensors[name]), "as it is"
        assert own[name].dtype == dtype, name
    assert torch.equal(short.a.bias, given.a.bias)
    amend(tmp_path / "m", metrics={"seen": 1})
    assert same(load(tmp_path / "m", given), model)
    save(load_trainable(tmp_path / "m", wide), tmp_path / "again")
    again = read_artifact(tmp_path / "again")
    assert set(again.manifest["widened"]) == KEPT
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in artifact.tensors.items())


def test_what_training_changed_is_not_rounded(tmp_path: Path) -> None:
    model = prepared(made())
    model.words.requires_grad_(False)
    step = JointStep(model, TrainConfig(epochs=1, lr=1e-2), steps_per_epoch=1)
    step(WORDS, torch.arange(4) % 3)
    model.norm.bias.data.copy_(made().norm.bias)  # as if it had not moved
    save(model, tmp_path / "m")
    artifact = read_artifact(tmp_path / "m")
    kept = {".float/norm.bias", ".float/table", ".float/words.weight"}
    assert set(artifact.manifest["widened"]) == kept
    for name in KEPT - kept:
        assert artifact.tensors[name].dtype == torch.float32
    live = load(tmp_path / "m", made())
    assert same(live, model)
    assert torch.equal(live.head.weight, model.head.weight)


def test_models_in_float32_are_stored_as_before(tmp_path: Path) -> None:
    model = prepared(made().float())
    save(model, tmp_path / "m")
    artifact = read_artifact(tmp_path / "m")
    assert "widened" not in artifact.manifest
    assert {t.dtype for t in artifact.tensors.values()} == {torch.float32, torch.int8}


def test_a_quantised_embedding_is_codes(tmp_path: Path) -> None:
    model = prepared(made(), rules=(Rule(type="Embedding", quantize=True),))
    save(model, tmp_path / "m")
    assert set(read_artifact(tmp_path / "m").manifest["widened"]) == KEPT - {".float/words.weight"}
    assert same(load(tmp_path / "m", made()), model)


Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
HOSTILE: list[tuple[Change, str]] = [
    (lambda m, t: m.update(widened={}), "widened is .*not of the right type"),
    (lambda m, t: m.update(version=1), "is unknown"),
    (lambda m, t: m["widened"].append(3), "widened: 3 is neither a float tensor nor a bias"),
    (lambda m, t: m["widened"].append(["a/bias"]), "is neither a float tensor nor a bias"),
    (lambda m, t: m["widened"].append("a/codes"), "'a/codes' is neither a float tensor nor a bias"),
    (lambda m, t: m["widened"].append("a/weight_scale"), "'a/weight_scale' is neither"),
    (lambda m, t: m["widened"].append(".float/more"), "'.float/more' is missing or not in 16 bits"),
    (lambda m, t: m["widened"].append("a/bias"), "a tensor is named twice"),
    (lambda m, t: t.update({".float/table": t[".float/table"].float()}), "'.float/table' is missing or not in 16"),
    (lambda m, t: t.pop("a/bias"), "'a/bias' is missing or not in 16 bits"),
    (lambda m, t: m["widened"].remove("a/bias"), "'a/bias' is torch.bfloat16 .*expected torch.float32"),
    (lambda m, t: t.update({"a/bias": t["a/bias"][:3]}), "expected torch.bfloat16 of shape"),
    (lambda m, t: t["a/bias"].fill_(torch.nan), "'a/bias' holds NaN or infinity"),
    (lambda m, t: t[".float/table"].fill_(torch.nan), "'.float/table' holds NaN"),
    (lambda m, t: m["layers"]["a"].update(bias=False), "'a/bias' belongs to nothing in the manifest"),
]


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    save(prepared(made()), tmp_path / "m")
    parts = read_container(tmp_path / "m", error=ArtifactError)[:2]
    for number, (change, problem) in enumerate(HOSTILE):
        tensors, manifest = copy.deepcopy(parts)
        change(manifest, tensors)
        write_container(tmp_path / str(number), tensors, manifest, error=ArtifactError)
        with pytest.raises(ArtifactError, match=problem):
            read_artifact(tmp_path / str(number))
