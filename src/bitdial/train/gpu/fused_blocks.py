"""Blocks of transformers' decoders with fused kernels: norms, rotary embeddings and the gates of MLPs, on a GPU.

A module has its kernels if it is known: its parts have the names that Llama's have, and for some tokens it returns,
bit for bit, what the formula here returns. So it is with Llama, SmolLM2, Qwen2 and Mistral, and in part with others.
Everything else stays as it is, and so does all of a model on the CPU and of one that is spread over processes.
"""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bitdial.dial.dial import unwrap
from bitdial.kernels.dispatch import triton_runs
from bitdial.kernels.rms_norm import add_and_norm, takes_norm
from bitdial.kernels.rotary import rotate, takes_rotary
from bitdial.kernels.swiglu import swiglu, takes_swiglu
from bitdial.nn import ActivationSite
from bitdial.prepare.model_call import evaluating
from bitdial.train.perplexity import token_logits
from bitdial.train.sharding import is_sharded

log = logging.getLogger(__name__)

ROTARY = "apply_rotary_pos_emb"  # in the files of transformers' models
NORM_PARTS = {"weight"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
ACTIVATIONS = {"SiLU", "SiLUActivation"}
BLOCK_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}
Forward = Callable[..., Any]


@contextmanager
def fused_blocks(*models: nn.Module, tokens: Tensor) -> Iterator[None]:
    """Let `models` of transformers run known modules by fused kernels inside the block, in place.

    `tokens` (rows, length) are what modules are tried on. Rotary embeddings are a function that all models of a kind
    share: inside the block it is another one for all of them.
    """
    fusible = [unwrap(model) for model in models if _on_gpu(model)]
    with ExitStack() as stack:
        for model in fusible:
            found = _found(model, tokens)
            for module, forward in found:
                stack.enter_context(_replaced(module, forward))
            log.info("%s: %d modules run by fused kernels", type(model).__name__, len(found))
        for file in _rotary_files(fusible):
            stack.enter_context(_rotating(file))
        yield


def _on_gpu(model: nn.Module) -> bool:
    first = next(chain(model.parameters(), model.buffers()), None)
    return first is not None and triton_runs(first) and not is_sharded(model)


@contextmanager
def _replaced(module: Any, forward: Forward) -> Iterator[None]:
    module.forward = partial(forward, module)
    try:
        yield
    finally:
        del module.forward


# --- what is known --------------------------------------------------------------------------------


def _found(model: nn.Module, tokens: Tensor) -> list[tuple[nn.Module, Forward]]:
    """The known modules of `model`, each with what it runs instead."""
    known = _known(model, tokens)
    found: list[tuple[nn.Module, Forward]] = []
    for module, formula in known.items():
        if formula is _norm:
            found.append((module, _fused_norm))
        elif formula is _mlp:
            found.append((module, _fused_mlp))
        elif {module.mlp, module.input_layernorm, module.post_attention_layernorm} <= set(known):
            found.append((module, _fused_block))
    return found


def _known(model: nn.Module, tokens: Tensor) -> dict[nn.Module, Forward]:
    """The modules that return what their formula says, with that."""
    formulas = {module: formula for module in model.modules() if (formula := _formula(module)) is not None}
    if not formulas:
        return {}
    same: dict[nn.Module, bool] = {}

    def compare(module: nn.Module, args: tuple[Any, ...], settings: dict[str, Any], output: Any) -> None:
        if module not in same:
            formula = formulas[module]
            same[module] = _returns(output, partial(formula, module, *args, **settings))
            if formula is _norm and same[module]:  # also of the type that products have under autocast
                half = args[0].bfloat16()
                same[module] = _returns(module.forward(half), partial(_norm, module, half))

    with evaluating(model), ExitStack() as stack:
        model.train()  # what drops values out is seen to do so
        for module in formulas:
            handle = module.register_forward_hook(compare, with_kwargs=True)
            stack.callback(handle.remove)
        token_logits(model, tokens)
    return {module: formula for module, formula in formulas.items() if same.get(module, False)}


def _returns(output: Any, formula: Callable[[], Tensor]) -> bool:
    """Whether `output` is what the formula gives, which may not fit at all."""
    try:
        expected = formula()
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return False
    return isinstance(output, Tensor) and output.dtype == expected.dtype and torch.equal(output, expected)


def _formula(module: Any) -> Forward | None:
    """What `module` should return, to judge by its class and its parts."""
    parts, own = {name for name, _ in module.named_children()}, {name for name, _ in module.named_parameters()}
    if _watched(module):
        return None
    if type(module).__name__.endswith("RMSNorm") and own == NORM_PARTS and hasattr(module, "variance_epsilon"):
        return _norm
    if parts == MLP_PARTS and type(module.act_fn).__name__ in ACTIVATIONS and not _watched(module.act_fn):
        return _mlp
    if parts == BLOCK_PARTS and {name for name, _ in module.self_attn.named_children()} >= PROJECTIONS:
        return _block
    return None


