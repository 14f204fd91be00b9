"""Models that cannot be traced: blocks are rows of like modules, whatever the model is called."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import CalibrateConfig, QuantConfig, calibrate, prepare, set_bits
from bitdial.calibrate.checkpoint import Checkpoint
from bitdial.calibrate.steps import caches_off, find_rows, skipping, thinned
from bitdial.calibrate.walk import Walk

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
TOKENS = torch.randint(0, 64, (32, 12), generator=torch.Generator().manual_seed(0))
BITS = (8, 4, 2)


def network(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "llama":
        config = transformers.LlamaConfig(**SIZES, intermediate_size=64, num_key_value_heads=1)
        made = transformers.LlamaForCausalLM(config)
    elif kind == "gpt2":
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 16}
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=1))
    elif kind == "bert":
        made = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, intermediate_size=64))
    else:
        sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
        config = transformers.BartConfig(vocab_size=64, d_model=32, max_position_embeddings=16, **sizes, **heads)
        made = transformers.BartModel(config)
    for parameter in made.parameters():  # such that blocks do something to their hidden state
        if parameter.dim() == 2:
            parameter.data.mul_(5)
    return made.eval()


def prepared(model: nn.Module, **settings: Any) -> nn.Module:
    config = QuantConfig(**{"bit_choices": BITS, "activations": "float", "keep_first_last": False, **settings})
    return prepare(copy.deepcopy(model), config, {"input_ids": TOKENS[:4]}).eval()


def batches(size: int = 16) -> list[Any]:
    return [{"input_ids": part} for part in TOKENS.split(size)]


def error(model: nn.Module, plain: nn.Module, bits: int) -> float:
    others = torch.randint(0, 64, (32, 12), generator=torch.Generator().manual_seed(1))
    set_bits(model, bits)
    with torch.no_grad():
        wanted = plain(others)[0]
        return float((model(others)[0] - wanted).square().sum() / wanted.square().sum())


def test_the_layers_of_a_transformer_are_blocks() -> None:
    rows = {
        "llama": [*(f"model.layers.{i}" for i in range(3)), "lm_head"],
        "gpt2": [f"transformer.h.{i}" for i in range(3)],
        "bert": [*(f"bert.encoder.layer.{i}" for i in range(3)), "bert.pooler.dense", "classifier"],
        "bart": ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"],
    }
    for kind, names in rows.items():
        model = prepared(network(kind))
        with caches_off(model):
            walk = Walk(model, batches())
        assert walk.warnings == []
        assert [block.name for block in walk.blocks] == names
        layers = [name for block in walk.blocks for name in block.layers]
        assert sorted(layers) == sorted(n for n, m in model.named_modules() if hasattr(m, "weight_quantizer"))
        assert all(name.startswith(block.name) for block in walk.blocks for name in block.layers)


def test_blocks_one_after_the_other_give_the_model() -> None:
    """At a low width, on padded batches: each has masks of its own."""
    for kind in ("llama", "bart"):
        model, mask = prepared(network(kind)), torch.ones_like(TOKENS)
        mask[:, -3:] = 0
        given = [
            {"input_ids": TOKENS[:5], "attention_mask": mask[:5]},
            {"input_ids": TOKENS[5:], "attention_mask": mask[5:]},
        ]
        with caches_off(model):
            walk = Walk(model, given)
            set_bits(model, 2)
            values = walk.start()
            for block in walk.blocks:
                values.enter(model, block)
                values.advance(model, block, lambda name, x: None)
            held = [sum(isinstance(value, Tensor) for value in batch.values()) for batch in values.batches]
            assert max(held) <= 2, "one hidden state a list"
            with torch.no_grad():
                outputs = [model(**batch)[0] for batch in given]
        found = [batch[walk.blocks[-1].made[-1]] for batch in values.batches]
        assert all(map(torch.equal, found, outputs))


def test_every_width_comes_nearer_to_the_float_model() -> None:
    for kind in ("llama", "gpt2"):
        net = network(kind)
        plain = prepared(net, start="mse")
        before = {bits: error(plain, net, bits) for bits in BITS}
        full = CalibrateConfig(effort="full", iterations=40, weight_rate=0.03, round_jointly=False)
        for config in (full, CalibrateConfig()):
            model = prepared(net, start="mse")
            report = calibrate(model, batches(), config, progress=False)
            assert report.warnings == ()
            after = {bits: error(model, net, bits) for bits in BITS}
            assert after[8] < min(5e-3, before[8])
            assert math.prod(after.values()) < 0.5 * math.prod(before.values())
            assert after[2] < 0.98 * before[2], (kind, config.effort, before, after)
            gains = [each.error_before[2] / each.error[2] for each in report.blocks if each.error_before]
            assert max(gains, default=2) > 1.05


def test_what_was_left_of_a_run_goes_on_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, config = network("llama"), CalibrateConfig(effort="full", iterations=3, batch_size=8)
    whole = prepared(net, activations="auto")
    calibrate(whole, batches(), config, progress=False)
    half, write = prepared(net, activations="auto"), Checkpoint.write

    def stop(self: Checkpoint, reports: list[Any]) -> None:
        write(self, reports)
        if len(reports) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpoint, "write", stop)
    with pytest.raises(KeyboardInterrupt):
        calibrate(half, batches(), config, checkpoint=tmp_path / "c.ckpt", progress=False)
    monkeypatch.setattr(Checkpoint, "write", write)
    again = prepared(net, activations="auto")
    report = calibrate(again, batches(), config, checkpoint=tmp_path / "c.ckpt", progress=False)
    assert report.resumed == 2
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in whole.state_dict().items())


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        return x + torch.relu(self.inner(x))


class Rows(nn.Module):
    """Runs its parts in the way that `order` says; takes any arguments, so that it cannot be traced."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2), skip: bool = False, count: bool = False):
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(3))
        self.order, self.skip, self.count, self.calls = order, skip, count, 0

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        outputs = []
        for i in self.order:
            self.calls += self.count
            x = self.parts[i](x * (1 + self.calls), **others)
            outputs.append(x)
        return x + outputs[0] if self.skip else x


