"""How far the parts of a detector are from the float model's, each on the inputs that the float model gives it.

So the error of a part is its own: what the parts before it add is not in it, and heads that look at boxes see the same
boxes. The error is the square of the difference over the square of the float output.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bitdial.dial.dial import at_bits
from bitdial.dial.plan import BitPlan, LayerBits
from bitdial.errors import ConfigError
from bitdial.prepare.model_call import evaluating

# Which modules are which part, by their names in torchvision's detectors and in ours; the first that is there counts.
PARTS: dict[str, tuple[str, ...]] = {
    "backbone": ("backbone.body",),
    "feature pyramid": ("backbone.fpn",),
    "backbone and feature pyramid": ("backbone",),
    "region proposals": ("rpn.head",),
    "box head": ("roi_heads.box_head",),
    "box and class predictors": ("roi_heads.box_predictor",),
    "mask head": ("roi_heads.mask_head", "mask_branch"),
    "mask predictor": ("roi_heads.mask_predictor",),
    "head": ("head",),
}


def parts_of(model: nn.Module) -> dict[str, str]:
    """The parts of a detector and where they are; of another model, its children."""
    there = {name for name, module in model.named_modules() if next(module.parameters(), None) is not None}
    found = {part: name for part, names in PARTS.items() for name in names if name in there}
    if "backbone" in found or "feature pyramid" in found:
        found.pop("backbone and feature pyramid", None)
    return found or {name: name for name, _ in model.named_children() if name in there}


def part_errors(
    float_model: nn.Module,
    model: nn.Module,
    batches: Iterable[Any],
    settings: Sequence[LayerBits | BitPlan | str],
    *,
    parts: Mapping[str, str] | None = None,
) -> dict[str, dict[Any, float]]:
    """The relative error of each part of `model` at each of `settings`; NaN for a part that was not called.

    A batch is a list of images. `parts` are names and modules of both models; None takes `parts_of(float_model)`.
    """
    places = parts_of(float_model) if parts is None else dict(parts)
    modules = dict(float_model.named_modules())
    if lost := [place for place in places.values() if place not in modules]:
        raise ConfigError(
            f"the model has no part {lost[0]!r}; its parts are {', '.join(parts_of(float_model).values())}"
        )
    apart = {part: dict.fromkeys(settings, 0.0) for part in places}
    whole = dict.fromkeys(places, 0.0)
    with evaluating(float_model), evaluating(model):
        for images in batches:
            calls = _record(float_model, images, places)
            for part, _, output in calls:
                whole[part] += _square(output)
            for setting in settings:
                with at_bits(model, setting):
                    for part, inputs, output in calls:
                        found = model.get_submodule(places[part])(*inputs)
                        apart[part][setting] += _square(_difference(found, output))
    return {
        part: {setting: value / whole[part] if whole[part] else float("nan") for setting, value in errors.items()}
        for part, errors in apart.items()
    }


def _record(
    model: nn.Module, images: Any, places: Mapping[str, str]
) -> list[tuple[str, tuple[Any, ...], list[Tensor]]]:
    """What each part is given and gives as the model looks at `images`, call by call."""
    calls: list[tuple[str, tuple[Any, ...], list[Tensor]]] = []
    hooks = []
    for part, place in places.items():

        def hook(module: nn.Module, inputs: Any, output: Any, part: str = part) -> None:
            calls.append((part, inputs, _floats(output)))

        hooks.append(model.get_submodule(place).register_forward_hook(hook))
    try:
        model(images)
    finally:
        for one in hooks:
            one.remove()
    return calls


def _floats(output: Any) -> list[Tensor]:
    """The tensors in what a part returns."""
    return [leaf.detach() for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _difference(found: Any, output: list[Tensor]) -> list[Tensor]:
    return [a - b for a, b in zip(_floats(found), output, strict=True)]


def _square(tensors: list[Tensor]) -> float:
    return float(sum((one.double().square().sum() for one in tensors), torch.zeros((), dtype=torch.double)))
