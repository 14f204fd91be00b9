"""The demo: the whole path on data that needs no download, and the proof that each step kept its promise."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bitdial.artifact import read_artifact, sizes
from bitdial.dial.dial import set_bits
from bitdial.errors import ArtifactError
from bitdial.files.atomic import write_json
from bitdial.live.engines.exact import code_exact
from bitdial.live.load import load
from bitdial.recipes import RECIPES, RecipeOptions, RecipeOutcome
from bitdial.report import Samples, demo_report


@dataclass(frozen=True)
class DemoOutcome:
    """What the demo shows: the JSON result, the page, and the checks by width."""

    result: dict[str, Any]
    page: Path
    identical_logits: dict[int, bool]
    exact_agreement: dict[int, float]


def run_demo(out: Path, *, epochs: int | None = None, progress: bool = True) -> DemoOutcome:
    """Train on the digits, save, reload and switch; leaves demo.safetensors, demo.json and demo.html in `out`.

    `epochs`, of the float and of the joint training each, are the recipe's unless said.
    """
    outcome = RECIPES["digits"](RecipeOptions(out=out, name="demo", epochs=epochs, progress=progress, replace=True))
    artifact = read_artifact(outcome.artifact)
    live = load(artifact)
    identical, agreement = _compare(outcome, live)
    size = sizes(artifact)
    assert outcome.float_model is not None
    float_bytes = sum(t.nbytes for t in outcome.float_model.state_dict().values())
    result = {
        "float_top1": outcome.float_top1,
        "top1": {str(b): v for b, v in outcome.top1.items()},
        "bytes": {
            "float": float_bytes,
            "artifact": size["file"],
            "separate": {str(b): v for b, v in size["separate"].items()},
        },
        "artifact": outcome.artifact.name,
    }
    write_json(out / "demo.json", result)
    page = out / "demo.html"
    tested_on = Samples(sum(len(labels) for _, labels in outcome.test), "test images")
    demo_report(page, result, outcome.history.to_dict(), artifact, live, tested_on)
    return DemoOutcome(result, page, identical, agreement)


def _compare(outcome: RecipeOutcome, live: torch.nn.Module) -> tuple[dict[int, bool], dict[int, float]]:
    """By width: whether the live model's logits equal the trained model's, and how often the exact argmax agrees."""
    exact = code_exact(live)
    identical, agreement = {}, {}
    for bits in outcome.top1:
        for model in (outcome.model, live, exact):
            set_bits(model, bits)
        with torch.no_grad():
            same, right, seen = True, 0, 0
            for images, _ in outcome.test:
                logits = live(images)
                same &= torch.equal(outcome.model(images), logits)
                right += int((exact(images).argmax(1) == logits.argmax(1)).sum())
                seen += len(images)
        identical[bits], agreement[bits] = same, right / seen
    if not all(identical.values()):
        raise ArtifactError(f"the reloaded model differs from the trained one: {identical}")
    return identical, agreement
