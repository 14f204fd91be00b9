"""Layers of every kind through prepare: which are quantised, what is refused, and what tied layers share."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, Rule, prepare
from bitdial.errors import ConfigError
from bitdial.nn import QuantLayer
from bitdial.train import JointStep, TrainConfig

EMBEDDINGS = Rule(type="Embedding", quantize=True)


def config(*rules: Rule, **settings: Any) -> QuantConfig:
    return QuantConfig(**{"start": "3std", "bit_choices": (8, 4, 2), **settings}, rules=rules)


def quantised(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, QuantLayer)]


class Every(nn.Module):
    """(batch, 2, 8) to (batch, 3): one layer of each kind that multiplies, between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(8, 8)
        self.line = nn.Conv1d(2, 4, 3, padding=1)
        self.image = nn.Conv2d(4, 4, 2)
        self.up = nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2)
        self.volume = nn.Conv3d(6, 4, 1)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.line(self.stem(x)))
        x = torch.relu(self.image(x.unflatten(-1, (2, 4))))
        x = torch.relu(self.volume(self.up(x).unsqueeze(-1)))
        return self.head(x.flatten(2).mean(dim=-1))


class Language(nn.Module):
    """Tokens (batch, length) to scores; the head has the embedding's weight."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6, **settings)
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.relu(self.b(torch.relu(self.a(self.embed(tokens))))))


class Untied(Language):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


LINES = torch.randn(16, 2, 8, generator=torch.Generator().manual_seed(1))
TOKENS = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(2))


def test_every_kind_that_multiplies_is_quantised_by_default() -> None:
    model = Every().eval()
    prepared: Any = prepare(model, config(), LINES).eval()
    assert quantised(prepared) == ["line", "image", "up", "volume"]
    assert prepared.up.weight_quantizer.scale.shape == (6,)  # output channels
    assert prepared.volume.fed_by == "up"
    assert prepared.up.act_quantizer.kind == "unsigned"
    error = (prepared(LINES) - model(LINES)).norm() / model(LINES).norm()
    assert 0 < error < 0.05
    assert isinstance(prepared.up, nn.ConvTranspose2d)
    assert prepared.up.weight.shape == model.up.weight.shape


def test_an_embedding_is_quantised_only_where_a_rule_says_so() -> None:
    for rules, expected in (
        ((), ["a", "b"]),
        ((EMBEDDINGS,), ["embed", "a", "b"]),
        ((Rule(pattern="emb*", quantize=True),), ["embed", "a", "b"]),
        ((Rule(type="Embedding", activations="signed"),), ["a", "b"]),
        ((EMBEDDINGS, Rule(pattern="embed", quantize=False)), ["a", "b"]),
    ):
        prepared: Any = prepare(Untied(), config(*rules), TOKENS)
        assert quantised(prepared) == expected, rules  # the embedding is the first layer, and never a
    prepared = prepare(Untied(padding_idx=3), config(EMBEDDINGS, Rule(type="Embedding", activations="signed")), TOKENS)
    assert prepared.embed.act_quantizer is None
    assert prepared.embed.padding_idx == 3
    assert prepared.embed.weight_quantizer.scale.shape == (11,)


def test_an_embedding_feeds_the_layers_behind_it() -> None:
    prepared: Any = prepare(Untied(), config(EMBEDDINGS, keep_first_last=False), TOKENS)
    assert prepared.embed.fed_by is None
    assert prepared.a.fed_by == "embed"


def test_an_embedding_and_a_head_on_one_weight_share_their_scales() -> None:
    prepared: Any = prepare(Language(), config(EMBEDDINGS, keep_first_last=False), TOKENS)
    assert quantised(prepared) == ["embed", "a", "b", "head"]
    assert prepared.head.weight is prepared.embed.weight
    assert prepared.head.weight_quantizer is prepared.embed.weight_quantizer
    assert prepared.head.act_quantizer is not None
    assert prepared.embed.act_quantizer is None
    step = JointStep(prepared, TrainConfig(epochs=1), steps_per_epoch=2, loss=lambda out, y: out.square().mean())
    before = prepared.embed.weight.detach().clone()
    step(TOKENS, TOKENS)
    assert not torch.equal(prepared.embed.weight, before)
    assert prepared.head.weight is prepared.embed.weight


def test_an_embedding_and_a_head_on_one_weight_need_the_same_granularity() -> None:
    rules = (EMBEDDINGS, Rule(pattern="head", per_channel=False))
    with pytest.raises(ConfigError, match=r"'head'.*tied to another layer, 'embed'.*per_channel"):
        prepare(Language(), config(*rules, keep_first_last=False), TOKENS)


def test_one_of_two_tied_layers_alone_cannot_be_quantised() -> None:
    with pytest.raises(ConfigError, match=r"'embed': a rule asks.*'head' uses the same weight in float"):
        prepare(Language(), config(EMBEDDINGS), TOKENS)  # the head is the last layer


@pytest.mark.parametrize(("settings", "match"), [({"max_norm": 1.0}, "max_norm=1.0"), ({"sparse": True}, "sparse")])
def test_embeddings_that_cannot_be_right_are_refused_but_stay_in_float(settings: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=f"layer 'embed'.*{match}.*keep it in float"):
        prepare(Untied(**settings), config(EMBEDDINGS), TOKENS)
    assert quantised(prepare(Untied(**settings), config(), TOKENS)) == ["a", "b"]


def test_an_embedding_in_float_may_be_anything(caplog: pytest.LogCaptureFixture) -> None:
    """What is not to be quantised is not looked at: as before this kind was known."""

    class Own(nn.Embedding):
        pass

    model: Any = Untied()
    model.embed = Own(11, 6)
    with torch.no_grad():
        model.embed.weight[10, 0] = float("nan")
    with caplog.at_level(logging.WARNING, "bitdial"):
        assert quantised(prepare(model, config(), TOKENS.clamp(max=9))) == ["a", "b"]
    assert not caplog.records


def test_a_layer_that_is_called_with_more_than_its_input_is_refused() -> None:
    class Up(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(2, 2, 1), nn.ConvTranspose2d(2, 2, 3, stride=2)
            self.c = nn.Conv2d(2, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x), output_size=[8, 8]))

    x = torch.randn(2, 2, 3, 3)
    with pytest.raises(ConfigError, match=r"layer 'b': the model calls it with more than its input.*Rule\("):
        prepare(Up(), config(), x)
    prepared = prepare(Up(), config(Rule(pattern="b", quantize=False), keep_first_last=False), x)
    assert quantised(prepared) == ["a", "c"]


def test_tied_layers_whose_rows_differ_are_refused() -> None:
    """An autoencoder that uses one weight both ways has output channels along both of its dimensions."""

    class Auto(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.down = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 2)
            self.up, self.head = nn.ConvTranspose2d(3, 3, 2), nn.Conv2d(3, 3, 1)
            self.up.weight = self.down.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.up(self.down(self.stem(x))))

    x = torch.randn(2, 3, 4, 4)
    for settings in ({}, {"per_channel": False}):
        with pytest.raises(ConfigError, match=r"'up': it uses the weight of 'down'.*untie"):
            prepare(Auto(), config(**settings), x)
