"""Self-speculative decoding of a language model: how many drafted tokens are right, and what that brings.

    python benchmarks/speculate.py --model DIR                       # a table, and results/speculate-cpu.json
    python benchmarks/speculate.py --model DIR --kernels packed --dtype bfloat16 --device cuda --scheme nested \\
        --prompts FILE --tokens 128 --out results/speculate-h200.json

DIR is a transformers folder in float32 with its tokenizer. The model goes through `prepare` (weights only, groups,
round to nearest), `save` and `load`; or --artifact names a file that was made from it, by calibration for example.
FILE has a prompt on each line; without one, a few built-in prompts are taken. Each prompt is continued by plain greedy
decoding at --bits, and by `speculate` at each of --draft-bits and --lengths (0: adapted).

A row has

    acceptance         the share of right ones among drafted tokens that were judged
    tokens_per_pass    new tokens for each pass at --bits, 1 in plain decoding
    ratio              the time of plain decoding over that of drafts, median of the prompts, which both take in turn
    identical          how many of the `prompts` have the text of plain decoding, token by token
    first_difference   where others first differ: how far plain decoding's likeliest token is ahead of the next
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from perplexity import embedding_rules
from timing import command
from torch import Tensor, nn

from bitdial import QuantConfig, load, prepare, save, set_bits, speculate
from bitdial.files.atomic import write_json

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "List five things to pack for a hike in the mountains.",
    "What is the difference between a comet and an asteroid?",
    "Write a Python function that returns the largest number in a list.",
    "Give me a simple recipe for pancakes.",
    "How does a bicycle stay upright?",
    "Describe the water cycle to a child.",
)


def live_model(model: nn.Module, options: argparse.Namespace, sample: Tensor) -> Any:
    """The live model of the file that `options` name, or of one made for the moment."""
    dtype = getattr(torch, options.dtype) if options.dtype else None
    how: dict[str, Any] = {"kernels": options.kernels, "device": options.device, "dtype": dtype}
    if options.artifact is not None:
        return load(options.artifact, model, **how)
    config = QuantConfig(
        bit_choices=tuple(options.bit_choices), scheme=options.scheme, activations="float", keep_first_last=False,
        group_size=options.group_size or None, start="max", rules=embedding_rules(options.embedding_bits),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(prepare(model, config, {"input_ids": sample}), path)
        return load(path, model, **how)


def encoded(tokenizer: Any, prompts: list[str], device: str) -> list[Tensor]:
    """Tokens (1, length) of each prompt, as a user's turn where the tokenizer knows turns."""
    found = []
    for prompt in prompts:
        if tokenizer.chat_template:
            turn = [{"role": "user", "content": prompt}]
            prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        found.append(tokenizer(prompt, return_tensors="pt").input_ids.to(device))
    return found


class Timed:
    """Texts of one decoder, and the seconds that each of them took."""

    def __init__(self, decoder: Any, tokens: int):
        self.decoder, self.tokens = decoder, tokens
        self.texts: list[Tensor] = []
        self.seconds: list[float] = []
        self.new = 0
        self.statistics: list[Any] = []

    def warm_up(self, prompt: Tensor) -> None:
        """Generate a little that is not counted."""
        self.decoder.generate(prompt, max_new_tokens=4, do_sample=False)

    def run(self, prompt: Tensor) -> None:
        """Continue one prompt."""
        began = time.perf_counter()
        text = self.decoder.generate(prompt, max_new_tokens=self.tokens, do_sample=False)[0].cpu()
        self.seconds.append(time.perf_counter() - began)
        self.texts.append(text)
        self.new += len(text) - prompt.shape[1]
        self.statistics.append(getattr(self.decoder, "statistics", None))

    def total(self, name: str) -> int:
        """The sum of a count of speculative decoding."""
        return sum(getattr(each, name) for each in self.statistics)


