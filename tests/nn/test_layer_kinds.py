"""The table of layer kinds: rows are output channels, products are those of PyTorch, multiply-adds those it counts."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from bitdial.nn import KIND_OF, KINDS, QUANTIZED, LayerKind, WeightQuantizer, kind_of, nearest_kind
from bitdial.nn.recurrent import RecurrentWeight

GENERATOR = torch.Generator().manual_seed(0)
# Arguments of the constructor, and the shape of an input without the batch.
CASES: dict[str, list[tuple[dict[str, Any], tuple[int, ...]]]] = {
    "Conv2d": [
        ({"in_channels": 4, "out_channels": 6, "kernel_size": (3, 2), "stride": (2, 1), "dilation": 2}, (4, 9, 8)),
        ({"in_channels": 4, "out_channels": 6, "kernel_size": 3, "groups": 2, "padding": "same"}, (4, 5, 6)),
        ({"in_channels": 4, "out_channels": 4, "kernel_size": 3, "groups": 4, "bias": False}, (4, 5, 6)),
        (
            {"in_channels": 2, "out_channels": 3, "kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
            (2, 5, 6),
        ),
    ],
    "ConvTranspose2d": [
        ({"in_channels": 4, "out_channels": 6, "kernel_size": (3, 2)}, (4, 5, 4)),
        ({"in_channels": 4, "out_channels": 6, "kernel_size": 3, "stride": 2, "output_padding": 1}, (4, 3, 4)),
        (
            {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "groups": 2, "padding": 1, "dilation": (1, 2)},
            (4, 4, 5),
        ),
        (
            {"in_channels": 6, "out_channels": 6, "kernel_size": 2, "groups": 6, "stride": (2, 3), "bias": False},
            (6, 3, 2),
        ),
        ({"in_channels": 6, "out_channels": 9, "kernel_size": 1, "groups": 3}, (6, 3, 2)),
    ],
    "Conv1d": [
        ({"in_channels": 4, "out_channels": 6, "kernel_size": 3, "stride": 2, "dilation": 2, "padding": 1}, (4, 9)),
        ({"in_channels": 4, "out_channels": 6, "kernel_size": 3, "groups": 2, "padding": "same"}, (4, 5)),
        ({"in_channels": 2, "out_channels": 3, "kernel_size": 3, "padding": 2, "padding_mode": "circular"}, (2, 5)),
    ],
    "Conv3d": [
        ({"in_channels": 2, "out_channels": 3, "kernel_size": (1, 2, 3), "stride": 2, "bias": False}, (2, 3, 4, 5)),
        ({"in_channels": 4, "out_channels": 4, "kernel_size": 2, "groups": 4, "padding": 1}, (4, 2, 3, 3)),
    ],
    "Linear": [
        ({"in_features": 5, "out_features": 3}, (5,)),
        ({"in_features": 5, "out_features": 3, "bias": False}, (7, 5)),
    ],
}
# What takes indices has no products; its tests are at the end.
GATHERING: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    ({"num_embeddings": 7, "embedding_dim": 4}, (3,)),
    ({"num_embeddings": 5, "embedding_dim": 3, "padding_idx": 2, "scale_grad_by_freq": True}, (2, 3)),
]
EVERY = [(KINDS[name], *case) for name, cases in CASES.items() for case in cases]


def input_of(kind: LayerKind, layer: Any, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(2, *shape, generator=GENERATOR)


def test_the_tables_know_the_same_kinds() -> None:
    assert set(KINDS) == {*CASES, "Embedding", "RecurrentWeight"}
    assert set(QUANTIZED) == set(KINDS.values()) == set(KIND_OF.values())
    for kind, layer in QUANTIZED.items():
        assert issubclass(layer, kind.module), kind.name
        assert kind.name == kind.module.__name__


def test_products_are_those_of_the_float_layer() -> None:
    for kind, arguments, shape in EVERY:
        layer: Any = kind.module(**arguments)
        x = input_of(kind, layer, shape)
        found = kind.product(layer, x, layer.weight, getattr(layer, "bias", None))
        assert torch.equal(found, layer(x)), (kind.name, arguments)


def test_arguments_give_another_layer_of_the_same_shape() -> None:
    for kind, arguments, shape in EVERY:
        layer: Any = kind.module(**arguments)
        other: Any = kind.module(**kind.arguments(layer))
        other.load_state_dict(layer.state_dict())
        x = input_of(kind, layer, shape)
        assert torch.equal(other(x), layer(x)), (kind.name, arguments)


def test_rows_are_the_weights_of_the_output_channels() -> None:
    """Only output channel c depends on row c; and rows have the order of the inputs within them."""
    for kind, arguments, shape in EVERY:
        layer: Any = kind.module(**{**arguments, "bias": False} if kind.has_bias else arguments)
        weight = layer.weight.detach()
        rows = kind.to_rows(layer, weight)
        assert rows.dim() == kind.weight_dims
        assert torch.equal(kind.from_rows(layer, rows), weight)
        x = input_of(kind, layer, shape)
        channel = -1 - kind.image_dims
        full = layer(x).movedim(channel, 0)
        assert len(full) == len(rows)
        for c in range(len(rows)):
            alone = torch.zeros_like(rows)
            alone[c] = rows[c]
            y = kind.product(layer, x, kind.from_rows(layer, alone), None).movedim(channel, 0)
            torch.testing.assert_close(y[c], full[c])
            assert not y[:c].any()
            assert not y[c + 1 :].any()


def test_inputs_of_a_row_are_in_order() -> None:
    """Input i of row c is channel i of those that its group reads."""
    for kind, arguments, shape in EVERY:
        layer: Any = kind.module(**{**arguments, "bias": False} if kind.has_bias else arguments)
        rows = kind.to_rows(layer, layer.weight.detach())
        groups = getattr(layer, "groups", 1)
        x = input_of(kind, layer, shape)
        of_input, of_output = (-1 - kind.image_dims,) * 2
        for i in range(rows.shape[1]):
            only = torch.zeros_like(rows)
            only[:, i] = rows[:, i]
            y = kind.product(layer, x, kind.from_rows(layer, only), None)
            silenced = x.clone().movedim(of_input, 0)
            silenced[[c for c in range(len(silenced)) if c % (len(silenced) // groups) != i]] = 0
            expected = layer(silenced.movedim(0, of_input))
            torch.testing.assert_close(y.movedim(of_output, 0), expected.movedim(of_output, 0))


def test_multiply_adds_are_those_that_torch_counts() -> None:
    for kind, arguments, shape in EVERY:
        layer: Any = kind.module(**{**arguments, "bias": False} if kind.has_bias else arguments)
        x = input_of(kind, layer, shape)
        with FlopCounterMode(display=False) as counter:
            out = layer(x)
        assert 2 * kind.multiply_adds(layer, x, out) == counter.get_total_flops(), (kind.name, arguments)


def test_values_over_channels_broadcast_over_the_output() -> None:
    for kind, arguments, shape in EVERY:
        layer: Any = kind.module(**arguments)
        out = layer(input_of(kind, layer, shape))
        rows = len(kind.to_rows(layer, layer.weight))
        values = torch.arange(1.0, rows + 1)
        spread = torch.ones_like(out) * kind.over_channels(values)
        assert torch.equal(spread.movedim(-1 - kind.image_dims, 0).reshape(rows, -1)[:, 0], values)
        assert kind.is_batch(torch.zeros(2, *shape))


class Derived(nn.Linear):
    pass


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class DoubledOnce(Doubled):
    pass


def test_a_derived_class_is_of_the_kind_that_it_is_derived_from_unless_it_computes_something_else() -> None:
    cases = [(nn.Linear(2, 2), True), (Derived(2, 2), True), (Doubled(2, 2), False), (DoubledOnce(2, 2), False)]
    for layer, same in cases:
        assert kind_of(layer) is (KINDS["Linear"] if same else None), layer
        assert nearest_kind(layer) is KINDS["Linear"]
    assert kind_of(nn.ReLU()) is None
    assert nearest_kind(nn.ReLU()) is None
    patched = nn.Linear(2, 2)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    assert kind_of(patched) is None


def test_a_recurrent_weight_gives_itself_and_is_multiplied_at_each_step() -> None:
    kind = KINDS["RecurrentWeight"]
    layer = RecurrentWeight(6, 4)
    x = torch.zeros(5, 3, 2)
    assert kind.product(layer, x, layer.weight, None) is layer(x)
    assert kind.multiply_adds(layer, x, layer(x)) == 5 * 3 * 6 * 4
    assert [name for name, each in KINDS.items() if not each.multiplies] == ["Embedding", "RecurrentWeight"]


# --- Embedding ----------------------------------------------------------------------------------


def test_an_embedding_picks_rows_and_multiplies_nothing() -> None:
    kind = KINDS["Embedding"]
    assert kind.gathers
    for arguments, shape in GATHERING:
        layer = nn.Embedding(**arguments)
        x = torch.randint(0, layer.num_embeddings, shape, generator=GENERATOR)
        assert kind.to_rows(layer, layer.weight) is layer.weight
        assert torch.equal(kind.product(layer, x, layer.weight, None), layer(x))
        assert kind.multiply_adds(layer, x, layer(x)) == 0
        other: Any = kind.module(**kind.arguments(layer))
        assert (other.padding_idx, other.scale_grad_by_freq) == (layer.padding_idx, layer.scale_grad_by_freq)
        assert other.weight.shape == layer.weight.shape
    assert [name for name, each in KINDS.items() if each.gathers] == ["Embedding"]


def test_gradients_of_a_quantised_embedding_are_those_of_the_float_one() -> None:
    """Straight-through at a fine width: repeated indices add up, by frequency where asked, and padding stays still."""
    for arguments, _ in GATHERING:
        layer = nn.Embedding(**arguments)
        x = torch.tensor([[1, 2, 1], [4, 1, 2]])
        scale = layer.weight.detach().abs().amax(dim=1).clamp_min(1e-3) / 100
        quantizer = WeightQuantizer(
            {8: scale}, bit_choices=(8,), scheme="double_rounding", ties="even", scale_shape=(len(scale),)
        )
        quantised = QUANTIZED[KINDS["Embedding"]].from_float(layer, quantizer, None)
        factors = torch.randn(2, 3, layer.embedding_dim, generator=GENERATOR)
        (quantised(x) * factors).sum().backward()
        found, layer.weight.grad = layer.weight.grad, None
        (layer(x) * factors).sum().backward()
        assert torch.equal(found, layer.weight.grad)
        assert quantizer.scale.grad.shape == scale.shape
        assert not quantizer.scale.grad[[0, 3]].any()  # not looked up
        if layer.padding_idx is not None:
            assert not found[layer.padding_idx].any()
            assert quantizer.scale.grad[layer.padding_idx] == 0


def test_what_cannot_be_right_has_a_reason() -> None:
    reason = KINDS["Embedding"].unsupported_reason
    assert reason(nn.Embedding(3, 2, padding_idx=0, scale_grad_by_freq=True)) is None
    assert "max_norm=1.5" in str(reason(nn.Embedding(3, 2, max_norm=1.5)))
    assert "sparse" in str(reason(nn.Embedding(3, 2, sparse=True)))
    for name in CASES:
        arguments = CASES[name][0][0]
        assert KINDS[name].unsupported_reason(KINDS[name].module(**arguments)) is None
