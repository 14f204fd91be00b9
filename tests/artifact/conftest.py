"""A small model with every kind of part that an artifact can hold, and files taken apart and put together by hand."""

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bitdial import QuantConfig, prepare, save
from bitdial.nn import SwitchableBatchNorm

DTYPES = {"F32": np.float32, "F64": np.float64, "I8": np.int8, "I16": np.int16, "I64": np.int64, "U8": np.uint8}


class Small(nn.Module):
    """Quantised: `conv`, `depth` (grouped, strided, no bias), `left` and `right` (one weight). `gain` has two names."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.stem = nn.Conv2d(2, 4, 3, padding=1, bias=False)
            self.stem_norm = nn.BatchNorm2d(4)
            self.conv = nn.Conv2d(4, 6, 3, padding=1)
            self.norm = nn.BatchNorm2d(6)
            self.depth = nn.Conv2d(6, 6, 3, stride=2, padding=1, groups=3, bias=False)
            self.left = nn.Linear(6, 6)
            self.right = nn.Linear(6, 6)
            self.right.weight = self.left.weight
            self.gain = nn.Parameter(torch.rand(5) + 0.5)
            self.same_gain = self.gain
            self.register_buffer("seen", torch.tensor([7, 8]))
            self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.depth(x)).mean(dim=(2, 3))
        return self.head(self.right(torch.relu(self.left(x)))) * self.gain


class File:
    """An artifact as numpy arrays and a manifest; `write` signs whatever they hold, `text` in the manifest's place."""

    def __init__(self, path: Path) -> None:
        data = path.read_bytes()
        (size,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + size])
        self.metadata: dict[str, str] = header.pop("__metadata__")
        self.header_bytes, self.entries, self.buffer = 8 + size, header, data[8 + size :]
        self.manifest: dict[str, Any] = json.loads(self.metadata["manifest"])
        self.tensors: dict[str, np.ndarray] = {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            values = np.frombuffer(self.buffer[begin:end], DTYPES[entry["dtype"]])
            self.tensors[name] = values.reshape(entry["shape"]).copy()

    def write(self, path: Path, *, text: str | None = None) -> Path:
        text = json.dumps(self.manifest) if text is None else text
        total, header, buffer = text.encode(), {}, b""
        for name in sorted(self.tensors):
            tensor = self.tensors[name]
            kind = next(key for key, dtype in DTYPES.items() if tensor.dtype == dtype)
            raw = np.ascontiguousarray(tensor).tobytes()
            total += f"\n{name} {kind} {'x'.join(map(str, tensor.shape))}\n".encode() + raw
            header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [len(buffer), 0]}
            buffer += raw
            header[name]["data_offsets"][1] = len(buffer)
        metadata = {"manifest": text, "digest": hashlib.sha256(total).hexdigest()}
        head = json.dumps({"__metadata__": metadata, **header}).encode()
        path.unlink(missing_ok=True)  # ext4 waits for the disk where a file is written over
        path.write_bytes(struct.pack("<Q", len(head)) + head + buffer)
        return path


@pytest.fixture
def small() -> Callable[..., nn.Module]:
    """Makes the float model."""
    return Small


@pytest.fixture
def inputs() -> Tensor:
    """A batch for it."""
    return torch.randn(8, 2, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def prepared(inputs: Tensor) -> Callable[..., nn.Module]:
    """Makes the prepared model with norm sets that differ, as training leaves them; keywords go to QuantConfig."""

    def make(model: nn.Module | None = None, **config: Any) -> nn.Module:
        ready = prepare(model or Small(), QuantConfig(**{"start": "3std", **config}), inputs).eval()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for module in ready.modules():
                if isinstance(module, SwitchableBatchNorm):
                    for value in module.state_dict(keep_vars=True).values():
                        if value.is_floating_point():
                            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
        return ready

    return make


@pytest.fixture
def open_file() -> Callable[[Path], File]:
    """Takes a file apart."""
    return File


@pytest.fixture(scope="session")
def made() -> dict[str, bytes]:
    """The files that `saved` has made so far."""
    return {}


@pytest.fixture
def saved(tmp_path: Path, prepared: Callable[..., nn.Module], made: dict[str, bytes]) -> Callable[..., Path]:
    """Saves the small model; keywords go to QuantConfig, `plans` and `metrics` to save."""

    def make(*, plans: Any = None, metrics: Any = None, **config: Any) -> Path:
        path, key = tmp_path / "model.safetensors", repr((plans, metrics, config))
        if key not in made:
            save(prepared(**config), path, plans=plans, metrics=metrics)
            made[key] = path.read_bytes()
        path.write_bytes(made[key])
        return path

    return make
