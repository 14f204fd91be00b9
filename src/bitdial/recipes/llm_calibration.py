"""A language model and a text in; a file that is good at every width, and its numbers, out. Nothing is trained.

The model is calibrated block by block on rows from the beginning of the text, and its perplexity is taken at each width
on rows from the end. A run that is killed goes on from its checkpoint, which is gone once the file is there.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitdial._version import __version__
from bitdial.artifact import save
from bitdial.calibrate import CalibrateConfig, calibrate
from bitdial.dial.dial import at_bits
from bitdial.errors import ArtifactError, ConfigError
from bitdial.files.atomic import write_json
from bitdial.live.load import load
from bitdial.prepare.config import QuantConfig, Rule
from bitdial.prepare.prepare import prepare
from bitdial.prepare.rotate import rotate
from bitdial.recipes.calibration import check_out
from bitdial.recipes.language_model import LanguageModel
from bitdial.train.perplexity import CHARACTERS_PER_TOKEN, perplexity, read_text, token_logits, token_rows

ROWS_TO_PREPARE = 4
TOKENS_TO_COMPARE = 16


@dataclass(frozen=True, kw_only=True)
class LlmCalibration:
    """One run: a float model, rows (rows, length) of tokens to calibrate on and to measure on, and what comes out."""

    language: LanguageModel
    rows: Tensor
    held_out: Tensor
    quant: QuantConfig
    config: CalibrateConfig
    out: Path
    rotated: str | None = None  # how, as `rotate` takes it
    batch: int = 4  # rows that go through the model at a time
    replace: bool = False
    progress: bool = True

    @property
    def numbers(self) -> Path:
        """The JSON file beside the artifact."""
        return self.out.with_suffix(".json")

    @property
    def checkpoint(self) -> Path:
        """Where the run saves its state."""
        return self.out.with_suffix(".ckpt")

    def check_places(self) -> None:
        """Raise ConfigError unless the run may write: looked at before any work."""
        check_out(self.out)
        for path in (self.out, self.numbers):
            if path.exists() and not self.replace:
                raise ConfigError(f"{path} is there already; choose another --out, or replace it with --replace")


def read_rows(path: Path, tokenizer: Any, *, rows: int, held_out: int, length: int) -> tuple[Tensor, Tensor]:
    """Rows of `length` tokens from the beginning of the text at `path`, and others from its end."""
    text = read_text(path)
    front = token_rows(text[: CHARACTERS_PER_TOKEN * rows * length], tokenizer, length=length)[:rows]
    back = token_rows(text, tokenizer, length=length, rows=held_out)
    if len(front) < rows or CHARACTERS_PER_TOKEN * (rows + held_out) * length > len(text):
        whole = token_rows(text, tokenizer, length=length)
        if len(whole) < rows + held_out:
            raise ConfigError(
                f"{path}: its {len(whole)} rows of {length} tokens are fewer than {rows} to calibrate on and "
                f"{held_out} to measure on; give more text, or fewer --rows and --held-out, or a smaller --length"
            )
        front = whole[:rows]
    return front, back


def embedding_rules(model: Any, bits: int) -> tuple[Rule, ...]:
    """Rules by which the embedding and the head of a model of transformers have that width always."""
    names = {module: name for name, module in model.named_modules()}
    found = [names[model.get_input_embeddings()], names[model.get_output_embeddings()]]
    return tuple(Rule(pattern=name, bits=bits, activations="float") for name in found)


def calibrate_llm(run: LlmCalibration, *, tell: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Calibrate, measure and save; the numbers, which are in the JSON file too. `tell` gets a line for each stage."""
    run.check_places()
    began, model = time.monotonic(), run.language.model
    device = next(model.parameters()).device
    level = perplexity(model, run.held_out)
    tell(f"{run.language.name}: perplexity {level:.2f} in float, on {len(run.held_out)} rows from the end of the text")
    source = model if run.rotated is None else rotate(model, residual=run.rotated)
    prepared = prepare(source, run.quant, {"input_ids": run.rows[:ROWS_TO_PREPARE].to(device)}).eval()
    widths = ", ".join(map(str, run.quant.bit_choices))
    tell(f"Calibrating at {widths} bits on {len(run.rows)} rows; run the same command again if it is interrupted")
    batches = [{"input_ids": part} for part in run.rows.to(device).split(run.batch)]
    started = time.monotonic()
    report = calibrate(prepared, batches, run.config, checkpoint=run.checkpoint, progress=run.progress)
    seconds = time.monotonic() - started
    found = {}
    for bits in run.quant.bit_choices:
        with at_bits(prepared, (bits, run.config.activation_bits or bits)):
            found[str(bits)] = perplexity(prepared, run.held_out)
        tell(f"{bits} bits: perplexity {found[str(bits)]:.2f}")
    metrics = {
        "float_perplexity": level,
        "perplexity": found,
        "held_out": {"rows": len(run.held_out), "length": run.held_out.shape[1]},
        "tokens": run.rows.numel(),
        "calibration": report.to_dict(),
        "run": {"recipe": "calibrate-llm", "name": f"{run.language.name}, effort {run.config.effort}"},
    }
    save(prepared, run.out, metrics=metrics)
    _check_reloaded(run, prepared)
    result = {
        "model": run.language.name,
        "artifact": run.out.name,
        "bytes": run.out.stat().st_size,
        "bitdial": __version__,
        "device": str(device),
        "quant": run.quant.to_dict(),
        "rotated": run.rotated,
        **metrics,
        "seconds": {"calibrate": seconds, "all": time.monotonic() - began},
    }
    write_json(run.numbers, result)
    run.checkpoint.unlink(missing_ok=True)
    return result


@torch.no_grad()
def _check_reloaded(run: LlmCalibration, prepared: nn.Module) -> None:
    """Raise ArtifactError unless the file, loaded, gives the logits of `prepared`, bit for bit."""
    device = next(prepared.parameters()).device
    tokens = run.held_out[:1, :TOKENS_TO_COMPARE].to(device)
    live = load(run.out, run.language.model, device=device, kernels="float")
    for bits in run.quant.bit_choices:
        with at_bits(live, bits), at_bits(prepared, bits):
            if not torch.equal(token_logits(live, tokens), token_logits(prepared, tokens)):
                raise ArtifactError(f"{run.out}, loaded, differs from what was calibrated at {bits} bits; report this")
