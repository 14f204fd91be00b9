"""rotate(model): a decoder of transformers that computes the same, with weights and activations that quantise better.

A few hidden channels of a language model are far larger than the rest, and a scale for all of them leaves the rest few
levels. A rotation Q spreads every channel over all others. It cancels out in float: (x Q)(W Q)^T = x W^T. Where:

    residual   "merged": the stream x of hidden states between the blocks. Each norm divides x by its length, which Q
               does not change; its gain moves into the layers that read it first. Layers that read x become W Q, those
               that add to it Q^T W. Nothing is left to compute at run time.
               "online": what each norm gives, gain and all, by a product behind it. A gain often makes small
               what is large in x; moved into the weights it no longer does, so this is better at few bits.
    values     the values of each head, between v_proj and o_proj. Nothing is left here either.
    down_proj  its input is a product, which no weight in front of it can rotate: a block Hadamard runs in front of it.

If the embedding is tied to the head, neither can take Q up: the head's gain would have to be in one and not in the
other. So x is turned behind the embedding and turned back in front of the last norm, two small products a token.
"""

import logging
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from bitdial.dial.dial import copy_unwrapped, unwrap
from bitdial.errors import ConfigError
from bitdial.functional.rotation import across, half_power, largest_block, turn, walsh_hadamard
from bitdial.nn.own_dtypes import widen
from bitdial.nn.rotation import (
    HADAMARD,
    RESIDUAL,
    ROTATION,
    TURN,
    TURN_BACK,
    RotationRecord,
    is_rotated,
    untie_weight,
    with_rotation,
)
from bitdial.nn.swap import swap_modules
from bitdial.prepare.copies import check_initialised, check_plain
from bitdial.prepare.model_call import evaluating

log = logging.getLogger(__name__)

HEAD = "lm_head"
BLOCK = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}  # the modules of a block that is rotated
MLP_NORM = "pre_feedforward_layernorm"  # what Gemma2 calls the norm in front of the MLP
SAME = 1e-2  # of the logits' length: what is more than this is no rounding, even of TF32 products
PROBE = 16  # tokens to compare logits on


class _Block(NamedTuple):
    """The layers of a decoder block, and the width of a head."""

    norms: tuple[nn.Module, nn.Module]  # in front of the attention, of the MLP
    reads: tuple[tuple[nn.Linear, ...], tuple[nn.Linear, ...]]  # what each of them feeds
    value: nn.Linear
    out: nn.Linear
    down: nn.Linear
    head_width: int


class _Decoder(NamedTuple):
    embedding: nn.Embedding
    blocks: list[_Block]
    norm: nn.Module
    head: nn.Linear

    @property
    def tied(self) -> bool:
        return self.head.weight is self.embedding.weight


def rotate(
    model: nn.Module,
    *,
    residual: str | None = "merged",
    values: bool = True,
    down_block: int | None = 64,
    untie: bool = False,
    seed: int = 0,
) -> nn.Module:
    """A copy of `model`, a decoder of transformers, that computes the same and quantises better; give it to `prepare`.

    For models built as Llama is (Llama, SmolLM2, Mistral, Qwen2, Qwen3, Gemma). Logits are unchanged up to rounding:
    the copy is run beside `model` on a few tokens, and anything else is refused. It is a copy, as that of `prepare`
    is, so that a refusal changes nothing; it is in float32, or in float64 if `model` is.

    residual    "merged": rotate the stream of hidden states, after folding the norms' gains into the layers behind
                them. "online": rotate what the norms give, as the model runs; better at few bits. None: neither
    values      rotate the values of each attention head
    down_block  block size of the Hadamard that runs in front of each `down_proj`, a power of two; None leaves it out
    untie       give a head that is tied to the embedding a weight of its own. Then nothing runs at the ends, and the
                file stores both. By default the tie is kept, and two small products run for each token
    seed        of the random signs
    """
    given = unwrap(model)
    _check(given, down_block, seed)
    if residual not in RESIDUAL:
        raise ConfigError(f"residual={residual!r} is not 'merged', 'online' or None")
    if residual is None and not values and down_block is None:
        raise ConfigError("nothing is left to rotate: residual and down_block are None, values is False")
    made = copy_unwrapped(given)
    if any(p.dtype != torch.float64 for p in made.parameters() if p.is_floating_point()):
        widen(made)
    decoder = _decoder(made, residual=residual)
    generator = torch.Generator().manual_seed(seed)
    untied = untie and decoder.tied
    with torch.no_grad(), evaluating(made):
        tokens = _probe(decoder.embedding)
        before = _logits(made, tokens)
        if untied:
            untie_weight(made, HEAD)
        new = _rotate_residual(decoder, generator) if residual == "merged" else {}
        if residual == "online":
            new = _rotate_norms(decoder, generator)
        if values:
            for block in decoder.blocks:
                _rotate_values(block, generator)
        if down_block is not None:
            for i, block in enumerate(decoder.blocks):
                new[block.down] = _rotate_down(f"block {i}", block.down, down_block)
        swap_modules(made, new)
        _check_same(before, _logits(made, tokens))
    for module in new.values():
        module.train(cast(nn.Module, module.layer).training)
    record = RotationRecord(seed, residual, values, (HEAD,) if untied else ())
    setattr(made, ROTATION, record)
    return made


