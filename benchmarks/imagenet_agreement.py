"""One calibrated file on all engines and as ONNX, on ImageNet images: float, integer, exact sums, onnxruntime.

    python benchmarks/imagenet_agreement.py FILE --weights DIR --images DIR          # results/imagenet-agreement.json

FILE is what `bitdial calibrate MODEL --out FILE` writes, DIR as for imagenet_calibrated.py. A row for each width:

    integer_is_exact   whether logits of integer kernels are those of `code_exact` bit for bit, on the first images
    top1               of float kernels, integer kernels and onnxruntime, on all images of `dev`
    same_class         the share of images to which two of them give the same class: integer kernels and float kernels,
                       integer kernels and onnxruntime

Float sums in another order can put an input on the other side of a border between two codes; a network passes that on.
"""

import argparse
import platform
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from timing import command
from torch import Tensor, nn

from bitdial import (
    ImageBatches,
    __version__,
    code_exact,
    export_onnx,
    load,
    onnx_session_options,
    read_artifact,
    set_bits,
)
from bitdial.files.atomic import write_json
from bitdial.images.settings import settings_of_weights
from bitdial.models.by_name import model_by_name
from bitdial.planning.progress import tracked

ROOT = Path(__file__).resolve().parent.parent


def arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--bits", type=int, nargs="+", help="(default: all of the file)")
    parser.add_argument("--count", type=int, default=2000, help="images (default: 2000)")
    parser.add_argument("--exact-count", type=int, default=4, help="of them, to compare exact sums on (default: 4)")
    parser.add_argument("--batch-size", type=int, default=25)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "imagenet-agreement.json")
    return parser.parse_args()


def classes(run: Callable[[Tensor], Tensor], images: ImageBatches, label: str) -> Tensor:
    """The class that `run` gives each image."""
    with torch.no_grad():
        return torch.cat([run(batch).argmax(1) for batch in tracked(images, label, show=True)])


def exported(live: nn.Module, sample: Tensor, bits: int, folder: Path) -> Callable[[Tensor], Tensor]:
    """The live model at a width, as onnxruntime runs it."""
    path = export_onnx(live, folder / f"{bits}.onnx", sample, bits=bits).path
    options = onnx_session_options()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda batch: torch.from_numpy(session.run(None, {name: batch.numpy()})[0])


def measure(
    engines: dict[str, nn.Module], images: ImageBatches, bits: int, exact_count: int, folder: Path
) -> dict[str, Any]:
    """The row of one width. `engines` are the file on float and on integer kernels."""
    for live in engines.values():
        set_bits(live, bits)
    sample = next(iter(images))[:exact_count]
    with torch.no_grad():
        same = torch.equal(engines["integer"](sample), code_exact(engines["float"])(sample))
    runs = {**engines, "onnxruntime": exported(engines["float"], sample[:1], bits, folder)}
    found, seconds = {}, {}
    for name, run in runs.items():
        started = time.monotonic()
        found[name] = classes(run, images, f"{bits} bits, {name}")
        seconds[name] = round(time.monotonic() - started, 1)
    assert images.labels is not None
    return {
        "integer_is_exact": same,
        "exact_images": len(sample),
        "top1": {name: share(one, images.labels) for name, one in found.items()},
        "same_class": {name: share(found[name], found["integer"]) for name in ("float", "onnxruntime")},
        "seconds": seconds,
    }


def share(found: Tensor, wanted: Tensor) -> float:
    """How many are equal, in percent."""
    return round(100 * float((found == wanted).double().mean()), 3)


def main() -> None:
    """All widths; the file is written after each."""
    options = arguments()
    weights = options.weights / f"{options.model}.safetensors"
    model, _ = model_by_name(options.model, weights)
    settings = settings_of_weights(weights)
    labels = options.images / "labels.json"
    images = ImageBatches(
        options.images / "dev", settings, labels=labels, count=options.count, batch_size=options.batch_size
    )
    engines = {kernels: load(options.file, model, kernels=kernels) for kernels in ("float", "integer")}
    known = {
        "model": options.model,
        "file": options.file.name,
        "images": images.size,
        "device": f"CPU, {torch.get_num_threads()} threads, {platform.machine()}",
        "versions": {"bitdial": __version__, "torch": torch.__version__, "onnxruntime": onnxruntime.__version__},
        "command": command("imagenet_agreement"),
    }
    rows: list[dict[str, Any]] = []
    for bits in options.bits or read_artifact(options.file).manifest["bit_choices"]:
        with tempfile.TemporaryDirectory() as folder:
            rows.append({**known, "bits": bits, **measure(engines, images, bits, options.exact_count, Path(folder))})
        write_json(options.out, rows)
        print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
