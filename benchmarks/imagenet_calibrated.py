"""Pretrained models on ImageNet at every width, calibrated on images without labels: one file for all widths.

    python benchmarks/imagenet_calibrated.py --weights DIR --images DIR --models mobilenet_v2 --efforts none quick

The first DIR has safetensors files as tools/imagenet_weights.py writes them. The second has the folders `calibration`
and `dev` with images, and labels.json: {"dev": {file: class}}. Models are calibrated on the first folder and measured
on the second, which nothing else looks at: top-1, agreement with the float model, and KL divergence from it.

Efforts: 'none' is round to nearest with balanced scales, the others are those of CalibrateConfig. With --apart each
width is prepared and calibrated by itself: what a file for all widths costs. First and last layers have 8 bits.
Rows go to results/imagenet-calibrated.json; those with the same settings are replaced.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timing import command
from torch import Tensor, nn

from bitdial import (
    CalibrateConfig,
    ImageBatches,
    ImageViews,
    QuantConfig,
    __version__,
    calibrate,
    load,
    prepare,
    save,
    set_bits,
)
from bitdial.calibrate.config import EFFORTS
from bitdial.files.atomic import read_json, write_json
from bitdial.images.settings import settings_of_weights
from bitdial.models.by_name import model_by_name
from bitdial.planning.progress import tracked

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = (
    "model",
    "scheme",
    "group_size",
    "effort",
    "images",
    "bit_choices",
    "activation_bits",
    "apart",
    "iterations",
    "views",
    "seed",
    "device",
)
MODELS = ("resnet50", "mobilenet_v2", "efficientnet_lite0")
TO_PREPARE = 64  # images
Row = dict[str, Any]


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--efforts", nargs="+", default=["none", "quick"], choices=["none", *EFFORTS])
    parser.add_argument("--bits", default="8,6,4,3", help="the widths of the file (default: 8,6,4,3)")
    parser.add_argument("--scheme", default="double_rounding")
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--count", type=int, default=1000, help="images to calibrate on (default: 1000)")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--iterations", type=int, help="in each block (default: 200 of medium, 2000 of full)")
    parser.add_argument("--views", type=int, default=1, help="of each image in the last step (default: 1)")
    parser.add_argument("--activation-bits", type=int, help="of all widths (default: those of the weights)")
    parser.add_argument("--apart", action="store_true", help="each width by itself")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--kernels", default="float", help="what measures: float or integer (default: float)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a folder to save the files in")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "imagenet-calibrated.json")
    return parser.parse_args()


@torch.no_grad()
def logits(model: nn.Module, images: ImageBatches, label: str) -> Tensor:
    """The outputs of `model` for all images."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return torch.cat([model(batch).cpu() for batch in tracked(images, label, show=True)])


def calibrated(model: nn.Module, images: ImageBatches, widths: tuple[int, ...], effort: str, options: Any) -> nn.Module:
    """A prepared copy of `model` at `widths`, calibrated; 8 is among the widths of first and last layers."""
    config = QuantConfig(
        bit_choices=tuple(sorted({8, *widths}, reverse=True)),
        scheme=options.scheme,
        group_size=options.group_size,
        start="balanced",
        importance={} if 8 in widths else {8: 1e-6},
        keep_first_last=8,
    )
    prepared = prepare(model, config, list(images.subset(TO_PREPARE))).eval()
    if effort != "none":
        views = ImageViews(images, options.views, seed=options.seed) if options.views > 1 else None
        calibrate(prepared, images, settings_of(effort, widths, options), tune_on=views)
    return prepared


def settings_of(effort: str, widths: tuple[int, ...], options: Any) -> CalibrateConfig:
    """How a file of `widths` is calibrated."""
    return CalibrateConfig(
        effort=effort,
        activation_bits=options.activation_bits,
        iterations=options.iterations,
        importance={} if 8 in widths else {8: 1e-6},
        seed=options.seed,
    )


