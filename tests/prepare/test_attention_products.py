"""Which attentions get quantised products, which layer these follow, where their scales start."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, Rule, describe, prepare
from bitdial.errors import ConfigError
from bitdial.nn import ActivationSite
from bitdial.nn.attention import SITES

X = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))


class Pair(nn.Module):
    """Two attentions between a stem and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 2)
        self.one, self.two = (nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.one(x, x, x)[0]
        return self.head(self.two(x, x, x, need_weights=False)[0])


def prepared(**settings: Any) -> Any:
    torch.manual_seed(0)
    return prepare(Pair(), QuantConfig(bit_choices=(8, 2), start="max", attention="quantized", **settings), X)


def follows(model: nn.Module) -> dict[str, str]:
    return {name: m.follows for name, m in model.named_modules() if isinstance(m, ActivationSite)}


def test_they_follow_a_layer_whose_input_is_quantised() -> None:
    rules = Rule(pattern="one.out_proj", quantize=False), Rule(pattern="one.v_proj", activations="float")
    model = prepared(rules=rules)
    assert follows(model) == {
        **{f"one.{part}": "one.k_proj" for part in SITES},
        **{f"two.{part}": "two.out_proj" for part in SITES},
    }
    assert not describe(model).warnings


def test_an_attention_without_such_a_layer_stays_in_float_and_is_named() -> None:
    model = prepared(rules=[Rule(pattern="one.*", activations="float")])
    assert set(follows(model)) == {f"two.{part}" for part in SITES}
    assert [w for w in describe(model).warnings if "the products of 'one' stay in float" in w]


def test_scales_start_as_those_of_layers_do() -> None:
    """From what was seen; the range of probabilities is known."""
    seen: dict[str, Tensor] = {}
    torch.manual_seed(0)
    model = Pair()
    attention = model.one
    q, k, v = nn.functional.linear(model.stem(X), attention.in_proj_weight, attention.in_proj_bias).chunk(3, dim=-1)
    seen |= {"quant_q": q, "quant_k": k, "quant_v": v}
    found = prepared()
    for name, values in seen.items():
        for bits, most in ((8, 127), (2, 1)):
            scale = found.one.get_submodule(name).quantizer.scales[str(bits)]
            torch.testing.assert_close(scale, (values.abs().max() / most).reshape(1), rtol=1e-4, atol=0)
    for bits, most in ((8, 255), (2, 3)):
        torch.testing.assert_close(found.one.quant_p.quantizer.scales[str(bits)], torch.tensor([1 / most]))
    kinds = {name: found.one.get_submodule(name).quantizer.kind for name in SITES}
    assert kinds == SITES


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention='quantized' quantises activations, and activations='float'"):
        QuantConfig(attention="quantized", activations="float")
    with pytest.raises(ConfigError, match="attention='int8'"):
        QuantConfig(attention="int8")
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    with pytest.raises(ConfigError, match=re.escape("the model has no nn.MultiheadAttention that was taken apart")):
        prepare(plain, QuantConfig(attention="quantized"), X)
    with pytest.raises(ConfigError, match="the products of 'one' stay in float: none of its layers"):
        prepared(rules=[Rule(pattern="*.*_proj", activations="float")])
