"""Tokens per second of a language model on the CPU, one at a time, at each width and in PyTorch's bf16 and float32.

    python benchmarks/cpu_decode.py --model DIR                     # results/cpu-decode.json
    python benchmarks/cpu_decode.py --model DIR --gguf FILE.gguf    # DIR has the model in a GGUF file (needs gguf)
    python benchmarks/cpu_decode.py --tiny                          # a tiny Llama, to see that it works

The model goes through `prepare`, `save` and `load(..., dtype=torch.bfloat16)`: the kernels that None chooses. Embedding
and head are quantised too. Each contender decodes `--tokens` tokens with a cache behind a prompt of 16; contenders
alternate, and the median of the rounds counts. Speed is what wall time gives; on a machine that others use as well
(`busy` is the load), the ratio of CPU times (`cpu_ratio`, of all threads) says more. The first token after a switch is
timed by itself: it makes the layouts.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from timing import command
from torch import nn

from bitdial import QuantConfig, Rule, load, prepare, resident_bytes, save, set_bits
from bitdial.files.atomic import write_json

ROOT = Path(__file__).resolve().parent.parent
PROMPT = 16


def decode(model: nn.Module, tokens: int) -> tuple[float, float]:
    """Seconds of the wall and of the CPU for each token, decoded greedily behind a prompt."""
    vocabulary = model.config.vocab_size
    with torch.no_grad():  # as `generate` does; in inference mode layers are not joined
        prompt = torch.arange(100, 100 + PROMPT).remainder(vocabulary)[None]
        found = model(prompt, use_cache=True, logits_to_keep=1)
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(tokens):
            token = found.logits[:, -1:].argmax(-1)
            found = model(token, past_key_values=found.past_key_values, use_cache=True)
    return (time.perf_counter() - wall) / tokens, (time.process_time() - cpu) / tokens


def row(times: list[tuple[float, float]], base: list[tuple[float, float]]) -> dict[str, float]:
    """Medians, over those of the `base`, PyTorch's bf16."""
    (wall, cpu), (base_wall, base_cpu) = (
        [statistics.median(column) for column in zip(*found, strict=True)] for found in (times, base)
    )
    return {
        "tokens_per_s": round(1 / wall, 2), "ratio_to_bf16": round(base_wall / wall, 3),
        "cpu_ms_per_token": round(1000 * cpu, 2), "cpu_ratio": round(base_cpu / cpu, 3),
    }  # fmt: skip


def measure(options: argparse.Namespace, float_model: Callable[[torch.dtype], nn.Module]) -> list[dict[str, Any]]:
    """A row for each contender."""
    torch.set_num_threads(options.threads)
    rules = Rule(type="Embedding", bits=8), Rule(pattern="lm_head", bits=8, activations="float")
    config = QuantConfig(
        scheme=options.scheme, bit_choices=tuple(options.bits), activations="float", keep_first_last=False,
        start="max", group_size=options.group_size or None, rules=rules,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(prepare(float_model(torch.float32), config, {"input_ids": torch.arange(32)[None]}), path)
        live = load(path, float_model(torch.float32), dtype=torch.bfloat16)
    plain = {name: float_model(dtype) for name, dtype in (("bf16", torch.bfloat16), ("float32", torch.float32))}
    times: dict[str, list[tuple[float, float]]] = {}
    switch: dict[str, dict[str, Any]] = {}
    for model in plain.values():
        decode(model, 1)
    for _ in range(options.rounds):
        for bits in options.bits:
            for name, model in plain.items():
                times.setdefault(name, []).append(decode(model, options.tokens))
            began = time.process_time()
            set_bits(live, bits)
            decode(live, 1)
            cpu = round(time.process_time() - began, 2)
            switch[str(bits)] = {"first_call_cpu_s": cpu, "resident_bytes": resident_bytes(live)}
            times.setdefault(str(bits), []).append(decode(live, options.tokens))
    return [{"what": name, **row(found, times["bf16"]), **switch.get(name, {})} for name, found in times.items()]


def tiny(dtype: torch.dtype) -> nn.Module:
    """A Llama of two small layers."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes)
    return transformers.LlamaForCausalLM(config).to(dtype).eval()


def read(folder: Path, gguf: str | None) -> Callable[[torch.dtype], nn.Module]:
    """Makes the model of a transformers folder in a dtype."""
    import transformers

    if gguf is None:
        return lambda dtype: transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    found = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    settings = {k: v for k, v in found.config.to_dict().items() if k not in ("quantization_config", "architectures")}

    def make(dtype: torch.dtype) -> nn.Module:
        model = type(found)(type(found.config)(**settings))
        model.load_state_dict(found.state_dict())
        return model.to(dtype).eval()

    return make


def main() -> None:
    """Write the rows, and say them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--gguf")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--scheme", default="nested")
    parser.add_argument("--group-size", type=int, default=0)
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4, 3, 2])
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.tiny and options.model is None:
        parser.error("give --model DIR, or --tiny")
    before = os.getloadavg()[0]
    rows = measure(options, tiny if options.tiny else read(options.model, options.gguf))
    for each in rows:
        print(each, flush=True)
    out = options.out or (None if options.tiny else ROOT / "results" / "cpu-decode.json")
    if out is not None:
        import platform

        import transformers

        versions = {"python": platform.python_version(), "torch": torch.__version__}
        record = {
            "command": command("cpu_decode").replace(str(options.model), "DIR"),
            "model": "tiny" if options.tiny else options.model.name,
            "device": f"CPU, {options.threads} threads, {torch.backends.cpu.get_cpu_capability()}",
            "busy": [round(before, 1), round(os.getloadavg()[0], 1)],
            "versions": {**versions, "transformers": transformers.__version__},
            "rows": rows,
        }
        write_json(out, record)


if __name__ == "__main__":
    main()
