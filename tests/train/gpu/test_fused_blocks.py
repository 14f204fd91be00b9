"""Fused kernels in the blocks of transformers' decoders: the same numbers, and what is not known stays as it is.

On a GPU they run compiled, elsewhere under Triton's interpreter; see `test_interpreter.py`.
"""

import copy
import dataclasses
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import JointStep, QuantConfig, TrainConfig, prepare, set_bits
from bitdial.kernels import dispatch
from bitdial.recipes.whole_rows import whole_rows
from bitdial.train.gpu import fused_blocks as module
from bitdial.train.gpu.fused_blocks import fused_blocks
from bitdial.train.perplexity import token_logits

transformers = pytest.importorskip("transformers", minversion="5")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 16, "use_cache": False,
}  # fmt: skip
TOKENS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1)).to(DEVICE)
ALL = {"_fused_block": 2, "_fused_mlp": 2, "_fused_norm": 5}


def tiny(kind: str = "Llama", **settings: Any) -> Any:
    """A float model whose gains are no ones, and whose weights are large enough to see what is done with them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = getattr(transformers, f"{kind}ForCausalLM")(
            getattr(transformers, f"{kind}Config")(**{**SIZES, "initializer_range": 0.2, **settings})
        )
        for parameter in made.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, 0.7, 0.2)
    return made.to(DEVICE)


def quantized(model: nn.Module, **settings: Any) -> Any:
    given = {"bit_choices": (8, 4), "group_size": 16, "activations": "float", "start": "max", **settings}
    return prepare(model, QuantConfig(**given), TOKENS[:1])


def replaced(model: nn.Module) -> dict[str, int]:
    """What runs instead of modules of the model, and how often."""
    found = [vars(part)["forward"] for part in model.modules() if "forward" in vars(part)]
    return dict(Counter(forward.func.__name__ for forward in found))


def passed(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits, and the gradients of all parameters that learn."""
    model.zero_grad()
    logits = token_logits(model, TOKENS)
    (logits.float().log_softmax(dim=-1)[..., 5].mean()).backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check(found: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]]) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()) + 1e-9, msg=name
        )


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Mistral", "Qwen3"])
def test_the_same_numbers(kind: str) -> None:
    model = tiny(kind, **({"sliding_window": None} if kind == "Mistral" else {}))
    expected = passed(model)
    with fused_blocks(model, tokens=TOKENS[:, :4]):
        assert replaced(model) == (ALL if kind != "Qwen3" else ALL | {"_fused_norm": 9})
        check(passed(model), expected)
    assert replaced(model) == {}


@pytest.mark.interpreter(only=True)
def test_the_same_numbers_at_each_width() -> None:
    """Gains that stay as they are have no gradient there, either."""
    model = quantized(tiny(num_hidden_layers=1))
    model.model.norm.requires_grad_(False)
    for bits in (8, 4):
        set_bits(model, bits)
        expected = passed(model)
        with fused_blocks(model, tokens=TOKENS[:, :4]):
            assert replaced(model) == {"_fused_block": 1, "_fused_mlp": 1, "_fused_norm": 3}
            check(passed(model), expected)


