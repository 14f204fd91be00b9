"""A small pre-norm transformer that classifies token sequences, built from ``nn.Linear`` layers.

Query, key, value and output projections are separate linears, so each one is a layer of its own
to a quantizer and to a bit plan.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from bitdial.errors import ConfigError


class Attention(nn.Module):
    """Multi-head self-attention: ``proj(softmax(q k^T / sqrt(d)) v)``, every token sees every."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, L, width) to (N, L, width)."""
        q, k, v = (self._split_heads(layer(x)) for layer in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v)  # (N, heads, L, width / heads)
        return self.proj(mixed.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        """Return (N, L, width) as (N, heads, L, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class Mlp(nn.Module):
    """Two linears with a GELU between; the hidden width is four times the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU()
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, L, width) to (N, L, width)."""
        return self.fc2(self.gelu(self.fc1(x)))


class Block(nn.Module):
    """Pre-norm block: ``x = x + attention(norm1(x))``, then ``x + mlp(norm2(x))``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, L, width) to (N, L, width)."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Token and position embeddings, blocks, a last norm, the mean over tokens, one linear."""

    def __init__(
        self,
        *,
        vocab: int,
        width: int,
        depth: int,
        heads: int,
        num_classes: int,
        max_length: int,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(
                f"width={width} does not divide into heads={heads}; choose a width that is a multiple of heads"
            )
        self.max_length = max_length
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(max_length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token numbers (N, L), L <= max_length, to logits (N, num_classes)."""
        length = tokens.shape[1]
        if length > self.max_length:
            raise ConfigError(
                f"a sequence of {length} tokens exceeds max_length={self.max_length}; "
                "truncate it or build the model with a larger max_length"
            )
        x = self.tokens(tokens) + self.positions.weight[:length]
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


def tiny_transformer(
    *,
    vocab: int = 256,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    num_classes: int = 2,
    max_length: int = 64,
) -> nn.Module:
    """Return a transformer classifier: 120,706 parameters at the default arguments."""
    return Transformer(
        vocab=vocab,
        width=width,
        depth=depth,
        heads=heads,
        num_classes=num_classes,
        max_length=max_length,
    )
