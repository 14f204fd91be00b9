"""Files of rotated models: what they say, and what a hostile one may not say."""

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, load, prepare, read_artifact, save
from bitdial.errors import ArtifactError
from bitdial.files.container import read_container, write_container
from bitdial.nn.rotation import rotate_again

ONLINE = {
    "down": {"form": "hadamard", "size": 4},
    "embed": {"form": "turn", "size": 8},
    "norm": {"form": "turn_back", "size": 8},
}
ENTRY = {"seed": 0, "residual": "merged", "values": True, "untied": ["head"], "online": ONLINE}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm, self.head = nn.RMSNorm(8), nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(self.norm(x + self.down(self.up(x))))


Parts = tuple[dict[str, Tensor], dict[str, Any]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("rotation") / "m"
    net: Any = Net()
    rotate_again(net, ENTRY)
    for module in (net.embed, net.norm):
        module.rotation.signs.fill_(1.0)
    save(prepare(net, QuantConfig(bit_choices=(8, 4), start="max"), torch.arange(10)), path)
    tensors, manifest, _ = read_container(path, error=ArtifactError)
    return tensors, manifest


def test_the_entry(parts: Parts) -> None:
    tensors, manifest = parts
    assert manifest["rotation"] == ENTRY
    assert {"down.layer", "up"} <= set(manifest["layers"])
    assert {".float/embed.layer.weight", ".float/embed.rotation.signs", ".float/norm.rotation.matrix"} <= set(tensors)


Change = Callable[[dict[str, Any]], Any]
HOSTILE: list[tuple[Change, str]] = [
    (lambda r: r.clear(), "rotation: it is no JSON object of seed, residual, values, untied, online"),
    (lambda r: r.pop("seed"), "rotation: it is no JSON object of"),
    (lambda r: r.update(more=1), "rotation: it is no JSON object of"),
    (lambda r: r.update(seed=True), "seed is True, which is not of the right type"),
    (lambda r: r.update(seed=-1), "seed=-1 is out of range"),
    (lambda r: r.update(seed=1 << 80), "is out of range"),
    (lambda r: r.update(residual=True), "residual is True, expected 'merged', 'online' or null"),
    (lambda r: r.update(residual=["merged"]), "residual is .*expected 'merged'"),
    (lambda r: r.update(values=None), "values is None"),
    (lambda r: r.update(untied="head"), "untied is 'head'"),
    (lambda r: r.update(untied=[1]), r"untied=\[1\] is no list of names"),
    (lambda r: r.update(untied=[""]), "is no list of names"),
    (lambda r: r.update(untied=["head", "head"]), "each once"),
    (lambda r: r.update(online=[]), "online is"),
    (lambda r: r["online"].update(down=4), "rotation of 'down': it is no JSON object of form, size"),
    (lambda r: r["online"]["down"].pop("size"), "rotation of 'down': it is no JSON object"),
    (lambda r: r["online"]["down"].update(seed=1), "rotation of 'down': it is no JSON object"),
    (lambda r: r["online"].update({"": {"form": "turn", "size": 8}}), "rotation of '': it is no JSON object"),
    (lambda r: r["online"]["down"].update(form="fourier"), "'fourier' is not one of hadamard, turn, turn_back"),
    (lambda r: r["online"]["down"].update(form=["turn"]), "is not one of hadamard"),
    (lambda r: r["online"]["down"].update(size=0), "size=0 is no size"),
    (lambda r: r["online"]["down"].update(size=4.0), "size=4.0 is no size"),
    (lambda r: r["online"]["down"].update(size=True), "size=True is no size"),
    (lambda r: r["online"]["down"].update(size=1 << 31), "is no size"),
    (lambda r: r["online"]["down"].update(size=6), "size=6 is no power of two"),
    (lambda r: r["online"]["down"].update(size=1), "size=1 is no power of two"),
]


def test_hostile_entries_are_refused(parts: Parts, tmp_path: Path) -> None:
    for number, (change, problem) in enumerate(HOSTILE):
        tensors, manifest = copy.deepcopy(parts)
        change(manifest["rotation"])
        write_container(tmp_path / str(number), tensors, manifest, error=ArtifactError)
        with pytest.raises(ArtifactError, match=problem):
            read_artifact(tmp_path / str(number))
    for to, problem in (({"rotation": []}, "rotation is .*not of the right type"), ({"version": 1}, "is unknown")):
        tensors, manifest = copy.deepcopy(parts)
        write_container(tmp_path / "odd", tensors, {**manifest, **to}, error=ArtifactError)
        with pytest.raises(ArtifactError, match=problem):
            read_artifact(tmp_path / "odd")


FITTING: list[tuple[Change, str]] = [  # files that are right in themselves, and of no such model
    (lambda r: r["online"]["down"].update(size=16), "'down': a hadamard of size 16"),
    (lambda r: r["online"]["embed"].update(size=1 << 30), "'embed': a turn of size 1073741824"),
    (lambda r: r["online"].update(up={"form": "hadamard", "size": 4}), "layer 'up'"),
    (lambda r: r["online"].pop("down"), "layer 'down.layer' of the file is not in the model"),
    (lambda r: r["online"].pop("norm"), "only the"),
    (lambda r: r["online"].update(gone={"form": "hadamard", "size": 4}), "'gone' is rotated in the file"),
    (lambda r: r.update(untied=[]), "only the file has the float tensor 'head.weight'|shares other tensors"),
    (lambda r: r.update(untied=["norm.layer.more"]), "'norm.layer.more' is rotated in the file"),
]


def test_models_that_do_not_fit_are_refused(parts: Parts, tmp_path: Path) -> None:
    write_container(tmp_path / "m", *copy.deepcopy(parts), error=ArtifactError)
    load(tmp_path / "m", Net())
    for number, (change, problem) in enumerate(FITTING):
        tensors, manifest = copy.deepcopy(parts)
        change(manifest["rotation"])
        write_container(tmp_path / str(number), tensors, manifest, error=ArtifactError)
        read_artifact(tmp_path / str(number))
        with pytest.raises(ArtifactError, match=problem):
            load(tmp_path / str(number), Net())


def test_files_of_plain_models_do_not_take_rotated_ones(tmp_path: Path) -> None:
    save(prepare(Net(), QuantConfig(bit_choices=(8, 4), start="max"), torch.arange(10)), tmp_path / "m")
    assert "rotation" not in read_artifact(tmp_path / "m").manifest
    rotated = Net()
    rotate_again(rotated, ENTRY)
    with pytest.raises(ArtifactError, match="is rotated otherwise than in the file; pass the plain float model"):
        load(tmp_path / "m", rotated)


def test_random_entries_are_refused_or_fit(parts: Parts, tmp_path: Path) -> None:
    """Any value at any place of the entry: refused as an ArtifactError, or a model that is loaded and computes."""
    draw = random.Random(0)
    values: list[Any] = [None, True, 0, 1, 2, 3, 4, 8, -1, 1 << 31, 1 << 64, 0.5, "", "up", "down", "embed", "turn"]
    values += ["turn_back", "hadamard", [], ["up"], ["head"], [[]], {}, {"up": {"form": "hadamard", "size": 2}}]
    refused = loaded = 0
    for _ in range(150):
        tensors, manifest = copy.deepcopy(parts)
        place: Any = manifest["rotation"]
        while isinstance(inner := place[key := draw.choice([*place])], dict) and inner and draw.random() < 0.8:
            place = inner
        if draw.random() < 0.2:
            place[draw.choice(["up", "norm", "head", "size", "", "x"])] = place.pop(key)
        else:
            place[key] = draw.choice(values)
        write_container(tmp_path / "m", tensors, manifest, error=ArtifactError)
        try:
            live = load(tmp_path / "m", Net())
        except ArtifactError:
            refused += 1
            continue
        loaded += 1
        assert live(torch.arange(10)).isfinite().all()
    assert refused > 100
    assert loaded > 3, "some edits change nothing that matters, such as the seed"