def _check(model: nn.Module, down_block: int | None, seed: int) -> None:
    check_plain(model)
    if is_rotated(model):
        raise ConfigError("the model is rotated already; rotate a plain one")
    if any(hasattr(module, "select_bits") for module in model.modules()):
        raise ConfigError("the model is prepared already; rotate the float model, then prepare it")
    check_initialised(model)
    if any(p.is_meta for p in model.parameters()):
        raise ConfigError("the model is on the meta device, without weights to rotate")
    if down_block is not None and (type(down_block) is not int or down_block < 2 or down_block & (down_block - 1)):
        raise ConfigError(f"down_block={down_block!r} is not a power of two from 2 on; give 64, or None for none")
    if type(seed) is not int or not 0 <= seed < 1 << 63:
        raise ConfigError(f"seed={seed!r} is not a whole number from 0 on")


# --- what the model is made of --------------------------------------------------------------------


def _decoder(model: nn.Module, *, residual: str | None) -> _Decoder:
    """The parts of a Llama-like decoder; ConfigError, naming what is missing or too much, for any other model."""
    base, head = model._modules.get("model"), model._modules.get(HEAD)
    if base is None or type(head) is not nn.Linear:
        raise ConfigError(
            f"a {type(model).__name__} is no decoder with an 'lm_head' as transformers builds it (LlamaForCausalLM and "
            "the like), which is what rotate() knows"
        )
    embedding, layers, norm = (_part(base, "model", name) for name in ("embed_tokens", "layers", "norm"))
    if not isinstance(embedding, nn.Embedding):
        raise ConfigError(f"'model.embed_tokens' is a {type(embedding).__name__}; rotate() knows nn.Embedding there")
    blocks = [_block(f"model.layers.{i}", layer, residual) for i, layer in enumerate(layers.children())]
    return _Decoder(embedding, blocks, norm, head)


def _block(name: str, block: nn.Module, residual: str | None) -> _Block:
    attention, mlp = _part(block, name, "self_attn"), _part(block, name, "mlp")
    more = sorted(key for key, child in block.named_children() if key not in BLOCK and [*child.parameters()])
    if residual == "merged" and more:
        raise ConfigError(
            f"{name!r} has a {more[0]!r}, and rotate() knows blocks of {', '.join(sorted(BLOCK))}. A norm behind a "
            "layer, as Gemma2 has it, cannot let the rotation through: use rotate(model, residual='online')"
        )
    before_mlp = MLP_NORM if MLP_NORM in more else "post_attention_layernorm"
    norms = [_part(block, name, key) for key in ("input_layernorm", before_mlp)] if residual else []
    named = ((attention, "self_attn", "q_proj k_proj v_proj o_proj"), (mlp, "mlp", "gate_proj up_proj down_proj"))
    query, key, value, out, gate, up, down = (
        _linear(part, f"{name}.{inside}", layer) for part, inside, layers in named for layer in layers.split()
    )
    width: Any = getattr(attention, "head_dim", None)
    if type(width) is not int or width < 1 or value.out_features % width or out.in_features % value.out_features:
        raise ConfigError(f"'{name}.self_attn' has head_dim={width!r}, which does not divide its values into heads")
    return _Block(tuple(norms), ((query, key, value), (gate, up)), value, out, down, width)  # type: ignore[arg-type]


def _part(module: nn.Module, name: str, part: str) -> nn.Module:
    found = module._modules.get(part)
    if found is None:
        raise ConfigError(f"{name!r}, a {type(module).__name__}, has no {part!r}; rotate() knows models like Llama")
    return found


def _linear(module: nn.Module, name: str, part: str) -> nn.Linear:
    found = _part(module, name, part)
    if type(found) is not nn.Linear:
        raise ConfigError(f"'{name}.{part}' is a {type(found).__name__}; rotate() knows nn.Linear there")
    return found


# --- changing weights, in place -------------------------------------------------------------------


