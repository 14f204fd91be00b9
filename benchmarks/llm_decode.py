"""Decoding and prefill of whole language models on packed kernels, at each width, against compiled bf16.

    python benchmarks/llm_decode.py                         # 1.1b and 8b on a GPU: results/llm-decode-h200.json
    python benchmarks/llm_decode.py --models 1.1b --batches 1
    python benchmarks/llm_decode.py --tiny                  # a tiny Llama on any machine, to see that it works

Llamas of random weights, `nested`, a scale per row, embedding and head at 8 bits. A step of decoding takes one token of
each text behind a prompt of `--prompt` tokens, in a static cache, and ends in the next token; prefill takes one text of
`--prefill` tokens and ends in its next token. bf16 is compiled by torch.compile, then recorded as a CUDA graph. The
live model is recorded as it runs (`how`: "eager"), and compiled and recorded ("compiled"). All are timed by replays, in
turn, `--rounds` times, and the median counts. Steps keep the mask and the position of the first, which take as long.
Compiling takes its time once a width, so only `--compiled` batches are. `first_s` is the time of the first step at a
width and of recording it, with what is compiled; `switch_ms` that of `set_bits` and of picking the graph, on the host.
`generate_tokens_per_s` is what `generate` gives with `decode_graphs`, its host time included. On a CPU nothing is
compiled or recorded.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from timing import command
from torch import Tensor, nn

from bitdial import QuantConfig, Rule, decode_graphs, load, prepare, save, set_bits
from bitdial.files.atomic import write_json
from bitdial.live.decode_graphs import CudaRecorder
from bitdial.recipes.whole_rows import whole_rows

ROOT = Path(__file__).resolve().parent.parent
SHAPES: dict[str, dict[str, int]] = {
    "1.1b": {
        "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
        "num_attention_heads": 32, "num_key_value_heads": 4,
    },
    "8b": {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "tiny": {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip
ROOM = 64  # tokens behind the prompt; then the cache goes back to it
Step = Callable[[], object]


class Timed:
    """A step that is repeated: from a CUDA graph on a GPU, else as it is."""

    def __init__(self, step: Step, again: Step, device: torch.device):
        """`again` brings what steps use up back to where it was."""
        self.device, self.again, self.step = device, again, step
        began = time.perf_counter()
        again()
        if device.type == "cuda":
            recorder = CudaRecorder()
            for _ in range(2):
                recorder.first(step)
            self.step, self.result = recorder.record(step)
            torch.cuda.synchronize()
        else:
            step()
        self.first_s = time.perf_counter() - began

    def seconds(self, times: int) -> float:
        """Of one step, the mean of up to ROOM in a row."""
        self.again()
        self._wait()
        began = time.perf_counter()
        for _ in range(min(times, ROOM)):
            self.step()
        self._wait()
        return (time.perf_counter() - began) / min(times, ROOM)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def decoding(model: Any, compiled: bool, batch: int, prompt: int) -> tuple[Step, Step]:
    """A step of decoding behind a prompt, and what makes the cache as long as the prompt again."""
    config, device = model.config, model.device
    cache = transformers.StaticCache(config=config, max_cache_len=prompt + ROOM + 8)
    ids = torch.arange(prompt, device=device).remainder(config.vocab_size).expand(batch, -1).contiguous()
    call = torch.compile(model.__call__, dynamic=False) if compiled else model.__call__
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
        given = model.prepare_inputs_for_generation(
            torch.cat([ids, ids[:, :1]], dim=1), next_sequence_length=1, past_key_values=cache,
            attention_mask=torch.ones((batch, prompt + 1), dtype=torch.int64, device=device),
        )  # fmt: skip
    token = given["input_ids"]

    def step() -> Tensor:
        with torch.no_grad():
            logits = call(**given).logits
            return token.copy_(logits[:, -1:].argmax(-1))

    def again() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(prompt)

    return step, again


def prefill(model: Any, compiled: bool, tokens: int) -> tuple[Step, Step]:
    """A text of so many tokens, to its next one; nothing is used up."""
    ids = torch.arange(tokens, device=model.device).remainder(model.config.vocab_size)[None]
    call = torch.compile(model.__call__, dynamic=False) if compiled else model.__call__

    def step() -> Tensor:
        with torch.no_grad():
            found: Tensor = call(input_ids=ids, use_cache=False, logits_to_keep=1).logits.argmax(-1)
            return found

    return step, lambda: None


def models_of(name: str, bits: tuple[int, ...], device: torch.device) -> tuple[nn.Module, nn.Module]:
    """The model in bf16, and live on packed kernels."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPES[name], max_position_embeddings=4096)
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config).eval()
    rules = Rule(type="Embedding", bits=8), Rule(pattern="lm_head", bits=8, activations="float")
    settings = QuantConfig(
        scheme="nested", bit_choices=bits, activations="float", keep_first_last=False, start="max", rules=rules
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(prepare(model, settings, {"input_ids": torch.arange(8, device=device)[None]}), path)
        plain = model.to(torch.bfloat16)
        with torch.device("cpu"):
            empty = transformers.LlamaForCausalLM._from_config(config)
        live = load(path, empty, dtype=torch.bfloat16, device=device, kernels="packed")
    return plain, live


def measure(name: str, options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """The rows of one model."""
    plain, live = models_of(name, tuple(options.bits), device)
    rows = []
    for batch in options.batches:
        fused = device.type == "cuda" and batch in options.compiled
        always = {"model": name, "what": "decode", "batch": batch}
        rows += compared(always, (plain, live), partial(decoding, batch=batch, prompt=options.prompt), batch, options,
                         device, fused)  # fmt: skip
    some = torch.arange(16, device=device)[None]
    with whole_rows(plain, live, tokens=some):  # or a graph has a mask, as if a row could hold several texts
        always = {"model": name, "what": "prefill", "batch": 1}
        rows += compared(always, (plain, live), partial(prefill, tokens=options.prefill), options.prefill, options,
                         device, False)  # fmt: skip
    if device.type == "cuda":
        rows += generated(name, live, options)
    return rows


def compared(
    always: dict[str, Any],
    models: tuple[nn.Module, nn.Module],
    make: Callable[..., tuple[Step, Step]],
    tokens: int,
    options: argparse.Namespace,
    device: torch.device,
    fused: bool,
) -> list[dict[str, Any]]:
    """The rows of one kind of step, of so many tokens, by width: the live model's against those of bf16."""
    plain, live = models
    rows = []
    base = Timed(*make(plain, device.type == "cuda"), device)
    for how in ("eager", "compiled") if fused else ("eager",):
        timed: dict[int, Timed] = {}
        for bits in options.bits:
            set_bits(live, bits)
            timed[bits] = Timed(*make(live, how == "compiled"), device)
        times: dict[int, list[tuple[float, float]]] = {bits: [] for bits in options.bits}
        for _ in range(options.rounds):
            for bits, each in timed.items():
                set_bits(live, bits)
                times[bits].append((base.seconds(options.steps), each.seconds(options.steps)))
        for bits, found in times.items():
            bf16, ours = (statistics.median(column) for column in zip(*found, strict=True))
            row = {
                "model": always["model"], "what": always["what"], "bits": bits, "batch": always["batch"], "how": how,
                "tokens_per_s": round(tokens / ours, 1), "bf16_tokens_per_s": round(tokens / bf16, 1),
                "ratio": round(bf16 / ours, 3), "first_s": round(timed[bits].first_s, 2),
            }  # fmt: skip
            rows.append(row)
            print(row, flush=True)
        del timed
    return rows


def generated(name: str, live: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What `generate` gives with graphs, and what a switch between them takes."""
    rows, new = [], 128
    for batch in options.batches:
        ids = torch.arange(options.prompt, device=live.device)[None].expand(batch, -1).contiguous()
        graphs = decode_graphs(live, batch_size=batch, max_length=options.prompt + new + 8)
        given = {"attention_mask": torch.ones_like(ids), "do_sample": False}
        seconds: dict[tuple[int, int], list[float]] = {}
        for number in range(options.rounds + 1):
            for bits in options.bits:
                set_bits(live, bits)
                for count in (8, new):
                    torch.cuda.synchronize()
                    began = time.perf_counter()
                    some = {"max_new_tokens": count, "min_new_tokens": count, "past_key_values": graphs.cache()}
                    live.generate(input_ids=ids, **given, **some)
                    torch.cuda.synchronize()
                    if number:
                        seconds.setdefault((bits, count), []).append(time.perf_counter() - began)
        for bits in options.bits:
            took = [statistics.median(seconds[bits, count]) for count in (8, new)]
            began = time.perf_counter()
            set_bits(live, bits)
            graphs._setting()
            switch = 1e3 * (time.perf_counter() - began)
            speed = batch * (new - 8) / (took[1] - took[0])
            row = {"model": name, "what": "generate", "bits": bits, "batch": batch, "how": "decode_graphs",
                   "generate_tokens_per_s": round(speed, 1), "switch_ms": round(switch, 3)}  # fmt: skip
            rows.append(row)
            print(row, flush=True)
    return rows


def main() -> None:
    """Write the rows after each model, and say them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["1.1b", "8b"], choices=[*SHAPES])
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--compiled", type=int, nargs="*", default=[1], help="batches that are decoded compiled, too")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--prefill", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.tiny:
        small = {"models": ["tiny"], "prompt": 8, "prefill": 20, "steps": 2, "rounds": 1, "batches": [1, 2]}
        vars(options).update(small)
    out = options.out or (None if options.tiny else ROOT / "results" / "llm-decode-h200.json")
    torch._dynamo.config.recompile_limit = 64  # a width is a setting of its own
    rows: list[dict[str, Any]] = []
    for name in options.models:
        rows += measure(name, options, device)
        if out is not None:
            versions = {"torch": torch.__version__, "transformers": transformers.__version__}
            where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
            record = {"command": command("llm_decode"), "device": where, "seed": 0, "versions": versions, "rows": rows,
                      "complete": name == options.models[-1]}  # fmt: skip
            write_json(out, record)


if __name__ == "__main__":
    main()
