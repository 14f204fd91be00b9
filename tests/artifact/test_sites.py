"""Files with quantizers that belong to no layer: what a hostile one may not say of them."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, load, prepare, read_artifact, save
from bitdial.errors import ArtifactError
from bitdial.files.container import read_container, write_container


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mid, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.mid(self.attn(x, x, x)[0]))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("sites") / "m"
    config = QuantConfig(bit_choices=(8, 4), start="max", attention="quantized", activations="signed")
    save(prepare(Net(), config, torch.randn(2, 3, 8)), path)
    tensors, manifest, _ = read_container(path, error=ArtifactError)
    return tensors, manifest


def test_the_table(parts: tuple[dict[str, Tensor], dict[str, Any]]) -> None:
    tensors, manifest = parts
    kinds = {"q": "signed", "k": "signed", "v": "signed", "p": "unsigned"}
    expected = {f"attn.quant_{x}": {"follows": "attn.out_proj", "kind": kind} for x, kind in kinds.items()}
    assert manifest["sites"] == expected
    assert all(tensors[f"{name}/act_scale"].shape == (2,) for name in expected)


Change = Callable[[dict[str, Any], dict[str, Tensor]], Any]
P = "attn.quant_p"
HOSTILE: list[tuple[Change, str]] = [
    (lambda m, t: m.update(sites=[]), "sites is .*not of the right type"),
    (lambda m, t: m["sites"].update({P: "signed"}), "it is no JSON object of follows, kind"),
    (lambda m, t: m["sites"][P].update(bits=2), "it is no JSON object of follows, kind"),
    (lambda m, t: m["sites"][P].update(kind="signed"), "its kind is 'signed', expected 'unsigned'"),
    (lambda m, t: m["sites"][P].update(kind=["unsigned"]), "its kind is"),
    (lambda m, t: m["sites"][P].update(follows="stem"), "it follows 'stem', which is no layer with quantised"),
    (lambda m, t: m["sites"][P].update(follows=["mid"]), "which is no layer with quantised"),
    (
        lambda m, t: m["layers"]["attn.out_proj"].update(activations="float"),
        "it follows 'attn.out_proj', which is no layer with",
    ),
    (lambda m, t: m["sites"].pop(P), "the attention has no quant_p"),
    (lambda m, t: m["sites"].update({"mid.quant_p": m["sites"][P]}), "is not one of quant_q"),
    (lambda m, t: m["sites"].update({"attn.quant_x": m["sites"][P]}), "is not one of quant_q"),
    (lambda m, t: m["sites"].update({"quant_p": m["sites"][P]}), "is not one of quant_q"),
    (lambda m, t: m.pop("decomposed"), "is not one of quant_q"),
    (lambda m, t: m.pop("sites"), "'attn.quant_k/act_scale' belongs to nothing in the manifest"),
    (lambda m, t: m.update(version=1), "'(decomposed|sites)' is unknown"),
    (lambda m, t: t.pop(f"{P}/act_scale"), "'attn.quant_p/act_scale' is missing"),
    (lambda m, t: t.update({f"{P}/act_scale": torch.tensor([0.1, 0.0])}), "is not positive"),
    (lambda m, t: t.update({f"{P}/act_scale": torch.tensor([0.1, torch.nan])}), "holds NaN or infinity"),
    (lambda m, t: t.update({f"{P}/act_scale": torch.tensor([0.1, 3e38])}), "values overflow"),
    (lambda m, t: t.update({f"{P}/act_scale": torch.tensor([0.1])}), r"expected torch.float32 of shape \(2,\)"),
]


def test_hostile_files_are_refused(parts: tuple[dict[str, Tensor], dict[str, Any]], tmp_path: Path) -> None:
    for number, (change, problem) in enumerate(HOSTILE):
        tensors, manifest = copy.deepcopy(parts)
        change(manifest, tensors)
        write_container(tmp_path / str(number), tensors, manifest, error=ArtifactError)
        with pytest.raises(ArtifactError, match=problem):
            read_artifact(tmp_path / str(number))


def test_another_model_is_refused(parts: tuple[dict[str, Tensor], dict[str, Any]], tmp_path: Path) -> None:
    write_container(tmp_path / "m", *copy.deepcopy(parts), error=ArtifactError)
    load(tmp_path / "m", Net())
    other: Any = Net()
    other.attn = nn.Linear(8, 8)
    with pytest.raises(ArtifactError, match="'attn' is a MultiheadAttention in the file"):
        load(tmp_path / "m", other)
