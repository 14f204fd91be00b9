"""The command `bitdial export`."""

import argparse
from collections import Counter

import torch

from bitdial.artifact import read_artifact
from bitdial.cli.arguments import resolve_setting
from bitdial.cli.data import sample_input
from bitdial.cli.places import writing
from bitdial.errors import ConfigError
from bitdial.export import export_onnx
from bitdial.export.transformers import export_pretrained
from bitdial.live.load import load

TYPES = {"float32": torch.float32, "int64": torch.int64}


def run(options: argparse.Namespace) -> None:
    """The command `export`."""
    of_onnx = {"--bits": options.bits, "--input": options.input, "--opset": options.opset, "--dtype": options.dtype}
    others = {"--model": options.model} if options.hf is None else of_onnx
    if given := [name for name, value in others.items() if value is not None]:
        raise ConfigError(f"{given[0]} is not for {'--onnx' if options.hf is None else '--hf'}: leave it out")
    if options.hf is not None:
        if options.model is None:
            raise ConfigError("--hf needs --model DIR, the folder of the float model, with its config.json")
        with writing(options, {"--hf": options.hf}):
            print(f"Saved {export_pretrained(options.file, options.hf, options.model)}: load_pretrained reads it")
        return
    with writing(options, {"--onnx": options.onnx}):
        _export_onnx(options)


def _export_onnx(options: argparse.Namespace) -> None:
    artifact = read_artifact(options.file)
    sample = sample_input(options.input, artifact).to(TYPES[options.dtype or "float32"])
    bits = None if options.bits is None else resolve_setting(options.bits, artifact)
    done = export_onnx(load(artifact), options.onnx, sample, bits=bits, opset=options.opset)
    kinds = Counter(done.weights.values())
    parts = [f"{count} x {bits} bits as INT{container}" for (bits, container), count in sorted(kinds.items())]
    print(f"Saved {done.path}: {done.bytes:,} bytes, opset {done.opset}; layers: {', '.join(parts)}")