def _watched(module: Any) -> bool:
    """Whether someone else changes what `module` does, or looks at it."""
    hooks = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return "forward" in vars(module) or any(hooks)


def _norm(norm: Any, x: Tensor) -> Tensor:
    values = x.float()
    unit = values * torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + norm.variance_epsilon)
    return norm.weight * unit.to(x.dtype)


def _mlp(mlp: Any, x: Tensor) -> Tensor:
    return mlp.down_proj(F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def _block(block: Any, hidden_states: Tensor, **settings: Any) -> Tensor:
    found, _ = block.self_attn(hidden_states=block.input_layernorm(hidden_states), **settings)
    total = hidden_states + found
    return total + block.mlp(block.post_attention_layernorm(total))


# --- what runs instead ----------------------------------------------------------------------------


def _fused_norm(norm: Any, x: Tensor) -> Tensor:
    """The norm in the type that the module gives it."""
    if not takes_norm(x, norm.weight):
        return _norm(norm, x)
    return add_and_norm(x, None, norm.weight, norm.variance_epsilon, _own_type(norm, x))[1]


def _fused_mlp(mlp: Any, x: Tensor) -> Tensor:
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    return mlp.down_proj(swiglu(gate, up) if takes_swiglu(gate, up) else F.silu(gate) * up)


def _fused_block(block: Any, hidden_states: Tensor, **settings: Any) -> Tensor:
    """The block with norms that have the residual additions with them, where all of it is on the GPU."""
    first, second = block.input_layernorm, block.post_attention_layernorm
    if not (takes_norm(hidden_states, first.weight) and takes_norm(hidden_states, second.weight)):
        return _block(block, hidden_states, **settings)
    dtype = _type_between(block, hidden_states)
    hidden, normed = add_and_norm(hidden_states, None, first.weight, first.variance_epsilon, dtype)
    found, _ = block.self_attn(hidden_states=normed, **settings)
    hidden, normed = add_and_norm(hidden, found, second.weight, second.variance_epsilon, dtype)
    return hidden + block.mlp(normed)


def _own_type(norm: Any, x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, norm.weight.dtype)


def _type_between(block: nn.Module, x: Tensor) -> torch.dtype:
    """The type of norms in a block: that of autocast if products are all that reads them, for they convert to it.

    Quantizers of activations take their inputs as they are.
    """
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and not any(_quantizes_activations(module) for module in block.modules()):
        return torch.get_autocast_dtype(kind)
    return _own_type(block.input_layernorm, x)


def _quantizes_activations(module: nn.Module) -> bool:
    return isinstance(module, ActivationSite) or getattr(module, "act_quantizer", None) is not None


# --- rotary embeddings ----------------------------------------------------------------------------


def _rotary_files(models: list[nn.Module]) -> list[ModuleType]:
    """The files of the models' classes that have rotary embeddings as Llama's, if nothing quantises the results."""
    names: dict[str, bool] = {}
    for model in models:
        quantized = any(isinstance(module, ActivationSite) for module in model.modules())
        for module in model.modules():
            name = type(module).__module__
            names[name] = names.get(name, True) and not quantized
    files = [sys.modules[name] for name, free in names.items() if free and name in sys.modules]
    return [file for file in files if _turns_halves(getattr(file, ROTARY, None))]


def _turns_halves(function: Any) -> bool:
    """Whether `function` turns each head's first half and second half as coordinates of points."""
    if function is None:
        return False
    numbers = torch.linspace(-1.0, 1.0, 2 * 2 * 3 * 8).cos()  # each another one
    q = numbers.reshape(2, 2, 3, 8)
    k, cos, sin = q[:, :1] + 0.5, q[:, 0] - 0.25, q[:, 1] + 0.125
    try:
        found = function(q, k, cos, sin)
    except (TypeError, ValueError, RuntimeError):
        return False
    expected = [x * cos[:, None] + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * sin[:, None] for x in (q, k)]
    return len(found) == 2 and all(torch.equal(mine, one) for mine, one in zip(found, expected, strict=True))


@contextmanager
def _rotating(file: Any) -> Iterator[None]:
    """Let the models of a file of transformers turn queries and keys by the kernel."""
    original = getattr(file, ROTARY)

    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **settings: Any) -> Any:
        if args or settings or not takes_rotary(q, k, cos, sin):
            return original(q, k, cos, sin, *args, **settings)
        return rotate(q, k, cos, sin)

    setattr(file, ROTARY, turned)
    try:
        yield
    finally:
        setattr(file, ROTARY, original)
