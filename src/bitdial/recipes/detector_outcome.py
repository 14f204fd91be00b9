"""What a run of the recipe for detectors comes to: numbers at every width, result rows, some images for the page."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitdial._version import __version__
from bitdial.dial.dial import at_bits
from bitdial.errors import ArtifactError
from bitdial.live.load import load
from bitdial.prepare.model_call import evaluating
from bitdial.recipes.detector_data import DetectionImages
from bitdial.recipes.detector_options import DetectorOptions
from bitdial.recipes.detector_parts import part_errors
from bitdial.recipes.run import RecipeRun
from bitdial.train import evaluate

TO_COMPARE = 8  # images on which the parts are compared
KEPT = ("box_ap", "mask_ap", "box_ap50", "mask_ap50")  # in result rows


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One image and what is found on it, by setting; the float model's first."""

    name: str
    image: Tensor
    objects: int
    found: dict[str, dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class DetectorOutcome:
    """A finished run: the float detector, the file, its numbers, a result row for each width, images for the page."""

    float_model: nn.Module
    artifact: Path
    result: dict[str, Any]
    rows: list[dict[str, Any]]
    seen: list[Seen]


def rounded(values: Any) -> dict[str, float | None]:
    """As JSON has them, which has no NaN."""
    return {name: None if value != value else round(value, 6) for name, value in values.items()}


def listed(values: Any) -> str:
    """'box AP 41.2, mask AP 38.0'."""
    short = {"box_ap": "box AP", "mask_ap": "mask AP"}
    texts = {words: values[name] for name, words in short.items() if name in values}
    return ", ".join(f"{words} {'-' if v is None or v != v else f'{100 * v:.1f}'}" for words, v in texts.items())


def numbers(
    run: RecipeRun[DetectorOptions], live: nn.Module, float_model: nn.Module, batches: Any, measure: Any
) -> dict[str, Any]:
    """What the file, loaded, comes to at each width, and how far its parts are from the float model's."""
    options = run.options
    device = next(float_model.parameters()).device
    found = evaluate(live, batches, options.bit_choices, measure=measure)
    images = [inputs for inputs, _ in batches[:TO_COMPARE]]
    errors = part_errors(float_model, live, images, options.bit_choices)
    return {
        "model": options.model,
        "method": options.method,
        "artifact": run.artifact.name,
        "widths": {str(bits): rounded(values) for bits, values in found.items()},
        "parts": {part: {str(b): None if v != v else v for b, v in one.items()} for part, one in errors.items()},
        "compared_on": len(images),
        "data": {
            "folder": options.data.resolve().name,
            "split": "val",
            "images": len(batches),
            "objects": sum(len(targets[0]["boxes"]) for _, targets in batches),
        },
        "settings": run.record()["settings"],
        "command": options.command,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        "versions": {"bitdial": __version__, "python": platform.python_version(), "torch": torch.__version__},
    }


def look_at(
    live: nn.Module, float_model: nn.Module, images: DetectionImages, widths: Sequence[int], *, count: int
) -> list[Seen]:
    """What the float model and the live one find at each width on `count` images, from few objects to many."""
    order = sorted(range(len(images)), key=lambda place: len(images[place][1][0]["boxes"]))
    chosen = [order[(2 * number + 1) * len(order) // (2 * count)] for number in range(min(count, len(order)))]
    seen = []
    for place in chosen:
        inputs, targets = images[place]
        found = {"float": first_found(float_model, inputs)}
        for bits in widths:
            with at_bits(live, bits):
                found[width_text(bits)] = first_found(live, inputs)
        entry = images.images.entries[place]
        seen.append(Seen(name=entry.image, image=inputs[0], objects=len(targets[0]["boxes"]), found=found))
    return seen


def width_text(bits: int) -> str:
    """'4 bits'."""
    return f"{bits} bits"


def first_found(model: nn.Module, images: list[Tensor]) -> dict[str, Tensor]:
    """What a detector finds on the first of `images`."""
    with evaluating(model):
        found: dict[str, Tensor] = model(images)[0]
    return found


def check_reloaded(
    run: RecipeRun[DetectorOptions], model: nn.Module, float_model: nn.Module, images: list[Tensor]
) -> None:
    """Raise ArtifactError unless the file, loaded, finds what the trained `model` finds, bit for bit, on the CPU.

    Both models are moved there, in place.
    """
    model, float_model = model.cpu(), float_model.cpu()
    live = load(run.artifact, float_model)
    images = [image.cpu() for image in images]
    for bits in run.options.bit_choices:
        with at_bits(model, bits), at_bits(live, bits):
            found = [first_found(one, images) for one in (model, live)]
        if any(not torch.equal(found[0][name], found[1][name]) for name in found[0]):
            raise ArtifactError(f"{run.artifact}, loaded, differs from what was trained at {bits} bits; report this")


def rows_of(run: RecipeRun[DetectorOptions], result: dict[str, Any]) -> list[dict[str, Any]]:
    """A result row for each width; precisions are in points."""
    options = run.options

    def points(values: Any, name: str) -> float | None:
        value = values.get(name)
        return None if value is None or value != value else round(100 * value, 2)

    always = {"model": options.model, "method": options.method, "scheme": options.scheme}
    found: list[dict[str, Any]] = []
    for bits, values in result["widths"].items():
        row: dict[str, Any] = always | {"bits": int(bits)}
        row |= {name: points(values, name) for name in KEPT}
        row |= {f"float_{name}": points(result["float"], name) for name in ("box_ap", "mask_ap")}
        row |= {
            "bit_choices": list(options.bit_choices),
            "seed": options.seed,
            "max_detections": options.max_detections,
        }
        epochs = options.epochs if options.method == "trained" else 0
        row |= {"float_epochs": options.float_epochs, "epochs": epochs, "seconds": round(result["seconds"], 1)}
        row |= {name: result[name] for name in ("data", "device", "versions", "command")}
        found.append(row)
    return found
