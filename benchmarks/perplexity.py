"""Perplexity of a language model from one file at each width, nothing trained.

    python benchmarks/perplexity.py --model DIR --text FILE      # a table, and results/perplexity-cpu.json
    ... --activations dynamic                                    # weights and activations at the same width
    python benchmarks/perplexity.py --model DIR --text FILE --calibrate quick --calibration-rows 16 \\
        --bits 8 4 3 2 --results results/smollm2-135m.json       # and a row for each width

DIR is a transformers folder in float32 with its tokenizer, FILE plain text (or .xz). The last characters of the text
are cut into rows of `--length` tokens. The model goes through `prepare`, `save` and `load`; the live model, on float
kernels, reads the rows at each width. Activations stay in float unless `--activations` says otherwise. `ratio` is its
perplexity over that of the float model on the same rows.

With --calibrate the prepared model is calibrated on rows from the beginning of the text, which is far from its end.
"""

import argparse
import json
import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from timing import command
from torch import Tensor, nn

from bitdial import (
    CalibrateConfig,
    QuantConfig,
    Rule,
    calibrate,
    load,
    perplexity,
    prepare,
    rotate,
    save,
    set_bits,
    token_rows,
)
from bitdial.calibrate.config import EFFORTS
from bitdial.train.perplexity import read_text

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Calibration:
    """How a model is calibrated: on `rows` (rows, length) of tokens, `batch` at a time; from a checkpoint on."""

    config: CalibrateConfig
    rows: Tensor
    batch: int
    checkpoint: Path | None = None

    def run(self, model: nn.Module) -> None:
        """Calibrate the prepared `model`, in place."""
        calibrate(
            model,
            [{"input_ids": part} for part in self.rows.split(self.batch)],
            self.config,
            checkpoint=self.checkpoint,
        )


def measure(
    model: nn.Module,
    rows: Tensor,
    config: QuantConfig,
    device: str,
    *,
    rotated: str | None = None,
    calibration: Calibration | None = None,
) -> dict[str, Any]:
    """The perplexity of `model` in float and of its file at each width, rotated or not; the file's bytes."""
    started = time.monotonic()
    prepared = prepare(rotate(model, residual=rotated) if rotated else model, config, {"input_ids": rows[:1, :64]}).to(
        device
    )
    if calibration is not None:
        calibration.run(prepared)
    seconds = time.monotonic() - started
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
    values = {bits: round(value, 3) for bits, value in found.items()}
    return {"perplexity": values, "ratio": ratios, "file_bytes": size, "seconds": round(seconds, 1)}


def embedding_rules(bits: int | None) -> tuple[Rule, ...]:
    """Rules that put the embedding and the head at that width; none without it."""
    if bits is None:
        return ()
    return Rule(type="Embedding", bits=bits), Rule(pattern="lm_head", bits=bits, activations="float")


def rows_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each width of a `record`."""
    config, found, calibrated = record["config"], record["perplexity"], record["calibrated"]
    return [
        {
            "method": f"calibrated {calibrated['effort']}" if calibrated else "round to nearest",
            "model": record["model"], "weights": config["scheme"], "group_size": config["group_size"],
            "activations": config["activations"], "rotated": record["rotated"],
            "bit_choices": list(config["bit_choices"]),
            "bits": bits, "perplexity": found[str(bits)], "float_perplexity": found["float"],
            "importance": calibrated["importance"] if calibrated else {},
            "scale_importance": calibrated["scale_importance"] if calibrated else {},
            "tolerance": calibrated["tolerance"] if calibrated else None,
            "tokens": calibrated["tokens"] if calibrated else 0, "seconds": record["seconds"],
            "seed": calibrated["seed"] if calibrated else None,
            "device": record["device"], "versions": record["versions"], "command": record["command"],
        }
        for bits in config["bit_choices"]
    ]  # fmt: skip


def add_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add `rows` to the file; those of the same settings are replaced."""
    outcomes = {"perplexity", "float_perplexity", "seconds", "device", "versions", "command"}

    def settings(row: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if key not in outcomes}

    known = json.loads(path.read_text()) if path.exists() else []
    new = [settings(row) for row in rows]
    kept = [row for row in known if settings(row) not in new]
    path.write_text(json.dumps([*kept, *rows], indent=1) + "\n")


