"""A model of timm's: prepare, train all widths, save, load, switch.

    python examples/timm_resnet.py                              # resnet18, random weights, random images
    python examples/timm_resnet.py --model resnet26 --weights FILE --images DIR

FILE is a safetensors file with the model's weights; DIR has a folder of images for each class. Needs timm (and with it
torchvision), no network.
"""

import argparse
import tempfile
from pathlib import Path

import timm
import torch
from torch import Tensor

from bitdial import ArrayData, QuantConfig, TrainConfig, load, prepare, save, set_bits, train


def read_images(folder: Path | None, size: int) -> tuple[Tensor, Tensor, int]:
    """Images, labels and the number of classes: of `folder`, or random ones that are brighter from class to class."""
    if folder is None:
        labels = torch.randint(0, 4, (64,))
        return torch.rand(64, 3, size, size) + labels[:, None, None, None], labels, 4
    import numpy as np
    from PIL import Image

    classes = sorted(each.name for each in folder.iterdir() if each.is_dir())
    pixels, labels = [], []
    for number, name in enumerate(classes):
        for path in sorted((folder / name).iterdir()):
            image = Image.open(path).convert("RGB").resize((size, size))
            pixels.append(torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float() / 255)
            labels.append(number)
    return torch.stack(pixels), torch.tensor(labels), len(classes)


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()
    torch.manual_seed(0)
    images, labels, classes = read_images(options.images, options.size)
    weights = {} if options.weights is None else {"checkpoint_path": str(options.weights)}
    model = timm.create_model(options.model, num_classes=classes, **weights)

    # A few dozen images set the starting scales; the first and the last layer stay in float.
    prepared = prepare(model, QuantConfig(bit_choices=(8, 4, 2), start="3std"), images[:32])
    data = ArrayData(images, labels, batch_size=16)
    train(prepared, data, TrainConfig(epochs=options.epochs, lr=1e-3), progress=False)

    # One file for all widths. `load` takes a model of the same architecture; its weights do not matter.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save(prepared, path)
        live = load(path, timm.create_model(options.model, num_classes=classes))
        print(f"{path.stat().st_size:,} bytes for all widths")
    for bits in (8, 4, 2):
        set_bits(prepared, bits)
        set_bits(live, bits)
        with torch.no_grad():
            logits = live(images[:32])
            same = torch.equal(logits, prepared(images[:32]))
        accuracy = (logits.argmax(dim=1) == labels[:32]).float().mean()
        print(f"{bits} bits: accuracy {accuracy:.3f}, the trained model's logits: {same}")


if __name__ == "__main__":
    main()
