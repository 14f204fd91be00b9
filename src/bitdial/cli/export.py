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
from bitdial.export.compressed_tensors import export_compressed_tensors
from bitdial.export.gguf import export_gguf
from bitdial.export.transformers import export_pretrained
from bitdial.live.load import load

# The options that are not for a format.
FOREIGN = {
    "onnx": ("model", "exact", "no_tokenizer"),
    "hf": ("bits", "input", "opset", "dtype", "exact", "no_tokenizer"),
    "compressed_tensors": ("input", "opset", "dtype", "exact", "no_tokenizer"),
    "gguf": ("input", "opset", "dtype"),
}
TYPES = {"float32": torch.float32, "int64": torch.int64}


def run(options: argparse.Namespace) -> None:
    """The command `export`."""
    kind = next(name for name in FOREIGN if getattr(options, name) is not None)
    option = f"--{kind.replace('_', '-')}"
    if given := [name for name in FOREIGN[kind] if getattr(options, name) is not None]:
        raise ConfigError(f"--{given[0].replace('_', '-')} is not for {option}: leave it out")
    if kind != "onnx" and options.model is None:
        raise ConfigError(f"{option} needs --model DIR, the folder of the float model, with its config.json")
    with writing(options, {option: getattr(options, kind)}):
        WRITERS[kind](options)


def _export_hf(options: argparse.Namespace) -> None:
    print(f"Saved {export_pretrained(options.file, options.hf, options.model)}: load_pretrained reads it")


def _export_compressed(options: argparse.Namespace) -> None:
    if not isinstance(options.bits, int):
        raise ConfigError("--compressed-tensors needs --bits 8 or --bits 4")
    done = export_compressed_tensors(options.file, options.compressed_tensors, options.model, bits=options.bits)
    parts = [f"{len(names)} x {bits} bits" for (bits, _), names in sorted(done.layers.items())]
    print(f"Saved {done.folder}: codes and scales bit for bit, nothing rounded; layers: {', '.join(parts)}")


def _export_gguf(options: argparse.Namespace) -> None:
    if options.bits is None:
        raise ConfigError("--gguf needs --bits, such as --bits 4: a GGUF file has one setting")
    setting = resolve_setting(options.bits, read_artifact(options.file))
    exact, tokenizer = bool(options.exact), not options.no_tokenizer
    done = export_gguf(options.file, options.gguf, options.model, bits=setting, exact=exact, tokenizer=tokenizer)
    parts = [f"{len(names)} x {name}" for name, names in done.types.items()]
    print(f"Saved {done.path}: {done.bytes:,} bytes; layers: {', '.join(parts)}")
    if not done.rounded:
        print("Weights: bit for bit ours, nothing rounded")
        return
    name, worst = max(done.rounded.items(), key=lambda item: item[1].rms)
    print(
        f"Rounded: scales of {len(done.rounded)} of {sum(map(len, done.types.values()))} layers, to half precision; "
        f"weights move by {worst.rms:.3%} (rms) in the worst, {name}, "
        f"and one by {max(each.largest for each in done.rounded.values()):.3%} at most (--exact refuses that)"
    )


def _export_onnx(options: argparse.Namespace) -> None:
    artifact = read_artifact(options.file)
    sample = sample_input(options.input, artifact).to(TYPES[options.dtype or "float32"])
    bits = None if options.bits is None else resolve_setting(options.bits, artifact)
    done = export_onnx(load(artifact), options.onnx, sample, bits=bits, opset=options.opset)
    kinds = Counter(done.weights.values())
    parts = [f"{count} x {bits} bits as INT{container}" for (bits, container), count in sorted(kinds.items())]
    print(f"Saved {done.path}: {done.bytes:,} bytes, opset {done.opset}; layers: {', '.join(parts)}")


WRITERS = {"onnx": _export_onnx, "hf": _export_hf, "compressed_tensors": _export_compressed, "gguf": _export_gguf}
