"""Rotated decoders compute what they did, and what cannot be rotated is refused."""

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, prepare, rotate
from bitdial.errors import ConfigError
from bitdial.nn.rotation import BlockHadamard, RotatedInput, RotatedOutput, Turn, is_rotated

transformers = pytest.importorskip("transformers", minversion="5")

IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
SIZES = {
    "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {  # biases, heads wider than their share, a gain of 1 + weight
    "Llama": {"attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 4},
    "Qwen2": {},
    "Qwen3": {"head_dim": 20},
    "Gemma": {"head_dim": 12},
}


def decoder(kind: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A tiny model with random weights, gains and biases."""
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **MODELS.get(kind, {}), **settings})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
        for parameter in model.parameters():
            parameter.normal_(0.5, 1.0) if parameter.dim() == 1 else parameter.mul_(4)
    return model.to(dtype)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def difference(left: nn.Module, right: nn.Module) -> float:
    a, b = logits(left), logits(right)
    return float((a - b).norm() / a.norm())


def rms_norm_in_its_own_type(self: Any, x: Tensor) -> Tensor:
    """What these norms compute, without their detour by float32."""
    eps = self.eps if hasattr(self, "eps") else self.variance_epsilon
    gain = 1.0 + self.weight if type(self).__name__ == "GemmaRMSNorm" else self.weight
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_unchanged(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for tied in (False, True):
        for untie in (False, True) if tied else (False,):
            model = decoder(kind, tie_word_embeddings=tied)
            before = copy.deepcopy(model.state_dict())
            rotated = rotate(model, untie=untie)
            assert difference(model, rotated) < 2e-5, (tied, untie)
            assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items()), "it is a copy"
            assert (rotated.lm_head.weight is rotated.model.embed_tokens.weight) == (tied and not untie)
            norm = type(model.model.norm)
            with monkeypatch.context() as patch:
                patch.setattr(norm, "forward", rms_norm_in_its_own_type)
                exact = decoder(kind, torch.float64, tie_word_embeddings=tied)
                assert difference(exact, rotate(exact, untie=untie)) < 1e-13, (tied, untie)


def test_every_part_by_itself() -> None:
    model = decoder("Qwen2", torch.float64)
    for parts in (
        {"residual": None, "values": False},
        {"residual": None, "down_block": None},
        {"residual": "online", "values": False, "down_block": None},
        {"values": False, "down_block": None},
        {"down_block": 2, "seed": 3},
        {"down_block": 128},  # sqrt(128) is no power of two
    ):
        rotated = rotate(model, **parts)
        assert difference(model, rotated) < 1e-6, parts
        assert any(not torch.equal(p, q) for p, q in zip(model.parameters(), rotated.parameters(), strict=True)), parts


def test_outliers_are_spread() -> None:
    """One channel that is far larger than the others is what rotations are for."""
    model = decoder("Llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] *= 50
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[3] *= 50
            layer.mlp.up_proj.weight[7] *= 50

    def peaks(model: nn.Module) -> dict[str, float]:
        """The largest input of each layer over the mean magnitude."""
        found: dict[str, float] = {}

        def look(name: str) -> Any:
            def hook(module: nn.Module, args: Any) -> None:
                found[name.removesuffix(".layer")] = float(args[0].abs().max() / args[0].abs().mean())

            return hook

        handles = [m.register_forward_pre_hook(look(n)) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        logits(model)
        for handle in handles:
            handle.remove()
        return found

    before, after = peaks(model), peaks(rotate(model))
    assert before.keys() == after.keys()
    for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
        assert after[f"model.layers.0.{name}"] < before[f"model.layers.0.{name}"] / 2


def test_what_is_in_its_place() -> None:
    rotated = rotate(decoder("Llama", tie_word_embeddings=True).train())
    down, embedding = rotated.model.layers[1].mlp.down_proj, rotated.model.embed_tokens
    assert isinstance(down, RotatedInput)
    assert isinstance(embedding, RotatedOutput)
    assert isinstance(down.rotation, BlockHadamard)
    assert (down.rotation.size, down.in_features, down.weight.shape) == (64, 128, (48, 128))
    assert embedding.num_embeddings == 96
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = down.nothing
    assert all(module.training for module in rotated.modules())
    gains = [m.weight for n, m in rotated.named_modules() if n.endswith("layernorm")]
    assert len(gains) == 4
    assert all(torch.equal(gain, torch.ones_like(gain)) for gain in gains)
    assert not rotate(decoder("Llama", tie_word_embeddings=True), untie=True).config.tie_word_embeddings


def test_seeds() -> None:
    model = decoder("Llama")
    first, second, third = rotate(model), rotate(model), rotate(model, seed=1)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name])
    assert not torch.equal(first.model.embed_tokens.weight, third.model.embed_tokens.weight)


def test_16_bits_become_float32() -> None:
    model = decoder("Llama", torch.bfloat16)
    rotated = rotate(model)
    assert {p.dtype for p in rotated.parameters()} == {torch.float32}
    assert difference(copy.deepcopy(model).float(), rotated) < 2e-5


def test_what_does_not_fit_is_refused() -> None:
    llama = decoder("Llama")
    rotated = rotate(llama)
    assert is_rotated(rotated)
    cases: list[tuple[nn.Module, dict[str, Any], str]] = [
        (rotated, {}, "the model is rotated already"),
        (prepare(llama, QuantConfig(start="max"), {"input_ids": IDS}), {}, "the model is prepared already"),
        (decoder("Gemma2"), {}, "has a 'post_feedforward_layernorm'.*residual='online'"),
        (nn.Sequential(nn.Linear(4, 4)), {}, "a Sequential is no decoder with an 'lm_head'"),
        (llama.model, {}, "a LlamaModel is no decoder with an 'lm_head'"),
        (decoder("Phi3", pad_token_id=0), {}, "has no 'q_proj'; rotate.. knows models like Llama"),
        (decoder("StableLm", hidden_size=64), {}, "a LayerNorm has tensors beside a gain"),
        (llama, {"down_block": 48}, "down_block=48 is not a power of two"),
        (llama, {"down_block": True}, "down_block=True is not a power of two"),
        (llama, {"down_block": 256}, "no multiple of down_block=256; the largest block that fits is 128"),
        (llama, {"seed": -1}, "seed=-1"),
        (llama, {"residual": True}, "residual=True is not 'merged', 'online' or None"),
        (llama, {"residual": None, "values": False, "down_block": None}, "nothing is left to rotate"),
        (copy.deepcopy(llama).to("meta"), {}, "meta device"),
    ]
    for model, settings, message in cases:
        with pytest.raises(ConfigError, match=message):
            rotate(model, **settings)


def test_rotations_behind_norms() -> None:
    """Gains stay where they are, norms behind layers are no hindrance, and a tie is not touched."""
    for kind in (*MODELS, "Gemma2"):
        model = decoder(kind, tie_word_embeddings=True)
        rotated = rotate(model, residual="online")
        assert difference(model, rotated) < 2e-5, kind
        assert rotated.lm_head.weight is rotated.model.embed_tokens.weight
        assert isinstance(rotated.model.embed_tokens, nn.Embedding)
        behind = [m for m in rotated.modules() if isinstance(m, RotatedOutput)]
        assert [cast(Turn, m.rotation).size for m in behind] == [48] * 4
        assert torch.equal(rotated.model.layers[0].input_layernorm.weight, model.model.layers[0].input_layernorm.weight)


def test_a_model_that_computes_more_is_refused() -> None:
    """The structure is Llama's, but something between the layers is not: only running it shows that."""
    model = decoder("Llama")
    model.model.layers[1].register_forward_hook(lambda module, args, out: out + out.abs())
    with pytest.raises(ConfigError, match="the rotated copy gives other logits"):
        rotate(model)


def test_a_block_that_runs_twice_is_rotated_once() -> None:
    model = decoder("Llama")
    model.model.layers[1] = model.model.layers[0]
    assert difference(model, rotate(model)) < 2e-5