def _measured(record: dict[str, Any]) -> tuple[Any, ...]:
    """What a record is of: a later one of the same takes its place."""
    return record["model"], record["config"], record.get("rotated"), record.get("calibrated")


def _calibration(options: argparse.Namespace, tokenizer: Any) -> Calibration:
    """What `options` say, on the first rows of the text."""
    settings = CalibrateConfig(
        effort=options.calibrate,
        iterations=options.iterations,
        importance=_by_width(options.importance),
        scale_importance=_by_width(options.scale_importance),
        tolerance=options.tolerance,
        seed=options.seed,
    )
    count = options.calibration_rows * options.length
    front = token_rows(read_text(options.text)[: 8 * count], tokenizer, length=options.length)
    return Calibration(settings, front[: options.calibration_rows], options.calibration_batch, options.checkpoint)


def _by_width(words: list[str]) -> dict[int, float]:
    return {int(bits): float(number) for bits, number in (each.split("=") for each in words)}


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
    parser.add_argument(
        "--embedding-bits", type=int, help="embedding and head at this width; else a tied pair is float"
    )
    parser.add_argument(
        "--rotate", choices=("merged", "online"), nargs="?", const="merged", help="rotate first, see bitdial.rotate"
    )
    parser.add_argument("--calibrate", choices=EFFORTS, help="calibrate on the beginning of the text")
    parser.add_argument("--calibration-rows", type=int, default=16)
    parser.add_argument("--calibration-batch", type=int, default=4, help="rows that go through the model at a time")
    parser.add_argument("--importance", nargs="+", default=[], metavar="BITS=NUMBER", help="of widths, such as 8=0.5")
    parser.add_argument(
        "--scale-importance", nargs="+", default=[], metavar="BITS=NUMBER", help="the same where scales are chosen"
    )
    parser.add_argument("--checkpoint", type=Path, help="where --calibrate keeps what it has done, to go on from")
    parser.add_argument("--tolerance", type=float, default=CalibrateConfig.tolerance, help="see CalibrateConfig")
    parser.add_argument("--iterations", type=int, help="of --calibrate medium and full, in each block")
    parser.add_argument("--seed", type=int, default=0, help="of --calibrate full")
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "perplexity-cpu.json")
    parser.add_argument("--results", type=Path, help="a file of rows, to which those of this run are added")
    options = parser.parse_args()
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
    rows = token_rows(read_text(options.text), tokenizer, length=options.length, rows=options.rows)
    config = QuantConfig(
        bit_choices=tuple(options.bits), scheme=options.scheme, activations=options.activations, keep_first_last=False,
        group_size=options.group_size or None, group_scales=options.group_scales, start=options.start,
        rules=embedding_rules(options.embedding_bits),
    )  # fmt: skip
    calibration = _calibration(options, tokenizer) if options.calibrate else None
    told = command("perplexity").replace(str(options.model), "DIR").replace(str(options.text), "FILE")
    record = {
        "command": told.replace(f" --checkpoint {options.checkpoint}", ""),
        "model": options.model.name, "text": options.text.name, "rows": list(rows.shape),
        "config": config.to_dict(), "rotated": options.rotate,
        "calibrated": calibration and {**calibration.config.to_dict(), "tokens": calibration.rows.numel()},
        **measure(model, rows, config, options.device, rotated=options.rotate, calibration=calibration),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "cpu",
        "versions": {"python": platform.python_version(), "torch": torch.__version__,
                     "transformers": transformers.__version__},
    }  # fmt: skip
    records = json.loads(options.out.read_text()) if options.out.exists() else []
    record = json.loads(json.dumps(record))  # as it is read again
    records = [r for r in records if _measured(r) != _measured(record)]
    options.out.write_text(json.dumps([*records, record], indent=1) + "\n")
    if options.results:
        add_rows(options.results, rows_of(record))
    print(record["perplexity"], record["ratio"])


if __name__ == "__main__":
    main()