def test_rows_that_are_no_blocks_go_layer_by_layer_and_say_so() -> None:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    for net, reason in (
        (Rows(), ""),
        (Rows((0, 1, 2, 1)), "no list of modules of one class that run once each"),
        (Rows((1, 0, 2)), "no list of modules of one class that run once each"),
        (Rows(skip=True), "the modules of 'parts', run by themselves, compute something else"),
        (Rows(count=True), "the modules of 'parts', run by themselves, compute something else"),
    ):
        walk = Walk(prepare(net, QuantConfig(keep_first_last=False), x), [x])
        assert not walk.traced
        if not reason:
            assert walk.warnings == []
            assert [block.name for block in walk.blocks] == ["parts.0", "parts.1", "parts.2"]
            continue
        assert reason in walk.warnings[0]
        assert "layer by layer" in walk.warnings[0]
        assert sorted(block.name for block in walk.blocks) == [f"parts.{i}.inner" for i in range(3)]
    walk = Walk(prepare(Rows(), QuantConfig(keep_first_last=False), x), [x, {"x": x}])
    assert "different forms" in walk.warnings[0]


def test_modules_that_are_skipped_run_again_afterwards() -> None:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    model = prepare(Rows(), QuantConfig(keep_first_last=False), x)
    wanted, walk = model(x), Walk(model, [x])
    values = walk.start()
    values.enter(model, walk.blocks[0])
    rows, _ = find_rows(model, x)
    assert rows == [("parts.0", "parts.1", "parts.2")]
    skips = values.skips[walk.blocks[2]]  # type: ignore[attr-defined]
    with skipping(model, skips, {skips[1].node: x * 2}):
        torch.testing.assert_close(model(x), model.get_submodule("parts.2")(x * 2))
    assert torch.equal(model(x), wanted)
    assert not any("forward" in vars(module) for module in model.modules())


def test_of_a_large_head_some_places_are_kept() -> None:
    x = torch.randn(2, 9, 1 << 17)
    assert torch.equal(thinned(x), x[:, ::5])
    assert thinned(x[..., :10]).shape == (2, 9, 10)
    assert thinned(x[:, 0]).shape == (2, 1 << 17)
    assert torch.equal(thinned(x.reshape(2, 3, -1)), x.reshape(2, 3, -1)[:, ::3])
