"""Models by name; torchvision and timm are not needed: modules of ours stand in for them."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bitdial
from bitdial.errors import ConfigError, MissingDependencyError
from bitdial.models.by_name import model_by_name


class Net(nn.Module):
    def __init__(self, classes: int = 5):
        super().__init__()
        self.fc = nn.Linear(3, classes)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for both libraries; returns what they were asked for."""
    asked: list[Any] = []
    vision, models, timm = ModuleType("torchvision"), ModuleType("torchvision.models"), ModuleType("timm")

    def get_model(name: str, **options: Any) -> nn.Module:
        asked.append((name, options))
        return Net(options.get("num_classes", 5))

    models.list_models = lambda module: ["net50"] if module is models else ["net50", "fcn_net50"]  # type: ignore[attr-defined]
    models.get_model = timm.create_model = get_model  # type: ignore[attr-defined]
    timm.list_models = lambda: ["net50"]  # type: ignore[attr-defined]
    timm.is_model = lambda name: name.partition(".")[0] == "net50"  # type: ignore[attr-defined]
    for module in (vision, models, timm):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return asked


def test_models_of_ours_take_arguments_from_their_weights(tmp_path: Path) -> None:
    arguments = {"blocks": 1, "width": 4, "num_classes": 7}
    source = bitdial.build_model("cifar_resnet", **arguments)
    path = tmp_path / "w.safetensors"
    save_file(source.state_dict(), path, {"model": "cifar_resnet", "arguments": json.dumps(arguments)})
    for name, weights in (("cifar_resnet", path), (str(path), None)):
        model, full = model_by_name(name, weights)
        assert full == "cifar_resnet"
        assert not model.training
        assert model.architecture == {"name": "cifar_resnet", "arguments": arguments}
        assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in source.state_dict().items())
    model, _ = model_by_name("cifar_resnet", classes=3)
    assert model.fc.out_features == 3  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="has weights of cifar_resnet, not of resnet20; name that model"):
        model_by_name("resnet20", path)
    with pytest.raises(ConfigError, match="are both weights"):
        model_by_name(str(path), path)
    save_file(source.state_dict(), path)
    with pytest.raises(ConfigError, match="does not say which model its weights are of; name it"):
        model_by_name(str(path))


def test_models_of_libraries_are_built_without_their_weights(libraries: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    source = Net(2)
    save_file(source.state_dict(), path)
    for name, options in (("torchvision:net50", {"weights": None}), ("timm:net50.tag", {"pretrained": False})):
        model, full = model_by_name(name, path, classes=2)
        assert full == name
        assert torch.equal(model.fc.weight, source.fc.weight)  # type: ignore[union-attr, arg-type]
        assert libraries.pop() == (name.partition(":")[2], {**options, "num_classes": 2})
    model_by_name("timm:net50")
    assert libraries.pop() == ("net50", {"pretrained": False})
    with pytest.raises(ConfigError, match=r"w\.safetensors is not for torchvision:net50: fc\.weight is \(2, 3\)"):
        model_by_name("torchvision:net50", path)


def test_unknown_names_are_refused_before_anything_is_built(libraries: list[Any]) -> None:
    for name, words in {
        "mobilenet_v3": "model 'mobilenet_v3' is not known, did you mean mobilenet_v2?; give a model of bitdial",
        "keras:net50": "model 'keras:net50' is not known; give a model of bitdial",
        "torchvision:net5": "torchvision has no classification model 'net5', did you mean net50?",
        "torchvision:fcn_net50": "torchvision has no classification model 'fcn_net50'",
        "timm:hf-hub:someone/net": "timm has no model 'hf-hub:someone/net'",
    }.items():
        with pytest.raises(ConfigError) as problem:
            model_by_name(name)
        assert str(problem.value).startswith(words)
    assert libraries == []


def test_a_library_that_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for library, module in (("torchvision", "torchvision.models"), ("timm", "timm")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(MissingDependencyError, match=f"{library} is not installed.*pip install {library}"):
            model_by_name(f"{library}:resnet50")


def test_a_library_that_cannot_be_imported_is_not_said_to_lack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    with pytest.raises(MissingDependencyError, match=r"timm is installed, but cannot be imported: operator .*build"):
        model_by_name("timm:resnet18")
    (tmp_path / "timm.py").write_text("import a_package_that_is_nowhere.part  # other bytes")
    importlib.invalidate_caches()
    with pytest.raises(MissingDependencyError, match=r"a_package_that_is_nowhere is not installed.*pip install"):
        model_by_name("timm:resnet18")
