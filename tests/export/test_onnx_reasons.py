"""What cannot be exported is told in two lines: what and where, and a way out that is right. No graph text."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import export_onnx
from bitdial.errors import ExportError

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Odd(nn.Module):
    """A module `odd` in the middle that an exporter cannot carry."""

    def __init__(self, odd: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.odd = Apply(odd)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.odd(self.inner(torch.relu(self.stem(x)))))


class Apply(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def branching(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def counting(x: Tensor) -> Tensor:
    return x * int((x > 0).sum())


def in_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


def for_two(x: Tensor) -> Tensor:
    return x + torch.zeros(2, 1) if x.shape[0] == 2 else x


def for_few(x: Tensor) -> Tensor:
    return x if x.shape[0] > 3 else -x


def sparse(x: Tensor) -> Tensor:
    return torch.sparse.mm(torch.eye(4).to_sparse(), x.T).T


def line(function: Any) -> int:
    return function.__code__.co_firstlineno + 1


VALUES = "in 'odd', the path of the forward depends on the values of a tensor, and a file has one path"
NOT_A_SIZE = "the model does not take every size of 'batch'; torch.export finds: batch = "
CASES: list[tuple[Callable[[Tensor], Tensor], str, str]] = [
    (branching, f"{VALUES} (test_onnx_reasons.py:{line(branching)}: `return x if x.sum() > 0 else -x`).", "where"),
    (counting, f"{VALUES} (test_onnx_reasons.py:{line(counting)}: `return x * int((x > 0).sum())`).", "torch.where"),
    (in_numpy, "in 'odd', torch.export cannot follow: .numpy() is not supported", "operators of torch alone"),
    (sparse, "in 'odd', torch.export does not know the operator aten._sparse_addmm.default (", "other operators"),
    (torch.special.bessel_j0, "module 'odd' uses prims.bessel_j0.default, which torch's ONNX", "other operators"),
    (for_two, f"{NOT_A_SIZE}2.", "Fix the size: dynamic_batch=False."),
    (for_few, f"{NOT_A_SIZE}Dim('batch', max=3).", "dynamic_axes={'x': {0: torch.export.Dim('batch', max=3)}}."),
]  # fmt: skip


@pytest.mark.parametrize(("odd", "what", "way"), CASES, ids=[case[0].__name__ for case in CASES])
def test_two_lines(
    make_live: Callable[..., nn.Module], odd: Callable[[Tensor], Tensor], what: str, way: str, tmp_path: Path,
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    live = make_live(Odd(odd), X)
    (tmp_path / "net.onnx").write_text("before")
    capfd.readouterr()
    with caplog.at_level(logging.DEBUG, "bitdial"), pytest.raises(ExportError) as found:
        export_onnx(live, tmp_path / "net.onnx", X)
    first, second = str(found.value).split("\n")
    assert first.startswith(what)
    assert way in second
    assert (found.value.__cause__, found.value.__context__) == (None, None), "or a traceback shows torch's text"
    assert capfd.readouterr().err == "", "torch prints the graph"
    texts = [r.exc_text or "" for r in caplog.records if r.name == "bitdial.export.onnx_trace"]
    assert any("Traceback" in text and len(text) > 1000 for text in texts), "it is in the log"
    assert (tmp_path / "net.onnx").read_text() == "before"


@pytest.mark.parametrize(
    ("odd", "options"),
    [
        (for_two, {"dynamic_batch": False}),
        (for_few, {"dynamic_axes": {"x": {0: torch.export.Dim("batch", max=3)}}}),
        (lambda x: torch.where(x.sum() > 0, x, -x), {}),
    ],
    ids=["fixed", "range", "where"],
)
def test_the_ways_out_are_right(
    make_live: Callable[..., nn.Module], odd: Callable[[Tensor], Tensor], options: dict[str, Any], tmp_path: Path
) -> None:
    live = make_live(Odd(odd), X)
    assert export_onnx(live, tmp_path / "net.onnx", X, **options).bytes > 0


def test_a_model_without_tensors(make_live: Callable[..., nn.Module], tmp_path: Path) -> None:
    class Number(Odd):
        def forward(self, x: Tensor) -> Any:
            super().forward(x)
            return {"count": 3}

    live = make_live(Number(torch.relu), X)
    with pytest.raises(ExportError, match="the model returns no tensor"):
        export_onnx(live, tmp_path / "net.onnx", X)