@pytest.mark.interpreter(only=True)
def test_kernels_are_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece once a block, and the rotary embeddings of both models by the one kernel."""
    model = tiny()
    calls: Counter[str] = Counter()

    def counted(name: str, function: Any, *args: Any) -> Any:
        calls[name] += 1
        return function(*args)

    for name in ("add_and_norm", "rotate", "swiglu"):
        monkeypatch.setattr(module, name, partial(counted, name, getattr(module, name)))
    with fused_blocks(model, quantized(model), tokens=TOKENS), torch.no_grad():
        assert calls == {}
        model(TOKENS)
    assert calls == {"add_and_norm": 5, "rotate": 2, "swiglu": 2}


@pytest.mark.interpreter(only=True)
def test_checkpointed_blocks_have_the_same_gradients() -> None:
    model = tiny().train()
    expected = passed(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with fused_blocks(model, tokens=TOKENS):
        assert replaced(model) == ALL
        check(passed(model), expected)


@pytest.mark.interpreter(only=True)
def test_joint_steps_learn_the_same() -> None:
    settings = TrainConfig(
        epochs=1, lr=1e-3, distill="teacher", distill_weight=1.0, fused=False, autocast=None, optimizer="sgd"
    )
    losses = []
    for models in (0, 2):
        teacher = tiny(num_hidden_layers=1)
        model = quantized(teacher)
        step = JointStep(
            model, settings, steps_per_epoch=10, teacher=teacher, output=lambda returned: returned.logits.flatten(0, 1)
        )
        with fused_blocks(*(model, teacher)[:models], tokens=TOKENS):
            losses.append([float(loss) for _ in range(2) for loss in step(TOKENS, TOKENS).loss.values()])
    assert losses[0][0] != losses[0][-1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_recorded_step_learns_as_one_that_is_not() -> None:
    settings = TrainConfig(epochs=1, lr=1e-4, distill="teacher", distill_weight=1.0, fused=False, optimizer="sgd")
    losses = []
    for record in (False, True):
        teacher = tiny()
        model = quantized(teacher)
        step = JointStep(
            model, dataclasses.replace(settings, cuda_graph=record), steps_per_epoch=10, teacher=teacher,
            output=lambda returned: returned.logits.flatten(0, 1),
        )  # fmt: skip
        with whole_rows(model, teacher, tokens=TOKENS), fused_blocks(model, teacher, tokens=TOKENS):
            losses.append([float(loss) for _ in range(6) for loss in step(TOKENS, TOKENS).loss.values()])
        assert bool(step.graphs._recorded) == record
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.interpreter(only=True)
def test_errors_under_autocast_are_those_of_the_type() -> None:
    """Against float64, logits and gradients are no further off than without fused kernels."""
    model = tiny()
    exact = passed(copy.deepcopy(model).double())

    def errors() -> list[float]:
        with torch.autocast(DEVICE, torch.bfloat16):
            logits, gradients = passed(model)
        pairs = [(logits, exact[0]), *((gradients[name], exact[1][name]) for name in exact[1])]
        return [float((mine.double() - one).norm() / one.norm()) for mine, one in pairs]

    plain = errors()
    with fused_blocks(model, tokens=TOKENS):
        fused = errors()
    assert min(plain) > 1e-4
    most = 3.0 if dispatch.interpreted() else 1.5  # the interpreter cuts bits off where the GPU rounds
    assert fused[0] <= most * plain[0]
    assert sum(fused) <= most * sum(plain)


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize(("activations", "dtype"), [("float", torch.bfloat16), ("dynamic", torch.float32)])
def test_quantizers_of_activations_see_what_they_saw(activations: str, dtype: torch.dtype) -> None:
    """Products convert a norm to 16 bits, so it may come so at once; codes are of the norm as it is."""
    model, seen = quantized(tiny(), activations=activations), []
    for layer in (model.model.layers[1].self_attn.k_proj, model.model.layers[1].mlp.up_proj):
        layer.register_forward_pre_hook(lambda layer, args: seen.append(args[0].dtype))
    with fused_blocks(model, tokens=TOKENS), torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
        seen.clear()
        model(TOKENS)
    assert seen == [dtype, dtype]


@pytest.mark.interpreter(only=True)
@pytest.mark.parametrize(
    ("kind", "settings", "found"),
    [
        ("Llama", {"hidden_act": "gelu"}, {"_fused_norm": 5}),
        ("Gemma", {}, {}),
        ("Granite", {"residual_multiplier": 0.5}, {"_fused_mlp": 2, "_fused_norm": 5}),
        ("Olmo2", {}, {"_fused_mlp": 2}),
        ("Llama", {"attention_dropout": 0.5}, {"_fused_mlp": 2, "_fused_norm": 5}),
        ("Cohere", {}, {"_fused_mlp": 2}),
    ],
    ids=str,
)
def test_what_is_not_known_stays(kind: str, settings: dict[str, Any], found: dict[str, int]) -> None:
    model = tiny(kind, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings).eval()
    expected = passed(model)
    with fused_blocks(model, tokens=TOKENS):
        assert replaced(model) == found
        assert not any(part.training for part in model.modules())
        check(passed(model), expected)


@pytest.mark.interpreter(only=True)
def test_modules_that_someone_else_changes_stay() -> None:
    model = tiny()
    first, second = model.model.layers
    first.mlp.forward = forward = first.mlp.forward
    second.input_layernorm.register_forward_hook(lambda norm, args, output: 2 * output)
    second.mlp.act_fn.register_full_backward_hook(lambda *given: None)
    expected = passed(model)
    with fused_blocks(model, tokens=TOKENS):
        assert first.mlp.forward is forward
        del first.mlp.forward
        assert replaced(first) == {"_fused_norm": 2}
        assert replaced(second) == {"_fused_norm": 1}
        check(passed(model), expected)


@pytest.mark.interpreter(only=True)
def test_after_an_error_all_is_as_it_was() -> None:
    from transformers.models.llama import modeling_llama

    model, rotary = tiny(), modeling_llama.apply_rotary_pos_emb

    def fail() -> None:
        with fused_blocks(model, nn.Linear(2, 2), tokens=TOKENS):
            assert modeling_llama.apply_rotary_pos_emb is not rotary
            raise RuntimeError("within")

    with pytest.raises(RuntimeError, match="within"):
        fail()
    assert modeling_llama.apply_rotary_pos_emb is rotary
    assert replaced(model) == {}


def test_rotary_embeddings_are_told_apart() -> None:
    from transformers.models.cohere import modeling_cohere
    from transformers.models.gpt_oss import modeling_gpt_oss
    from transformers.models.qwen2 import modeling_qwen2

    files = (modeling_qwen2, modeling_cohere, modeling_gpt_oss)
    assert [module._turns_halves(file.apply_rotary_pos_emb) for file in files] == [True, False, False]
    assert not module._turns_halves(None)


def test_without_kernels_nothing_is_replaced() -> None:
    if dispatch.triton_runs(torch.zeros(1)):
        pytest.skip("here kernels run on the CPU")
    model = tiny().cpu()
    with fused_blocks(model, tokens=TOKENS.cpu()):
        assert replaced(model) == {}
