"""Perplexity of a language model from one file at each width, nothing trained.

    python benchmarks/perplexity.py --model DIR --text FILE      # a table, and results/perplexity-cpu.json
    ... --activations dynamic                                    # weights and activations at the same width

DIR is a transformers folder in float32 with its tokenizer, FILE plain text (or .xz). The last characters of the text
are cut into rows of `--length` tokens. The model goes through `prepare`, `save` and `load`; the live model, on float
kernels, reads the rows at each width. Activations stay in float unless `--activations` says otherwise. `ratio` is its
perplexity over that of the float model on the same rows.
"""

import argparse
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
from timing import command
from torch import Tensor, nn

from bitdial import QuantConfig, load, perplexity, prepare, save, set_bits, token_rows
from bitdial.train.perplexity import read_text

ROOT = Path(__file__).resolve().parent.parent


def measure(model: nn.Module, rows: Tensor, config: QuantConfig, device: str) -> dict[str, Any]:
    """The perplexity of `model` in float and of its file at each width; the file's bytes."""
    prepared = prepare(model, config, {"input_ids": rows[:1, :64]})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(prepared, path)
        del prepared
        live = load(path, model, kernels="float", device=device)
        size = path.stat().st_size
    found = {"float": perplexity(model.to(device), rows)}
    for bits in config.bit_choices:
        set_bits(live, bits)
        found[str(bits)] = perplexity(live, rows)
        print(f"{bits} bits: {found[str(bits)]:.2f}, {found[str(bits)] / found['float']:.4f} of float", flush=True)
    ratios = {bits: round(value / found["float"], 4) for bits, value in found.items() if bits != "float"}
    return {"perplexity": {bits: round(value, 3) for bits, value in found.items()}, "ratio": ratios, "file_bytes": size}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 6, 4, 3])
    parser.add_argument("--scheme", default="double_rounding")
    parser.add_argument("--group-size", type=int, default=32, help="0 for a scale per row")
    parser.add_argument("--group-scales", default="integer")
    parser.add_argument("--activations", default="float", help="as QuantConfig has it: float, dynamic, auto")
    parser.add_argument("--start", default="max")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "perplexity-cpu.json")
    options = parser.parse_args()
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    rows = token_rows(read_text(options.text), tokenizer, length=options.length, rows=options.rows)
    config = QuantConfig(
        bit_choices=tuple(options.bits), scheme=options.scheme, activations=options.activations, keep_first_last=False,
        group_size=options.group_size or None, group_scales=options.group_scales, start=options.start,
    )  # fmt: skip
    record = {
        "command": command("perplexity").replace(str(options.model), "DIR").replace(str(options.text), "FILE"),
        "model": options.model.name, "text": options.text.name, "rows": list(rows.shape),
        "config": config.to_dict(), **measure(model, rows, config, options.device),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__},
    }  # fmt: skip
    records = json.loads(options.out.read_text()) if options.out.exists() else []
    records = [r for r in records if (r["model"], r["config"]) != (record["model"], record["config"])]
    options.out.write_text(json.dumps([*records, record], indent=1) + "\n")
    print(record["perplexity"], record["ratio"])


if __name__ == "__main__":
    main()
