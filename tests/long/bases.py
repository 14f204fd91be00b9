"""The artifacts that tests/long/damaged_files.py damages: each kind of what a file can hold, all of them small.

They are of two models: the convolutional network of `campaign`, which a file names, so that `load` builds it; and a
decoder as transformers builds Llama, which `load` is given. Of schemes that nest there is a progressive file, too.
"""

import random
from pathlib import Path
from typing import Any, NamedTuple

import torch
from campaign import images, network, random_plan, seeded
from torch import Tensor, nn
from torch.nn import functional

from bitdial import BitPlan, QuantConfig, Rule, get_bits, prepare, repack, rotate, save
from bitdial.functional import scheme_of

WIDTH, VOCABULARY = 16, 24
NETWORK: list[dict[str, Any]] = [  # QuantConfigs that differ in what their files hold
    {},
    {"scheme": "nested"},
    {"scheme": "nested+8", "activations": "asymmetric"},
    {"scheme": "centred", "bit_choices": (6, 4, 3)},
    {"scheme": "truncate", "per_channel": False, "bit_choices": (7, 5)},
    {"scheme": "adabits", "activations": "signed"},
    {"scheme": "lsq", "bit_choices": (4, 2)},
    {"scheme": "dorefa", "activations": "float", "bit_choices": (8, 2)},
    {"ties": "up", "bit_choices": (3, 2), "keep_first_last": False},
    {"rules": (Rule(type="Linear", quantize=True, activations="dynamic"),)},
    {"group_size": 4},
    {"group_size": 4, "scheme": "nested", "bit_choices": (4, 2)},
    {"group_size": 4, "group_scales": "half", "bit_choices": (8, 3)},
    {"group_size": 2, "group_scales": "float", "activations": "float", "scheme": "nested", "bit_choices": (8, 4)},
]
TOKENS = Rule(type="Embedding", quantize=True), Rule(pattern="lm_head", quantize=True)
DECODER: list[tuple[dict[str, Any], dict[str, Any] | None]] = [  # a QuantConfig, and arguments of `rotate` or None
    ({"activations": "dynamic", "scheme": "nested"}, None),
    ({"activations": "dynamic", "group_size": 8, "scheme": "nested+8"}, {"down_block": 8}),
    ({"activations": "dynamic", "group_size": 4, "group_scales": "half"}, {"down_block": 4, "untie": True}),
    (
        {"activations": "float", "group_size": 8, "group_scales": "float", "scheme": "nested"},
        {"residual": "online", "down_block": 16},
    ),
    ({"activations": "signed", "rules": TOKENS, "bit_choices": (4, 2)}, {"values": False, "down_block": None}),
]


class Decoded(NamedTuple):
    """What a decoder gives."""

    logits: Tensor


class Attention(nn.Module):
    """Two heads of queries that read one of values."""

    head_dim = WIDTH // 2

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.q_proj(x).unflatten(-1, (2, -1)), self.k_proj(x), self.v_proj(x)
        scores = query.transpose(1, 2) @ key[:, None].transpose(2, 3)
        mixed = torch.softmax(scores, dim=-1) @ value[:, None]
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """As Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.down_proj = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and MLP, a norm in front of each."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.self_attn, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """A block between an embedding and a head that is tied to it."""

    def __init__(self) -> None:
        super().__init__()
        parts = {"embed_tokens": nn.Embedding(VOCABULARY, WIDTH), "layers": nn.ModuleList([Block()])}
        self.model = nn.ModuleDict({**parts, "norm": nn.RMSNorm(WIDTH)})
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = parts["embed_tokens"].weight

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Decoded:
        x = self.model["embed_tokens"](input_ids)
        for block in self.model["layers"]:
            x = block(x)
        return Decoded(self.lm_head(self.model["norm"](x)))


def decoder() -> nn.Module:
    """The float decoder."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Decoder().eval()


def tokens() -> Tensor:
    """Inputs of the decoder."""
    return torch.randint(VOCABULARY, (2, 5), generator=seeded(1))


class Base(NamedTuple):
    """A whole file, the model that `load` needs for it, and inputs."""

    data: bytes
    model: nn.Module | None
    inputs: Tensor


def make_bases(folder: Path) -> None:
    """Write the artifacts into `folder`."""
    for number, config in enumerate(NETWORK):
        _save(network(**config), QuantConfig(**config), folder / f"network-{number:02}.safetensors")
    for number, (config, turned) in enumerate(DECODER):
        model, settings = decoder(), QuantConfig(**{"start": "max", **config})
        model = model if turned is None else rotate(model, **turned)
        _save(prepare(model, settings, tokens()).eval(), settings, folder / f"decoder-{number:02}.safetensors")


def _save(model: nn.Module, config: QuantConfig, path: Path) -> None:
    plan = random_plan(get_bits(model), config.bit_choices, random.Random(path.name))
    plans = {"mixed": plan, "low": BitPlan({}, default=config.bit_choices[-1])}
    save(model, path, plans=plans, metrics={"accuracy": {"8": 0.5}})
    if scheme_of(config.scheme).nests:
        repack(path, path.with_name(f"{path.stem}-parts.safetensors"))


def read_bases(folder: Path) -> list[Base]:
    """What `make_bases` wrote, in the order of the names."""
    given = {"network": (None, images()), "decoder": (decoder(), tokens())}
    return [Base(path.read_bytes(), *given[path.stem[:7]]) for path in sorted(folder.glob("*-*.safetensors"))]