def _rotate_residual(decoder: _Decoder, generator: torch.Generator) -> dict[nn.Module, nn.Module]:
    """Fold gains and rotate the stream; the modules that take the place of others."""
    width = decoder.embedding.embedding_dim
    signs, matrix = _signs((width,), generator), across(width)
    for block in decoder.blocks:
        for norm, layers in zip(block.norms, block.reads, strict=True):
            gain = _take_gain(norm)
            for layer in layers:
                _set(layer.weight, turn(_wide(layer.weight) * gain, *_on(layer.weight, signs, matrix)))
        for layer in (block.out, block.down):
            _set(layer.weight, turn(_wide(layer.weight).T, *_on(layer.weight, signs, matrix)).T)
            if layer.bias is not None:
                _set(layer.bias, turn(_wide(layer.bias), *_on(layer.bias, signs, matrix)))
    if decoder.tied:
        return {
            decoder.embedding: with_rotation(decoder.embedding, TURN, width, signs),
            decoder.norm: with_rotation(decoder.norm, TURN_BACK, width, signs),
        }
    embedding, head = decoder.embedding.weight, decoder.head.weight
    _set(embedding, turn(_wide(embedding), *_on(embedding, signs, matrix)))
    _set(head, turn(_wide(head) * _take_gain(decoder.norm), *_on(head, signs, matrix)))
    return {}


def _rotate_norms(decoder: _Decoder, generator: torch.Generator) -> dict[nn.Module, nn.Module]:
    """Rotate what the norms of the blocks give; the modules that take their place."""
    width = decoder.embedding.embedding_dim
    signs, matrix = _signs((width,), generator), across(width)
    new: dict[nn.Module, nn.Module] = {}
    for block in decoder.blocks:
        for norm, layers in zip(block.norms, block.reads, strict=True):
            for layer in layers:
                _set(layer.weight, turn(_wide(layer.weight), *_on(layer.weight, signs, matrix)))
            new[norm] = with_rotation(norm, TURN, width, signs)
    return new


def _rotate_values(block: _Block, generator: torch.Generator) -> None:
    """Rotate the values of each head: several heads of queries read one of values."""
    value, out, width = block.value, block.out, block.head_width
    heads = value.out_features // width
    signs, matrix = _on(value.weight, _signs((heads, width), generator), across(width))
    rows = _wide(value.weight).unflatten(0, (heads, width)).transpose(1, 2)  # (heads, inputs, width)
    _set(value.weight, turn(rows, signs[:, None], matrix).transpose(1, 2).flatten(0, 1))
    if value.bias is not None:
        _set(value.bias, turn(_wide(value.bias).unflatten(0, (heads, width)), signs, matrix).flatten())
    signs, matrix = _on(out.weight, signs, matrix)
    columns = _wide(out.weight).unflatten(1, (heads, -1, width))  # (outputs, heads, queries of a head, width)
    _set(out.weight, turn(columns, signs[:, None], matrix).flatten(1))


def _rotate_down(name: str, down: nn.Linear, size: int) -> nn.Module:
    """Rotate the weight of `down` for the Hadamard in front of it; the module with both."""
    if down.in_features % size:
        raise ConfigError(
            f"{name}: down_proj has {down.in_features} inputs, no multiple of down_block={size}; the largest block "
            f"that fits is {largest_block(down.in_features)}, and None leaves it out"
        )
    _set(down.weight, walsh_hadamard(_wide(down.weight), size) / (size * half_power(size)))
    return with_rotation(down, HADAMARD, size)


def _take_gain(norm: nn.Module) -> Tensor:
    """The gain of `norm`, float64, which has none afterwards: its weight, or 1 + its weight as in Gemma."""
    weight = norm._parameters.get("weight")
    if weight is None or weight.dim() != 1 or len([*norm.parameters()]) != 1:
        raise ConfigError(
            f"a {type(norm).__name__} has tensors beside a gain for each channel; rotate() knows RMS norms"
        )
    found = norm(torch.ones_like(weight))  # of length 1, so what comes out is the gain
    for added in (0.0, 1.0):
        if torch.allclose(found, weight + added, rtol=1e-3, atol=1e-3):
            gain = _wide(weight) + added
            weight.fill_(1.0 - added)
            return gain
    raise ConfigError(f"a {type(norm).__name__} is no RMS norm, whose gain is its weight or 1 + its weight")


def _signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).double() * 2 - 1


def _wide(weight: Tensor) -> Tensor:
    return weight.detach().double()


def _on(weight: Tensor, signs: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    return signs.to(weight.device), matrix.to(weight.device)


def _set(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value)


# --- the same logits ------------------------------------------------------------------------------


def _probe(embedding: nn.Embedding) -> Tensor:
    """Some tokens from all over the vocabulary (1, PROBE)."""
    places = torch.linspace(0, embedding.num_embeddings - 1, PROBE, dtype=torch.float64).long()
    return places[None].to(embedding.weight.device)


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    return cast(Tensor, cast(Any, model)(input_ids=tokens, use_cache=False).logits)


def _check_same(before: Tensor, after: Tensor) -> None:
    difference = float((after - before).norm() / before.norm().clamp(min=1e-30))
    log.info("rotated: logits differ by %.2g of their length", difference)
    if not difference < SAME:
        raise ConfigError(
            f"the rotated copy gives other logits (by {difference:.2g} of their length): the model computes something "
            "between its layers that rotate() does not know. Try rotate(model, residual='online')"
        )
