"""What config and rules decide for a layer: which rule wins, and which layers have a width of their own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, Rule, describe, get_bits, prepare
from bitdial.errors import ConfigError


class Net(nn.Module):
    """An embedding and an LSTM beside two ends and a layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(10, 4), nn.Linear(4, 4)
        self.lstm, self.mid, self.last = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
        y, _ = self.lstm(self.words(tokens) + self.first(x))
        return self.last(torch.relu(self.mid(y[:, -1])))


BATCH = torch.zeros(3, 5, dtype=torch.int64), torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
MATRICES = ("lstm.weight_ih_l0", "lstm.weight_hh_l0")


def fixed(*rules: Rule, **settings: Any) -> tuple[set[str], dict[str, int]]:
    """The quantised layers but those of the LSTM, and the widths that layers stay at."""
    torch.manual_seed(0)
    model = prepare(Net(), QuantConfig(bit_choices=(8, 4, 2), start="lsq", rules=rules, **settings), BATCH)
    report = describe(model)
    own = {name: model.get_submodule(name).fixed_bits for name in report.quantised_layers}
    assert {name: bits for name, bits in own.items() if bits is not None} == report.fixed_bits
    assert all(pair == (own[name] or 8, own[name] or 8) for name, pair in get_bits(model).items())
    return set(report.quantised_layers) - set(MATRICES), dict(report.fixed_bits)


def test_first_and_last_layers() -> None:
    ends = {"first", "mid", "last"}
    assert fixed() == ({"mid"}, {})
    assert fixed(keep_first_last=True) == ({"mid"}, {})
    assert fixed(keep_first_last=False) == (ends, {})
    assert fixed(keep_first_last=4) == (ends, {"first": 4, "last": 4})


def test_rules_with_bits() -> None:
    ends = {"first", "mid", "last"}
    assert fixed(Rule(pattern="first", bits=4)) == ({"first", "mid"}, {"first": 4})  # overrules keep_first_last
    assert fixed(Rule(pattern="first", bits=4), keep_first_last=8) == (ends, {"first": 4, "last": 8})
    assert fixed(Rule(pattern="mid", bits=2), keep_first_last=False) == (ends, {"mid": 2})
    assert fixed(Rule(type="Embedding", bits=8)) == ({"words", "mid"}, {"words": 8})
    assert fixed(Rule(type="LSTM", bits=8)) == ({"mid"}, dict.fromkeys(MATRICES, 8))
    floats = Rule(pattern="mid", activations="float")
    assert fixed(Rule(pattern="mid", bits=2), floats) == ({"mid"}, {"mid": 2})  # speaks of something else


def test_the_last_rule_to_speak_of_it_wins() -> None:
    ends, all_at_4 = {"first", "mid", "last"}, Rule(type="Linear", bits=4)
    assert fixed(all_at_4, Rule(pattern="mid", bits=2)) == (ends, {"first": 4, "mid": 2, "last": 4})
    assert fixed(all_at_4, Rule(pattern="last", quantize=False)) == ({"first", "mid"}, {"first": 4, "mid": 4})
    assert fixed(Rule(pattern="last", quantize=False), all_at_4)[1] == {"first": 4, "mid": 4, "last": 4}
    # `quantize=True` says that a layer is quantised, whatever keep_first_last says: it leaves a rule's width alone.
    assert fixed(Rule(pattern="last", quantize=True), keep_first_last=8) == (ends, {"first": 8})
    assert fixed(Rule(pattern="last", bits=4), Rule(pattern="last", quantize=True)) == ({"mid", "last"}, {"last": 4})


def test_a_width_for_a_layer_that_does_not_run() -> None:
    class Idle(Net):
        def forward(self, tokens: Tensor, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.first(x[:, 0])))

    with pytest.raises(ConfigError, match="layer 'mid': a rule asks to quantise it"):
        prepare(Idle(), QuantConfig(keep_first_last=False, rules=(Rule(pattern="mid", bits=8),)), BATCH)