def measure(prepared: nn.Module, model: nn.Module, widths: tuple[int, ...], dev: ImageBatches, options: Any) -> Row:
    """Top-1, agreement and KL of the file at each width, against the float logits."""
    path = (options.keep or options.out.parent) / f".{options.name}.safetensors"
    save(prepared, path, metrics={"image_settings": dev.settings.to_dict()})
    live = load(path, model, device=options.device, kernels=options.kernels)
    if options.keep is None:
        path.unlink()
    else:
        path.rename(options.keep / f"{options.name}.safetensors")
    found: Row = {"top1": {}, "agreement": {}, "kl": {}}
    for bits in widths:
        set_bits(live, (bits, options.activation_bits or bits))
        out = logits(live, dev, f"{bits} bits")
        found["top1"][str(bits)] = percent(out.argmax(1) == dev.labels)
        found["agreement"][str(bits)] = percent(out.argmax(1) == options.float_logits.argmax(1))
        kl = F.kl_div(out.log_softmax(1), options.float_logits.log_softmax(1), log_target=True, reduction="batchmean")
        found["kl"][str(bits)] = round(float(kl), 5)
    return found


def percent(right: Tensor) -> float:
    """The share of True, in percent."""
    return round(100 * float(right.double().mean()), 3)


def add(out: Path, row: Row) -> None:
    """Put `row` into the file, in the place of one with the same settings."""
    rows = read_json(out) if out.exists() else []
    same = [{key: each.get(key) for key in SETTINGS} == {key: row.get(key) for key in SETTINGS} for each in rows]
    write_json(out, [*(each for each, is_same in zip(rows, same, strict=True) if not is_same), row])


def main() -> None:
    """All models, all efforts."""
    options = arguments()
    widths = tuple(map(int, options.bits.split(",")))
    for name in options.models:
        weights = options.weights / f"{name}.safetensors"
        model, _ = model_by_name(name, weights)
        model = model.to(options.device).eval()
        read: dict[str, Any] = {"batch_size": options.batch_size, "device": options.device}
        settings = settings_of_weights(weights)
        images = ImageBatches(options.images / "calibration", settings, count=options.count, **read)
        dev = ImageBatches(options.images / "dev", settings, labels=options.images / "labels.json", **read)
        assert dev.labels is not None
        options.float_logits = logits(model, dev, f"{name}, float")
        level = percent(options.float_logits.argmax(1) == dev.labels)
        print(f"{name}: float {level:.2f} on {dev.size} images")
        for effort in options.efforts:
            options.name = f"{name}-{options.scheme}-{effort}"
            started, found, seconds = time.monotonic(), {"top1": {}, "agreement": {}, "kl": {}}, 0.0
            for group in [(bits,) for bits in widths] if options.apart else [widths]:
                started = time.monotonic()
                prepared = calibrated(model, images, group, effort, options)
                seconds += time.monotonic() - started
                for key, values in measure(prepared, model, group, dev, options).items():
                    found[key] |= values
            iterations = 0 if effort == "none" else settings_of(effort, widths, options).learning[0]
            row = {
                "model": name,
                "scheme": options.scheme,
                "group_size": options.group_size,
                "effort": effort,
                "images": images.size,
                "bit_choices": list(widths),
                "activation_bits": options.activation_bits,
                "apart": options.apart,
                "iterations": iterations or None,
                "views": options.views if iterations and options.views > 1 else None,
                "float_top1": level,
                **found,
                "dev_images": dev.size,
                "seconds": round(seconds, 1),
                "device": torch.cuda.get_device_name() if options.device.startswith("cuda") else "cpu",
                "threads": torch.get_num_threads(),
                "kernels": options.kernels,
                "versions": {"bitdial": __version__, "torch": torch.__version__},
                "seed": options.seed,
                "command": command("imagenet_calibrated"),
            }
            add(options.out, row)
            print(f"{name} {effort}: {row['top1']}, {row['seconds']:.0f} s")


if __name__ == "__main__":
    main()
