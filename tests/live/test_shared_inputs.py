"""Which layers read one tensor: by a pass of a small input, by following, and where nothing can be known."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial.live.shared_inputs import shared_inputs


class Net(nn.Module):
    """Six layers of 8 inputs; `order` says what runs, as a function of the layers and the input."""

    def __init__(self, order: Any):
        super().__init__()
        self.order = order
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.order(self, x)


class WithInput(Net):
    """The same, with a small input of its own."""

    dummy_inputs = {"x": torch.ones(2, 8)}  # noqa: RUF012


NAMES = ("a", "b", "c", "d")
ORDERS: list[tuple[Any, list[tuple[str, ...]]]] = [
    (lambda m, x: m.a(x) + m.b(x) + m.c(x), [("a", "b", "c")]),
    (lambda m, x: m.b(x) + m.a(x), [("b", "a")]),
    (lambda m, x: m.d(m.a(x) * m.b(x)) + m.c(x), [("a", "b")]),
    (lambda m, x: m.a(x) + m.c(m.b(x)), [("a", "b")]),
    (lambda m, x: m.a(x) + m.b(x + 0) + m.c(x), []),
    (lambda m, x: m.a(x) + m.b(x) + m.b(x.relu()), []),
    (lambda m, x: m.c(m.a(y := x.relu()) + m.b(y)) + m.d(y), [("a", "b")]),
]


def test_runs_of_layers_on_one_tensor_are_found() -> None:
    for kind in (Net, WithInput):
        for i, (order, wanted) in enumerate(ORDERS):
            model = kind(order)
            before = torch.random.get_rng_state()
            assert shared_inputs(model, NAMES) == wanted, (kind, i)
            assert torch.equal(torch.random.get_rng_state(), before)
            assert all("forward" not in vars(layer) for layer in model.modules()), "as it was"
        model = kind(ORDERS[0][0])
        assert shared_inputs(model, ("a", "b")) == [("a", "b")], "others are not looked at"


def test_a_tensor_that_was_changed_is_another_one() -> None:
    assert shared_inputs(WithInput(lambda m, x: m.a(x) + m.b(x.add_(1)) + m.c(x)), NAMES) == [("b", "c")]


def test_where_nothing_is_known_nothing_is_said() -> None:
    def by_values(m: Any, x: Tensor) -> Tensor:
        return m.a(x) + m.b(x) if bool(x.sum() > 0) else m.c(x)

    assert shared_inputs(Net(by_values), NAMES) == []
    assert shared_inputs(WithInput(by_values), NAMES) == [("a", "b")]
    unfit = WithInput(by_values)
    unfit.dummy_inputs = {"y": torch.ones(1)}
    assert shared_inputs(unfit, NAMES) == []
    assert not unfit.training


def test_decoders_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    for name in ("Llama", "Qwen2", "Gemma", "Qwen3"):
        config = getattr(transformers, f"{name}Config")(**sizes, pad_token_id=0)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        wanted = []
        for i in range(2):
            attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            wanted += [
                tuple(f"{attention}.{each}_proj" for each in "qkv"),
                (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
            ]
        assert shared_inputs(model, names) == wanted, name
