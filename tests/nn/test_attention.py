"""Attention taken apart is nn.MultiheadAttention: outputs, weights and gradients, whatever it is asked."""

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial.nn.attention import Attention
from bitdial.nn.parts import Parts

WIDTH, HEADS, BATCH, QUERIES, KEYS = 8, 2, 3, 5, 4
LAYERS: list[dict[str, Any]] = [
    {},
    {"bias": False},
    {"batch_first": True},
    {"kdim": 6, "vdim": 7},
    {"kdim": 6, "vdim": 7, "bias": False, "batch_first": True},
    {"add_bias_kv": True},
    {"add_zero_attn": True, "batch_first": True},
    {"add_bias_kv": True, "add_zero_attn": True},
]


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def inputs(layer: nn.MultiheadAttention, batched: bool) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (QUERIES, WIDTH), (KEYS, layer.kdim), (KEYS, layer.vdim)
    if not batched:
        q, k, v = (randn(*shape) for shape in shapes)
    elif layer.batch_first:
        q, k, v = (randn(BATCH, *shape) for shape in shapes)
    else:
        q, k, v = (randn(length, BATCH, width) for length, width in shapes)
    return q, k, v


def calls(batched: bool) -> Iterator[dict[str, Any]]:
    """Masks of both kinds and all shapes, with and without weights."""
    hidden = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    hidden[1, 2:] = True
    hidden = hidden if batched else hidden[1]
    seen = randn(QUERIES, KEYS) > 1
    seen[:, 0] = False
    each = seen.expand(HEADS * (BATCH if batched else 1), -1, -1)
    causal = torch.triu(torch.full((QUERIES, KEYS), -torch.inf), diagonal=1)
    for weights in ({"need_weights": False}, {}, {"average_attn_weights": False}):
        yield weights
        for padding, mask in itertools.product((None, hidden), (None, seen, each)):
            yield {**weights, "key_padding_mask": padding, "attn_mask": mask}
        yield {**weights, "attn_mask": randn(QUERIES, KEYS), "key_padding_mask": hidden * -2.0}
        yield {**weights, "attn_mask": causal, "is_causal": True}
        yield {**weights, "attn_mask": causal, "is_causal": True, "key_padding_mask": hidden * -3.0}


def test_outputs_weights_and_gradients_are_those_of_pytorch() -> None:
    for arguments, batched in itertools.product(LAYERS, (True, False)):
        torch.manual_seed(0)
        layer = nn.MultiheadAttention(WIDTH, HEADS, **arguments)
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.5)
        apart = Attention(copy.deepcopy(layer), Parts())
        for asked in calls(batched):
            given = [x.requires_grad_() for x in inputs(layer, batched)]
            again = [x.detach().clone().requires_grad_() for x in given]
            expected, found = layer(*given, **asked), apart(*again, **asked)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=str((arguments, asked.keys())))
            layer.zero_grad()
            apart.zero_grad()
            expected[0].square().sum().backward()
            found[0].square().sum().backward()
            for mine, theirs in zip(again, given, strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
            bias = apart.q_proj.bias, apart.k_proj.bias, apart.v_proj.bias
            if layer.in_proj_bias is not None:
                torch.testing.assert_close(
                    torch.cat([b.grad for b in bias]), layer.in_proj_bias.grad, rtol=1e-4, atol=1e-4
                )
            if layer.bias_k is not None:
                torch.testing.assert_close(apart.bias_k.grad, layer.bias_k.grad, rtol=1e-4, atol=1e-4)


def test_in_double_precision_they_are_the_same_to_the_last_digits() -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS).double()
    x = inputs(layer, batched=True)[0].double()
    found, expected = Attention(copy.deepcopy(layer), Parts())(x, x, x), layer(x, x, x)
    torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-14)


def test_dropout_is_that_of_the_weights() -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.5)
    apart = Attention(copy.deepcopy(layer), Parts())
    x = inputs(layer, batched=True)[0]
    torch.manual_seed(1)
    expected = layer(x, x, x)
    torch.manual_seed(1)
    torch.testing.assert_close(apart(x, x, x), expected)
    assert not torch.equal(apart(x, x, x)[0], apart(x, x, x)[0])
    assert torch.equal(apart.eval()(x, x, x)[0], apart(x, x, x)[0])


def test_what_it_cannot_give_is_an_error_that_says_so() -> None:
    apart = Attention(nn.MultiheadAttention(WIDTH, HEADS), Parts())
    x = randn(QUERIES, BATCH, WIDTH)
    with pytest.raises(AttributeError, match="no 'in_proj_weight': its weights are those of its layers q_proj"):
        _ = apart.in_proj_weight
    with pytest.raises(RuntimeError, match="is_causal says what attn_mask is"):
        apart(x, x, x, is_causal=True)
    with pytest.raises(TypeError, match=r"attn_mask is torch\.int64"):
        apart(x, x, x, attn_mask=torch.zeros(QUERIES, QUERIES, dtype=torch.int64))
