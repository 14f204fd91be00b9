"""Bits by layer of a language model, at the bytes of a uniform width: a plan found by measuring, beside uniform widths.

    python benchmarks/llm_plan.py model.safetensors --model DIR --text FILE --bits 3 --seconds 1800

`model.safetensors` is the artifact of a decoder with float activations, DIR the transformers folder in float32 that it
was made of, FILE plain text (or .xz). The search sees rows of tokens from the beginning of the text, `--rows` are read
from its end, as in benchmarks/perplexity.py. Rows go to results/smollm2-plans.json; those of the same settings are
replaced.
"""

import argparse
import time
from pathlib import Path

import torch
from timing import command

from bitdial import load, perplexity, read_artifact, set_bits, token_rows
from bitdial.files.atomic import read_json, write_json
from bitdial.recipes.language_model import LanguageModel
from bitdial.recipes.llm_plans import EVERY, find_llm_plan, first_rows
from bitdial.train.perplexity import read_text

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Search, test, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="the artifact")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--bits", type=int, default=3, help="the uniform width whose bytes are the budget")
    parser.add_argument("--search-rows", type=int, default=4)
    parser.add_argument("--seconds", type=float, help="time limit of the search")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "smollm2-plans.json")
    options = parser.parse_args()
    import transformers

    artifact, language = read_artifact(options.file), LanguageModel.read(options.model)
    front = first_rows(options.text, language.tokenizer, rows=options.search_rows, length=options.length)
    rows = token_rows(read_text(options.text), language.tokenizer, length=options.length, rows=options.rows)
    began = time.monotonic()
    found, costs = find_llm_plan(
        artifact, language, front, bits=options.bits, device=options.device, seconds=options.seconds
    )
    seconds, model = time.monotonic() - began, language.model
    live = load(artifact, model, device=options.device, kernels="float")
    measured = {"float": perplexity(model, rows)}
    beside = [bits for bits in artifact.bit_choices if 0 <= bits - options.bits <= 1]
    for name, setting in {**{f"{bits} bits": bits for bits in beside}, "plan": found.plan}.items():
        set_bits(live, setting)
        measured[name] = perplexity(live, rows)
        print(f"{name}: {measured[name]:.3f}, {measured[name] / measured['float']:.4f} of float", flush=True)
    row = {
        "file": options.file.name, "model": options.model.name, "bits": options.bits,
        "perplexity": {name: round(value, 3) for name, value in measured.items()},
        "bytes": costs.of(found.plan)["bytes"], "uniform_bytes": {str(b): costs.of(b)["bytes"] for b in beside},
        "kl": found.distance, "uniform_kl": found.uniform_distance, "tokens": front.numel() // EVERY,
        "measured": found.measured, "stopped": found.stopped, "seconds": round(seconds, 1),
        "trajectory": [[one.plans, round(one.seconds, 1), one.distance, one.by] for one in found.trajectory],
        "plan": {layer: bits[0] for layer, bits in found.plan.items()},
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "command": command("llm_plan"),
    }  # fmt: skip
    known = read_json(options.out) if options.out.exists() else []
    keys = ("file", "model", "bits")
    write_json(options.out, [*(one for one in known if any(one[k] != row[k] for k in keys)), row])


if __name__ == "__main__":
    main()
