"""What the saved model computes: kept in the file, and compared with the model that is given to `load`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, load, load_trainable, prepare, read_artifact, save, set_bits
from bitdial.artifact.graph import MOST_CHARACTERS, MOST_LINES
from bitdial.errors import ArtifactError

X = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    """Two convolutions of one shape; `change` says what forward does otherwise, with the same tensors."""

    def __init__(self, change: str = "", depth: int = 1) -> None:
        super().__init__()
        self.change, self.depth = change, depth
        self.stem, self.head = nn.Conv2d(2, 4, 3, padding=1), nn.Linear(4, 3)
        self.a, self.b = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.pool = nn.AvgPool2d(3 if change == "another pool" else 2)
        if change == "a stride":
            self.stem.stride = (2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        first, second = (self.b, self.a) if self.change == "another order" else (self.a, self.b)
        y = self.norm(first(x))
        y = y if self.change == "no relu" else torch.relu(y)
        y = second(y) + (y if self.change == "another residual" else x)
        for _ in range(self.depth):
            y = y * 1.0
        return self.head(self.pool(y).mean(dim=(2, 3)))


class Branching(Block):
    """The same, with control flow on values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() < 1e9 else -x)


@pytest.fixture
def saved_block(tmp_path: Path) -> Callable[..., Path]:
    """Saves a block."""

    def make(model: nn.Module) -> Path:
        torch.manual_seed(0)
        save(prepare(model, QuantConfig(start="3std"), X).train(), tmp_path / "block")
        return tmp_path / "block"

    return make


DIFFERENCES = {
    "another order": r"after 'stem', the file's model computes 'a'\('stem'\) and this one 'b'\('stem'\)",
    "no relu": r"after 'norm', the file's model computes relu\('norm'\) and this one 'b'\('norm'\)",
    "another residual": r"after 'b', the file's model computes add\('b', 'stem'\) and this one add\('b', relu\)",
    "another pool": r"AvgPool2d\(mul; kernel_size=2.* and this one AvgPool2d\(mul; kernel_size=3",
    "a stride": r"at first, the file's model computes 'stem'\(in0; .*stride=\(1, 1\).*stride=\(2, 2\)",
}


def test_a_model_that_computes_something_else(saved_block: Callable[..., Path]) -> None:
    path = saved_block(Block())
    for change, words in DIFFERENCES.items():
        for loader in (load, load_trainable):
            with pytest.raises(ArtifactError, match=rf"computes something else: .*{words}.*\bread_artifact\(path\)"):
                loader(path, Block(change))
    for kernels in ("float", "integer"):
        load(path, Block().eval(), kernels=kernels)
    load_trainable(path, Block())


def test_the_way_out(saved_block: Callable[..., Path]) -> None:
    artifact = read_artifact(saved_block(Block()))
    del artifact.manifest["graph"]
    live, other = load(artifact, Block()), load(artifact, Block("another order"))
    assert not torch.equal(live(X), other(X)), "that is what the graph is for"


def test_where_one_cannot_be_followed_nothing_is_compared(
    saved_block: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = saved_block(Block())
    load(path, Branching("another order"))
    path = saved_block(Branching())
    assert "graph" not in read_artifact(path).manifest
    load(path, Block("another order"))
    assert [record for record in caplog.records if record.name != "bitdial.nn.untouched"] == []


def test_long_models(saved_block: Callable[..., Path]) -> None:
    """The file keeps some lines and the digest of all."""
    path = saved_block(Block(depth=MOST_LINES))
    graph = read_artifact(path).manifest["graph"]
    assert (len(graph["lines"]), graph["count"]) == (MOST_LINES, MOST_LINES + 10)
    assert max(map(len, graph["lines"])) <= MOST_CHARACTERS
    load(path, Block(depth=MOST_LINES))
    with pytest.raises(ArtifactError, match="agree in 1000 operations and differ later"):
        load(path, Block(depth=MOST_LINES + 1))


def test_the_saved_model_runs_as_before(saved_block: Callable[..., Path]) -> None:
    path = saved_block(Block())
    trained = load_trainable(path, Block()).eval()
    live = load(path, Block())
    for bits in (8, 2):
        set_bits(live, bits)
        set_bits(trained, bits)
        assert torch.equal(live(X), trained(X))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("digest", "0" * 63, "64 hexadecimal digits"),
        ("digest", 7, "64 hexadecimal digits"),
        ("count", True, "count=True is no number"),
        ("count", 10**9, "is no number of operations"),
        ("lines", [], "not the first 1000, or all"),
        ("lines", {"a": 1}, "not the first 1000, or all"),
        ("lines", "too long", "at most 160 characters"),
        ("lines", 3, "at most 160 characters"),
        ("more", 1, "no JSON object of digest, count, lines"),
    ],
)
def test_hostile_graphs(
    saved_block: Callable[..., Path], open_file: Callable[[Path], Any], field: str, value: Any, words: str
) -> None:
    path = saved_block(Block())
    file = open_file(path)
    graph = file.manifest["graph"]
    if field == "lines" and value in ("too long", 3):
        value = [*graph["lines"][:-1], "x" * 161 if value == "too long" else 3]
    graph[field] = value
    with pytest.raises(ArtifactError, match=words):
        read_artifact(file.write(path))


def test_version_1_has_none(saved_block: Callable[..., Path], open_file: Callable[[Path], Any]) -> None:
    path = saved_block(Block())
    file = open_file(path)
    file.manifest["version"] = 1
    del file.manifest["report"]
    for entry in file.manifest["layers"].values():
        del entry["group_size"]
    with pytest.raises(ArtifactError, match="'graph' is unknown"):
        read_artifact(file.write(path))
    del file.manifest["graph"]
    load(file.write(path), Block("another order"))


def test_lines_that_speak_of_none(saved_block: Callable[..., Path], open_file: Callable[[Path], Any]) -> None:
    """A file may say anything: a message is made of it, and no error of another kind."""
    path = saved_block(Block())
    file = open_file(path)
    file.manifest["graph"] |= {"digest": "0" * 64}
    file.manifest["graph"]["lines"][1] = "%99999999(%7777 %3 \\1 {x}"
    with pytest.raises(ArtifactError, match=r"computes %99999999\(%7777 relu \\1 \{x\} and"):
        load(file.write(path), Block())
