"""nn.MultiheadAttention taken apart: three plain Linear layers in front of the product, one behind it."""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.nn.parts import Parts

# What models read of nn.MultiheadAttention beside its weights.
SETTINGS = (
    "embed_dim",
    "kdim",
    "vdim",
    "num_heads",
    "head_dim",
    "dropout",
    "batch_first",
    "add_zero_attn",
    "_qkv_same_embed_dim",
)
WEIGHTS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")  # gone: its layers have them
# Where operands of the two products can be quantised, and how: queries, keys, values, probabilities.
SITES = {"quant_q": "signed", "quant_k": "signed", "quant_v": "signed", "quant_p": "unsigned"}
STATE = r"in_proj_weight|in_proj_bias|[qkv]_proj_weight|bias_[kv]|out_proj\.(weight|bias)"


class Attention(nn.Module):
    """What nn.MultiheadAttention computes, by layers that can be quantised: q_proj, k_proj, v_proj and out_proj.

    Three layers and not one, so that attention of any sort is the same: queries, keys and values may come from
    different inputs, and be of different sizes. Each has activation scales and bits of its own. Inputs, masks and
    results are those of nn.MultiheadAttention.

    The products of queries with keys, and of probabilities with values, are float products. `quantize_products` puts
    quantizers in front of them; the weights that a call returns are then the quantised probabilities.
    """

    in_proj_bias = None  # PyTorch's encoders look for it; None keeps them from their fast path
    embed_dim: int
    num_heads: int
    head_dim: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    quant_q: nn.Module | None
    quant_k: nn.Module | None
    quant_v: nn.Module | None
    quant_p: nn.Module | None

    def __init__(self, attention: nn.MultiheadAttention, parts: Parts):
        super().__init__()
        for key in SETTINGS:
            setattr(self, key, getattr(attention, key))
        whole, bias = attention.in_proj_weight, attention.in_proj_bias
        for place, name in enumerate("qkv"):
            own = getattr(attention, f"{name}_proj_weight") if whole is None else parts.third(whole, place)
            setattr(self, f"{name}_proj", linear(own, None if bias is None else parts.third(bias, place)))
        self.out_proj = attention.out_proj
        self.bias_k, self.bias_v = attention.bias_k, attention.bias_v
        for site in SITES:
            self.register_module(site, None)

    def quantize_products(self, sites: Mapping[str, nn.Module]) -> None:
        """Let `sites`, by the names of SITES, quantise the operands of both products."""
        for name in SITES:
            setattr(self, name, sites[name])

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As nn.MultiheadAttention's: (output, weights or None)."""
        batched = query.dim() == 3
        batch_first = self.batch_first or not batched
        if is_causal and attn_mask is None:
            raise RuntimeError("is_causal says what attn_mask is, so there must be one")
        explicit = need_weights or self.quant_p is not None  # PyTorch's kernel does not show the probabilities
        causal = is_causal and key_padding_mask is None and not explicit
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)
        if not batched:
            q, k, v = q[None], k[None], v[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        q, k, v = (self._heads(x, batch_first) for x in (q, k, v))
        mask = None if causal else self._mask(attn_mask, key_padding_mask, q)
        k, v, mask = self._extended(k, v, mask)
        dropout = self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if explicit:
            y, weights = self._products(q, k, v, mask, dropout)
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
        y = self.out_proj((y.transpose(1, 2) if batch_first else y.permute(2, 0, 1, 3)).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=1)
        if not batched:
            y, weights = y[0], None if weights is None else weights[0]
        return y, weights if need_weights else None

    def _products(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> tuple[Tensor, Tensor]:
        """Both products, and the probabilities as the second one takes them."""
        k = k.transpose(-2, -1)  # before it is quantised: behind a quantizer, onnxruntime's own fusions fail on it
        if self.quant_q is not None and self.quant_k is not None and self.quant_v is not None:
            q, k, v = self.quant_q(q), self.quant_k(k), self.quant_v(v)
        scores = (q * math.sqrt(1.0 / self.head_dim)) @ k
        weights = torch.softmax(scores if mask is None else scores + mask, dim=-1)
        if self.quant_p is not None:
            weights = self.quant_p(weights)
        weights = F.dropout(weights, dropout) if dropout else weights
        return weights @ v, weights

    def _heads(self, x: Tensor, batch_first: bool) -> Tensor:
        """(batch, length, width), or (length, batch, width), to (batch, heads, length, width of a head)."""
        x = x.unflatten(-1, (self.num_heads, self.head_dim))
        return x.transpose(1, 2) if batch_first else x.permute(1, 2, 0, 3)

    def _mask(self, attn_mask: Tensor | None, padding: Tensor | None, q: Tensor) -> Tensor | None:
        """Both masks in one, to be added to scores (batch, heads, queries, keys)."""
        mask = _added(attn_mask, q, "attn_mask")
        if mask is not None:
            mask = mask if mask.dim() == 2 else mask.unflatten(0, (-1, self.num_heads))
        if padding is None:
            return mask
        hidden = _added(padding, q, "key_padding_mask")
        assert hidden is not None
        hidden = hidden[:, None, None]
        return hidden if mask is None else mask + hidden

    def _extended(self, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values with those that the layer adds: learned ones (add_bias_kv) and zeros (add_zero_attn)."""
        batch = k.shape[0]
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (
                torch.cat([x, self._heads(bias, batch_first=True).expand(batch, -1, -1, -1)], dim=2)
                for x, bias in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        if mask is not None and (more := (self.bias_k is not None) + self.add_zero_attn):
            mask = F.pad(mask, (0, more))
        return k, v, mask

    def __getattr__(self, name: str) -> Any:
        return _refuse(name) if name in WEIGHTS else super().__getattr__(name)

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, heads={self.num_heads}, batch_first={self.batch_first}"


def _refuse(name: str) -> NoReturn:
    raise AttributeError(
        f"an attention that bitdial has taken apart has no {name!r}: its weights are those of its layers q_proj, "
        "k_proj, v_proj and out_proj; call the attention itself"
    )


def _added(mask: Tensor | None, like: Tensor, name: str) -> Tensor | None:
    """`mask` as numbers to add: where it is True, minus infinity."""
    if mask is None or mask.is_floating_point():
        return mask
    if mask.dtype != torch.bool:
        raise TypeError(f"{name} is {mask.dtype}; give a mask of bool, True where nothing may be seen, or of floats")
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill_(mask, -math.inf)


def linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """A Linear layer that has these parameters."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = weight
    if bias is not None:
        made.bias = bias
    return made
