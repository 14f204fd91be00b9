"""The demo of mixed precision: one training and one file, with a plan for every budget of bits.

    float model -> all widths jointly -> Hessian traces -> plans drawn by HASB -> search -> measured front -> file

Plans are chosen by images held out of training. The test images are looked at once, at the end, for what was chosen.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bitdial.artifact import save
from bitdial.dial.dial import at_bits, set_bits
from bitdial.dial.plan import BitPlan
from bitdial.errors import ArtifactError
from bitdial.files.atomic import check_folder, write_json
from bitdial.live.load import load
from bitdial.models import build_model
from bitdial.planning import MeasuredFront, candidates, compare_fronts, evaluate_plans, measure_front, require_highspy
from bitdial.planning.cost import measure_costs
from bitdial.prepare.config import QuantConfig
from bitdial.prepare.prepare import prepare
from bitdial.prepare.transitions import add_transitions
from bitdial.recipes.digits import digits_data, digits_test
from bitdial.report import Known, Samples, front_report
from bitdial.sensitivity.hutchinson import hessian_trace
from bitdial.sensitivity.result import Sensitivity
from bitdial.train import ArrayData, Shift, TrainConfig, accuracy, batched, evaluate, train
from bitdial.train.float_loop import train_float

BIT_CHOICES = (4, 3, 2)
LABELS = {"hasb": "HASB", "random": "random sampling", "none": "no mixed stage"}

Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class MixedDemoOutcome:
    """What the demo shows: the JSON result, the measured front, the file and the page."""

    result: dict[str, Any]
    front: MeasuredFront
    artifact: Path
    page: Path


def run_mixed_demo(
    out: Path,
    *,
    epochs: int = 12,
    points: int = 60,
    progress: bool = True,
    tell: Callable[[str], None] = lambda text: None,
) -> MixedDemoOutcome:
    """Run the whole path on the digits; leaves mixed.safetensors, mixed.json and mixed.html in `out`.

    `epochs` are those of each stage, `points` the budgets of the sweep; `tell` is told what happens next.
    """
    require_highspy()
    check_folder("--out", out)
    x, y, x_held, y_held = digits_data(holdout=True)
    data = ArrayData(x, y, batch_size=64, augment=Shift(pixels=1))
    held_out = batched(x_held, y_held)

    tell(f"1. Training a small residual network on {len(x)} handwritten digits in float ...")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        float_model = build_model("cifar_resnet", blocks=1, width=8, in_channels=1)
    train_float(float_model, data, epochs=epochs, lr=3e-3, weight_decay=5e-5, progress=progress)
    tell("2. ... and on at 4, 3 and 2 bits jointly")
    model = prepare(float_model, QuantConfig(bit_choices=BIT_CHOICES), x[:256])
    train(model, data, TrainConfig(epochs=epochs, lr=2e-3), progress=progress)

    tell("3. Measuring how sensitive each layer is")
    sensitivity = hessian_trace(model, batched(x, y), progress=progress)

    tell("4. Training on with plans drawn by sensitivity (HASB) and, to compare, with plans drawn at random")
    models = {"hasb": add_transitions(model), "random": add_transitions(model), "none": model}
    for sampling in ("hasb", "random"):
        config = TrainConfig(epochs=epochs, lr=1e-3, alrs="off", sampling=sampling, sigma_warmup=epochs // 6)
        train(models[sampling], data, config, sensitivity=sensitivity, progress=progress)

    tell("5. Searching plans for budgets of bits, and measuring them on held-out digits")
    fronts = {
        sampling: _front(supernet, sensitivity, held_out, LABELS[sampling], points, progress)
        for sampling, supernet in models.items()
    }
    front = fronts["hasb"]

    tell("6. Saving one file, reloading it and switching it to each of its plans")
    path = out / "mixed.safetensors"
    metrics = {"recipe": "digits", "holdout": True, "front": front.summary()}
    save(models["hasb"], path, plans=front.plans, metrics=metrics, sensitivity=sensitivity)
    live, test = load(path), digits_test()
    _compare_logits(models["hasb"], live, front.plans, test)
    known = _known(float_model, front, live, held_out, test)
    top1: dict[str, Any] = {"float": known.float_tested}
    for sampling, supernet in models.items():
        top1[sampling] = {str(bits): value for bits, value in evaluate(supernet, test, BIT_CHOICES).items()}
    result = _result(path, fronts, top1, known)
    write_json(out / "mixed.json", result)
    page = out / "mixed.html"
    front_report(
        page,
        front,
        sensitivity,
        file=path.name,
        known=known,
        others=[fronts["random"], fronts["none"]],
        notes=[
            "HASB and random sampling trained equally long from the same start; 'no mixed stage' is that start.",
            "The network and the data are small: this page shows how the parts work, not how large the gains are.",
        ],
    )
    return MixedDemoOutcome(result, front, path, page)


def _front(
    model: nn.Module, sensitivity: Sensitivity, held_out: Batches, label: str, points: int, progress: bool
) -> MeasuredFront:
    """The front of plans for `model`: a sweep over average bits, and the alternatives at 3."""
    costs = measure_costs(model, held_out[0][0][:1])
    budgets, middle = {"average_bits": points}, {"average_bits": 3.0}
    found = candidates(model, sensitivity, costs, budgets, alternatives_at=middle, progress=progress)
    return measure_front(model, found, costs, held_out, accuracy, label=label, progress=progress)


def _compare_logits(trained: nn.Module, live: nn.Module, plans: dict[str, BitPlan], test: Batches) -> None:
    """Switch `live` to each of `plans` by its name; ArtifactError unless its logits are those of `trained`."""
    for name, plan in plans.items():
        set_bits(live, name)
        with torch.no_grad(), at_bits(trained, plan):
            if not all(torch.equal(live(images), trained(images)) for images, _ in test):
                raise ArtifactError(f"at the plan {name!r} the reloaded model differs from the trained one")


def _known(float_model: nn.Module, front: MeasuredFront, live: nn.Module, held_out: Batches, test: Batches) -> Known:
    """What the page shows beside the front: the float model, and the chosen plans on the test images."""
    plans = [one.plan for one in (*front.front, *front.uniform)]
    return Known(
        float_accuracy=accuracy(float_model, held_out),
        float_tested=accuracy(float_model, test),
        float_bytes=sum(tensor.nbytes for tensor in float_model.state_dict().values()),
        tested=evaluate_plans(live, plans, test, accuracy, progress=False),
        test=Samples(sum(len(labels) for _, labels in test), "test images"),
    )


def _result(path: Path, fronts: dict[str, MeasuredFront], top1: dict[str, Any], known: Known) -> dict[str, Any]:
    """What the demo found, as JSON values; accuracies from 0 to 1."""
    front = fronts["hasb"]
    means = compare_fronts(list(fronts.values()))
    return {
        "artifact": path.name,
        "bytes": path.stat().st_size,
        "top1": top1,
        "plans": {
            name: {"held_out": one.accuracy, "test": known.tested[one.plan], **one.costs}
            for name, one in front.within.items()
        },
        "front": {
            str(one.name): {"held_out": one.accuracy, "test": known.tested[one.plan], **one.costs}
            for one in front.front
        },
        "correlation": front.correlation,
        "mean_held_out": {sampling: means[found.label] for sampling, found in fronts.items()},
    }
