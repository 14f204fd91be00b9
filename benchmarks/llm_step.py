"""What a joint step of a language model costs beside float steps: time and memory.

    python benchmarks/llm_step.py                        # SmolLM2-135M's shape, random weights; results/llm-step.json
    python benchmarks/llm_step.py --model DIR            # the model of a transformers folder
    python benchmarks/llm_step.py --record               # joint steps as one CUDA graph, as `train llm --record`
    python benchmarks/llm_step.py --record --unfused     # without fused kernels in the blocks

A float step is forward, cross-entropy, backward and Adam, in bfloat16 on a GPU. A joint step has the float model's
logits and each width's forward, divergence, backward and update. Embeddings and head stay as they are in both. `ratio`
is the time of a joint step over that of one float step for each width, `memory_ratio` its peak memory, with the float
model's, over that of a float step (on a GPU).
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import command
from torch import Tensor, nn

from bitdial import JointStep, QuantConfig, TrainConfig, prepare
from bitdial.recipes.llm import flat_logits, token_loss
from bitdial.recipes.whole_rows import whole_rows
from bitdial.train.gpu.fused_blocks import fused_blocks

WARM_UP = 6  # steps, of which some run as they are before one is recorded
ROOT = Path(__file__).resolve().parent.parent
SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip


def float_model(folder: Path | None, **shape: Any) -> nn.Module:
    """The model of a folder, or one of that shape with random weights."""
    import transformers

    if folder is not None:
        model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    model.config.use_cache = False  # type: ignore[union-attr]
    return model


def measure(
    model: nn.Module, tokens: Tensor, widths: tuple[int, ...], *, rounds: int, record: bool = False, fuse: bool = True
) -> dict[str, Any]:
    """Seconds and bytes of both kinds of steps on `tokens` (rows, length + 1)."""
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    on_gpu = inputs.is_cuda
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[operator]
        table.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=on_gpu)

    def float_step() -> None:
        optimizer.zero_grad()
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=on_gpu):
            loss = token_loss(flat_logits(model.train()(inputs)), targets)
        loss.backward()
        optimizer.step()

    plain = timed(float_step, rounds, on_gpu)
    optimizer.state.clear()
    optimizer.zero_grad()
    config = QuantConfig(bit_choices=widths, group_size=32, activations="float", start="max")
    prepared = prepare(model, config, inputs[:1])
    settings = TrainConfig(
        epochs=1, lr=1e-5, clip_norm=1.0, distill="teacher", distill_weight=1.0, cuda_graph=record, fused=False
    )
    step = JointStep(
        prepared, settings, steps_per_epoch=100 * rounds, loss=token_loss, teacher=model, output=flat_logits
    )
    some, fusible = inputs[:2, :16], (prepared, model) if fuse else ()
    with whole_rows(prepared, model, tokens=some), fused_blocks(*fusible, tokens=some):
        joint = timed(lambda: step(inputs, targets), rounds, on_gpu)
    return {
        "float": plain,
        "joint": joint,
        "ratio": joint["seconds"] / plain["seconds"] / len(widths),
        "memory_ratio": joint["bytes"] / plain["bytes"] if on_gpu else None,
        "tokens_a_second": inputs.numel() / joint["seconds"],
    }


def timed(run: Callable[[], object], rounds: int, on_gpu: bool) -> dict[str, Any]:
    """The median time of a call, after some to warm up, and on a GPU the most memory."""
    seconds = []
    warm_up = WARM_UP if on_gpu else 2
    for number in range(rounds + warm_up):
        if on_gpu and number == 2:  # before a step is recorded: what a graph uses counts when it is made
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        run()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    most = torch.cuda.max_memory_allocated() if on_gpu else None
    return {"seconds": statistics.median(seconds[warm_up:]), "bytes": most}


def main() -> None:
    """Measure, print, and write the row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a transformers folder")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4, 3, 2])
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="joint steps as one CUDA graph")
    parser.add_argument("--unfused", action="store_true", help="blocks of joint steps as transformers has them")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "llm-step.json", help="a file of rows")
    options = parser.parse_args()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = float_model(options.model, **SMOLLM2).to(device)
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    tokens = torch.randint(0, vocabulary, (options.batch, options.length + 1), device=device)
    found = measure(
        model, tokens, tuple(options.bits), rounds=options.rounds, record=options.record, fuse=not options.unfused
    )
    row = {
        "model": "SmolLM2-135M's shape" if options.model is None else options.model.resolve().name,
        "bit_choices": options.bits, "batch": options.batch, "length": options.length,
        "recorded": options.record, "fused": not options.unfused, **found,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "torch": torch.__version__, "seed": 0, "command": command("llm_step"),
    }  # fmt: skip
    rows = json.loads(options.out.read_text()) if options.out.exists() else []
    options.out.write_text(json.dumps([*(r for r in rows if r["command"] != row["command"]), row], indent=1) + "\n")
    times = f"float {found['float']['seconds']:.3f} s, joint {found['joint']['seconds']:.3f} s"
    print(f"{times}: {found['ratio']:.2f} float steps a width")


if __name__ == "__main__":
    main()
