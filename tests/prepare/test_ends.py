"""First and last layers by what they are, and why each other layer stays in float."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bitdial.errors import ConfigError
from bitdial.models import MODELS, build_model
from bitdial.nn import QuantLayer, kind_of
from bitdial.prepare.config import QuantConfig, Rule
from bitdial.prepare.ends import Ends, _operation_counts, _OperationCounter, find_ends
from bitdial.prepare.prepare import prepare
from bitdial.prepare.weights import find_weights

QUICK = QuantConfig(bit_choices=(8, 2), start="lsq")
ROWS = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
TOKENS = torch.arange(10).view(2, 5)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


class Made(nn.Module):
    """Layers by name, and what runs them."""

    def __init__(self, run: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.run = run

    def forward(self, *args: Any) -> Any:
        return self.run(self, *args)


class Scaled(nn.Linear):
    """Changes how a Linear computes."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Matrix(nn.Module):
    """A matrix of its own, of no class that anybody knows."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


def lines(*names: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(6, 6) for name in names}


def ends_of(model: nn.Module, batch: Any) -> Ends:
    layers = {name: m for name, m in model.named_modules() if kind_of(m) is not None}
    return find_ends(model.eval(), find_weights(model), layers, batch)


def quantised(model: nn.Module) -> list[str]:
    return [name for name, m in model.named_modules() if isinstance(m, QuantLayer)]


def numpy_and_back(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy().copy())


def tied(model: Made) -> Made:
    model.head.weight = model.words.weight
    return model


def attended(m: Any, x: Tensor, mask: Tensor) -> Tensor:
    q, k, v = (layer(m.i(x)) for layer in (m.q, m.k, m.v))
    return m.o(torch.softmax(q @ k.T + mask, dim=-1) @ v)


# model, batch, stems, heads, what the order of execution decided
CASES: dict[str, tuple[Callable[[], nn.Module], Any, tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "a chain": (lambda: Made(lambda m, x: m.c(m.b(m.a(x))), **lines("a", "b", "c")), ROWS, ("a",), ("c",), ()),
    "a chain that loops": (
        lambda: Made(lambda m, x: m.b(m.a(m.b(m.i(x)))), **lines("i", "a", "b")), ROWS, ("i",), ("b",), ()
    ),
    "a recurrence": (
        lambda: Made(lambda m, x: m.h(m.h(m.i(x))), **lines("i", "h")), ROWS, ("i",), ("h",), ()
    ),
    "two inputs": (
        lambda: Made(lambda m, x, y: m.o(m.c(m.a(x) + m.b(y))), **lines("a", "b", "c", "o")),
        (ROWS, ROWS), ("a", "b"), ("o",), (),
    ),
    "several outputs": (
        lambda: Made(lambda m, x: {"p": m.p(m.a(x)), "q": [m.q(m.b(m.a(x)))]}, **lines("a", "b", "p", "q")),
        ROWS, ("a",), ("p", "q"), (),
    ),
    "an output that is read inside": (
        lambda: Made(lambda m, x: (h := m.a(x), m.o(m.b(h))), **lines("a", "b", "o")), ROWS, ("a",), ("o",), ()
    ),
    "a residual stream": (
        lambda: Made(lambda m, x: (h := m.i(x)) + m.b(F.relu(m.a(h))), **lines("i", "a", "b")), ROWS, ("i",), ("b",), ()
    ),
    "a mask reaches the layers behind attention": (
        lambda: Made(attended, **lines("i", "q", "k", "v", "o")), (ROWS, torch.zeros(8, 8)), ("i",), ("o",), ()
    ),
    "the input once more at the end": (
        lambda: Made(
            lambda m, x: m.o(torch.cat([m.b(m.a(x)), x], dim=-1)), **lines("a", "b"), o=nn.Linear(12, 2)
        ),
        ROWS, ("a",), ("o",), (),
    ),
    "an embedding": (
        lambda: Made(lambda m, t: m.o(m.a(m.words(t))), words=nn.Embedding(11, 6), **lines("a", "o")),
        TOKENS, ("words",), ("o",), (),
    ),
    "an embedding by index, tied to the head": (
        lambda: tied(
            Made(
                lambda m, t: m.head(m.a(m.words.weight[t])),
                words=nn.Embedding(11, 6), a=nn.Linear(6, 6), head=nn.Linear(6, 11),
            )
        ),
        TOKENS, ("words",), ("head",), (),
    ),
    "unknown types at both ends": (
        lambda: Made(lambda m, x: m.o(m.b(m.a(m.i(x)))), i=Matrix(), **lines("a", "b"), o=Scaled(6, 6)),
        ROWS, ("i",), ("o",), (),
    ),
    "weights that are computed": (
        lambda: Made(
            lambda m, x: F.linear(m.a(F.linear(x, m.i.weight / 2 + m.up.weight @ m.down.weight)), m.o.weight),
            **lines("i", "a", "o"), up=nn.Linear(2, 6), down=nn.Linear(6, 2),
        ),
        ROWS, ("down", "i", "up"), ("o",), (),
    ),
    "lost at the input": (
        lambda: Made(lambda m, x: m.o(m.a(m.i(numpy_and_back(x)))), **lines("i", "a", "o")),
        ROWS, ("i",), ("o",), ("first",),
    ),
    "lost inside": (
        lambda: Made(lambda m, x: m.o(m.a(numpy_and_back(m.i(x)))), **lines("i", "a", "o")), ROWS, ("i",), ("o",), ()
    ),
    "lost at the output": (
        lambda: Made(lambda m, x: numpy_and_back(m.o(m.a(m.i(x)))), **lines("i", "a", "o")),
        ROWS, ("i",), ("o",), ("last",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_first_and_last_layers_are_those_at_the_ends_of_the_flow(case: str) -> None:
    make, batch, stems, heads, by_order = CASES[case]
    ends = ends_of(make(), batch)
    assert (ends.stems, ends.heads, ends.by_order) == (stems, heads, by_order)


def test_ready_made_models_keep_their_first_and_last_layer() -> None:
    expected = {
        **dict.fromkeys(("cifar_resnet", "resnet18", "resnet20", "resnet50", "resnet56"), ("conv1", "fc")),
        "mobilenet_v2": ("features.0.0", "classifier.1"),
        "efficientnet_lite0": ("features.0.0.1", "classifier.1"),
        "tiny_transformer": ("tokens", "head"),
    }
    assert {*expected, "tiny_detector"} == set(MODELS)  # that has several, see tests/prepare/test_choosing.py
    for name, (first, last) in expected.items():
        batch = TOKENS if name == "tiny_transformer" else torch.randn(1, 3, 32, 32)
        ends = ends_of(build_model(name), batch)
        assert (ends.stems, ends.heads, ends.by_order) == ((first,), (last,), ()), name


def test_language_models_keep_no_query() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    sizes |= {"vocab_size": 20, "max_position_embeddings": 16}
    batch = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}
    for kind, config, ends in (
        ("BertForSequenceClassification", "BertConfig", ("bert.embeddings.word_embeddings", "classifier")),
        ("LlamaForCausalLM", "LlamaConfig", ("model.embed_tokens", "lm_head")),
    ):
        model = getattr(transformers, kind)(getattr(transformers, config)(**sizes, pad_token_id=0))
        found = ends_of(model, batch)
        assert (found.stems, found.heads) == ((ends[0],), (ends[1],))
        prepared = quantised(prepare(model, QUICK, batch))
        assert any("q" in name for name in prepared)
        assert ends[1] not in prepared


def test_an_unknown_head_keeps_no_other_layer_in_float(caplog: pytest.LogCaptureFixture) -> None:
    make = CASES["unknown types at both ends"][0]
    with caplog.at_level(logging.INFO, "bitdial"):
        assert quantised(prepare(make(), QUICK, ROWS)) == ["a", "b"]
    assert "first layers i, last layers o;" in caplog.text
    (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert warning.startswith(
        "50.0% of the weights stay in float: layer 'i' is of type Matrix, which bitdial does not know"
    )
    assert "'o' is of type Scaled, which changes how the Linear that it is derived from computes" in warning
    assert warning.count("(25.0% of the weights)") == 2


def test_where_the_flow_is_lost_the_order_decides_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for case, which in (("lost at the input", "first"), ("lost at the output", "last")):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "bitdial"):
            assert quantised(prepare(CASES[case][0](), QUICK, ROWS)) == ["a"]
        (said,) = [r.getMessage() for r in caplog.records]
        assert f"so its {which} layer is that by the order of execution" in said


def test_what_stays_in_float_is_warned_of_only_where_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    """Small layers of unknown type, first and last layers, rules and tables that multiply nothing do not."""

    class Placed(Made):
        def __init__(self, **layers: nn.Module) -> None:
            super().__init__(lambda m, x: m.o(m.small(m.b(m.a(m.i(x) + m.places))[:, :6])), **layers)
            self.places = nn.Parameter(torch.zeros(8, 60))

    wide = {"i": nn.Linear(6, 60), "a": nn.Linear(60, 60), "b": nn.Linear(60, 60), "o": nn.Linear(6, 3)}
    model = Placed(**wide, small=Matrix(6))
    config = QuantConfig(bit_choices=(8, 2), start="lsq", rules=(Rule(pattern="b", quantize=False),))
    with caplog.at_level(logging.WARNING, "bitdial"):
        assert quantised(prepare(model, config, ROWS)) == ["a"]
    assert not caplog.records


def test_the_real_reasons_are_given_if_nothing_is_left() -> None:
    model = Made(lambda m, x: m.o(m.s(m.a(m.i(x)))), **lines("i", "a", "o", "unused"), s=Scaled(6, 6))
    rules = (Rule(pattern="a", quantize=False),)
    with pytest.raises(ConfigError, match="no layer is left to quantise") as caught:
        prepare(model, QuantConfig(rules=rules), ROWS)
    for words in (
        "'i' is a first layer, which the inputs reach (keep_first_last)",
        "'a' is kept by Rule(pattern='a', quantize=False)",
        "'o' is a last layer, which makes the output (keep_first_last)",
        "'unused' did not run on the calibration batch",
        "'s' is of type Scaled, which changes how the Linear",
    ):
        assert words in str(caught.value)
    with pytest.raises(
        ConfigError, match=r"no layer to quantise .*; 'm' is of type Matrix, which bitdial does not know"
    ):
        prepare(Made(lambda m, x: m.m(x), m=Matrix()), QUICK, ROWS)


def test_multiply_adds_count_everything_that_is_multiplied() -> None:
    """By hand: weights of all kinds, attention, recurrent layers."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.i, self.rnn, self.o = nn.Linear(6, 4), nn.LSTM(4, 4, batch_first=True), Matrix(4)

        def forward(self, x: Tensor) -> Tensor:
            y, _ = self.rnn(self.i(x))
            return self.o(F.scaled_dot_product_attention(y, y, y))

    model, x = Net(), torch.randn(2, 5, 6)
    ends = ends_of(model, x)
    tokens = 2 * 5
    assert ends.by_layer == {"i": tokens * 6 * 4}
    attention, recurrent = 2 * 2 * 5 * 5 * 4, tokens * 2 * (4 * 4 * 4)
    assert ends.multiply_adds == tokens * 6 * 4 + recurrent + attention + tokens * 4 * 4
    assert ends.multiplying == {"i", "rnn", "o"}