def margin(model: Any, plain: Tensor, other: Tensor) -> float | None:
    """How far the likeliest token is ahead of the next where two texts first differ; None if they do not."""
    same = min(len(plain), len(other))
    differs = (plain[:same] != other[:same]).nonzero()
    if not len(differs):
        return None if len(plain) == len(other) else float("nan")
    with torch.no_grad():
        logits = model(input_ids=plain[None, : int(differs[0])].to(model.device)).logits[0, -1].float()
    first, second = logits.topk(2).values.tolist()
    return float(first - second)


def measure(live: Any, prompts: list[Tensor], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each draft width and length. Plain and speculative decoding take turns, prompt by prompt."""
    set_bits(live, options.bits)
    rows = []
    for draft_bits in options.draft_bits:
        for length in options.lengths:
            decoder = speculate(live, draft_bits, draft_length=length or None)
            plain, fast = Timed(live, options.tokens), Timed(decoder, options.tokens)
            for each in (plain, fast):
                each.warm_up(prompts[0])
            for prompt in prompts:
                plain.run(prompt)
                fast.run(prompt)
            margins = [margin(live, a, b) for a, b in zip(plain.texts, fast.texts, strict=True)]
            ratios = [a / b for a, b in zip(plain.seconds, fast.seconds, strict=True)]
            row = {
                "what": "speculative", "bits": options.bits, "draft_bits": draft_bits,
                "draft_length": length or "adapted", "batch": 1, "prompts": len(prompts),
                "tokens": fast.total("tokens"), "passes": fast.total("passes"), "drafted": fast.total("drafted"),
                "judged": fast.total("judged"), "accepted": fast.total("accepted"),
                "acceptance": round(fast.total("accepted") / max(1, fast.total("judged")), 4),
                "tokens_per_pass": round(fast.total("tokens") / fast.total("passes"), 3),
                "tokens_per_s": round(fast.new / sum(fast.seconds), 2),
                "plain_tokens_per_s": round(plain.new / sum(plain.seconds), 2),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
                "identical": margins.count(None), "first_difference": [m for m in margins if m is not None],
                "bit_exact": decoder.bit_exact,
            }  # fmt: skip
            print(row, flush=True)
            rows.append(row)
    return rows


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--artifact", type=Path, help="a file made from the model; else it is rounded to nearest")
    parser.add_argument("--bits", type=int, default=8, help="the width that checks")
    parser.add_argument("--draft-bits", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4, 0], help="tokens drafted at a time; 0 adapts")
    parser.add_argument("--bit-choices", type=int, nargs="+", default=[8, 4, 3, 2])
    parser.add_argument("--scheme", default="double_rounding")
    parser.add_argument("--group-size", type=int, default=32, help="0 for a scale per row")
    parser.add_argument("--embedding-bits", type=int)
    parser.add_argument("--kernels", default="float")
    parser.add_argument("--dtype", help="bfloat16 or float16, for packed kernels")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--prompts", type=Path, help="a text file with a prompt on each line")
    parser.add_argument("--tokens", type=int, default=24, help="new tokens for each prompt")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "speculate-cpu.json")
    options = parser.parse_args()
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    lines = options.prompts.read_text(encoding="utf-8").splitlines() if options.prompts else list(PROMPTS)
    prompts = encoded(tokenizer, [line for line in lines if line.strip()], options.device)
    live = live_model(model, options, prompts[0].cpu())
    live.generation_config = model.generation_config
    shared = {
        "model": options.model.name, "kernels": options.kernels, "dtype": options.dtype or "float32",
        "scheme": options.scheme, "group_size": options.group_size, "bit_choices": options.bit_choices,
        "codes": "artifact" if options.artifact else "round to nearest",
    }  # fmt: skip
    about = {
        "command": command("speculate").replace(str(options.model), "DIR"),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu",
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__},
    }  # fmt: skip
    rows = [{**shared, **row, **about} for row in measure(live, prompts, options)]
    write_json(options.out, json.loads(json.dumps(rows)))


if __name__ == "__main__":
    main()
