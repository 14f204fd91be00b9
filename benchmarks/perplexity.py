"""Perplexity of a language model from one file at each width, weights only, nothing trained.

    python benchmarks/perplexity.py --model DIR --text FILE      # a table, and results/perplexity-cpu.json

DIR is a transformers folder in float32 with its tokenizer, FILE plain text (or .xz). The last characters of the text
are cut into rows of `--length` tokens. The model goes through `prepare`, `save` and `load`; the live model, on float
kernels, reads the rows at each width. `ratio` is its perplexity over that of the float model on the same rows.
"""

import argparse
import json
import lzma
import math
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import command
from torch import Tensor, nn

from bitdial import QuantConfig, load, prepare, save, set_bits

ROOT = Path(__file__).resolve().parent.parent


def read_rows(text: Path, tokenizer: Any, rows: int, length: int) -> Tensor:
    """The last tokens of the text (rows, length): those of its last 8 characters a token."""
    content = lzma.decompress(text.read_bytes()) if text.suffix == ".xz" else text.read_bytes()
    tail = content.decode("utf-8")[-8 * rows * length :]
    tokens = tokenizer(tail, return_tensors="pt").input_ids[0]
    return tokens[-rows * length :].reshape(rows, length)


def perplexity(model: nn.Module, rows: Tensor, batch: int = 4) -> float:
    """exp of the mean negative log likelihood of each row's tokens but the first."""
    total = 0.0
    with torch.no_grad():
        for part in rows.split(batch):
            logits = model(input_ids=part, use_cache=False).logits[:, :-1].float()
            total += float(F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / (rows.numel() - len(rows)))


def measure(model: nn.Module, rows: Tensor, config: QuantConfig, device: str) -> dict[str, Any]:
    """The perplexity of `model` in float and of its file at each width; the file's bytes."""
    prepared = prepare(model, config, {"input_ids": rows[:1, :64]})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(prepared, path)
        del prepared
        live = load(path, model, kernels="float", device=device)
        size = path.stat().st_size
    found = {"float": perplexity(model.to(device), rows.to(device))}
    for bits in config.bit_choices:
        set_bits(live, bits)
        found[str(bits)] = perplexity(live, rows.to(device))
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
    parser.add_argument("--start", default="max")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "perplexity-cpu.json")
    options = parser.parse_args()
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    rows = read_rows(options.text, tokenizer, options.rows, options.length).to(options.device)
    config = QuantConfig(
        bit_choices=tuple(options.bits), scheme=options.scheme, activations="float", keep_first_last=False,
        group_size=options.group_size or None, group_scales=options.group_scales, start=options.start,
    )  # fmt: skip
    record = {
        "command": command("perplexity").replace(str(options.model), "DIR").replace(str(options.text), "FILE"),
        "model": options.model.name, "text": options.text.name, "rows": list(rows.shape),
        "config": config.to_dict(), **measure(model, rows.cpu(), config, options.device),
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