def test_multiply_adds_of_a_bilinear_layer_count() -> None:
    """PyTorch's counter leaves them out."""
    model = Made(lambda m, x: m.last(m.pair(x, x)), pair=nn.Bilinear(6, 6, 5), last=nn.Linear(5, 2))
    assert ends_of(model, ROWS).multiply_adds == 8 * (6 * 6 * 5 + 5 * 2)


def test_operations_are_counted_as_pytorch_counts_them_without_its_compiler() -> None:
    model, x = build_model("cifar_resnet", blocks=1, width=8), torch.randn(2, 3, 16, 16)
    with torch.no_grad(), _OperationCounter(_operation_counts()) as counter:
        model(x)
    with torch.no_grad(), FlopCounterMode(display=False) as theirs:
        model(x)
    assert counter.total == theirs.get_total_flops() > 0
    assert not hasattr(counter.__torch_dispatch__, "__wrapped__"), "PyTorch imports its compiler at the first call"


def test_attention_in_which_heads_share_keys_is_counted() -> None:
    """Not by every PyTorch."""
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 1, 5, 8)
    with torch.no_grad(), _OperationCounter(_operation_counts()) as counter:
        F.scaled_dot_product_attention(q, k, k, enable_gqa=True)
    assert counter.total == 2 * 2 * (2 * 4 * 5 * 5 * 8)
