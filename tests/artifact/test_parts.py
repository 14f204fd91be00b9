"""Progressive files, read by the specification with numpy; which part has what; and hostile ones."""

import copy
import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bitdial import BitPlan, Rule, add_transitions, file_parts, read_artifact, repack, save
from bitdial.errors import ArtifactError, BitdialError

DTYPES = {"F32": "<f4", "I8": "i1", "I64": "<i8", "U8": "u1"}
FIXED = (Rule(pattern="left", bits=4), Rule(pattern="right", bits=4))  # one weight
CONFIGS: list[dict[str, Any]] = [
    {"scheme": "nested"},
    {"scheme": "nested+8", "activations": "asymmetric", "bit_choices": (8, 5, 4, 2)},
    {"scheme": "centred", "bit_choices": (7, 4, 3), "per_channel": False},
    {"scheme": "truncate", "bit_choices": (6, 4, 2), "rules": FIXED},
    {"scheme": "adabits", "activations": "signed", "bit_choices": (8, 3)},
    {"scheme": "nested", "group_size": 2, "bit_choices": (4, 2)},
]


def header_of(data: bytes) -> tuple[dict[str, Any], dict[str, Any], dict[str, str], int]:
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    metadata = header.pop("__metadata__")
    return header, json.loads(metadata["manifest"]), metadata, 8 + size


def arrays_of(data: bytes) -> dict[str, np.ndarray]:
    header, _, _, begin = header_of(data)
    return {
        name: np.frombuffer(data[begin:][slice(*each["data_offsets"])], DTYPES[each["dtype"]]).reshape(each["shape"])
        for name, each in header.items()
    }


def codes_at(arrays: dict[str, np.ndarray], layer: str, bits: int, shape: list[int]) -> np.ndarray:
    """Codes of `bits` bits from the planes of the first parts: the specification, one bit after the other."""
    names = sorted(name for name in arrays if name.endswith(f"/{layer}/codes") and name[0] == ".")
    planes = np.concatenate([arrays[name] for name in names])[:bits]
    digits = np.unpackbits(planes, axis=1, count=int(np.prod(shape)), bitorder="little").astype(int)
    codes = -digits[0]  # the sign
    for plane in digits[1:]:
        codes = 2 * codes + plane
    return codes.reshape(shape)


@pytest.fixture
def both(saved: Callable[..., Path], tmp_path: Path) -> Callable[..., tuple[Path, Path]]:
    """The same model as a whole file and in parts."""

    def make(**config: Any) -> tuple[Path, Path]:
        whole = saved(**config)
        repack(whole, tmp_path / "parts.safetensors")
        return whole, tmp_path / "parts.safetensors"

    return make


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config["scheme"])
def test_the_file_as_it_is_specified(both: Callable[..., tuple[Path, Path]], config: dict[str, Any]) -> None:
    whole, path = both(**config)
    stored, data = read_artifact(whole), path.read_bytes()
    widths, arrays = stored.bit_choices, arrays_of(data)
    assert header_of(data)[1] == stored.manifest
    assert [part.bits for part in file_parts(path)] == list(widths[::-1])
    rest = {name for name in arrays if not name.startswith(tuple(f".{bits}/" for bits in widths))}
    split = {name for name in stored.tensors if name not in rest}
    assert {name.rpartition("/")[2] for name in split} <= {
        "codes", "act_scale", "act_zero_point", "weight", "bias", "running_mean", "running_var", "num_batches_tracked",
    }  # fmt: skip
    for name in rest:
        assert np.array_equal(arrays[name], stored.tensors[name].numpy())
    for layer, entry in stored.layers.items():
        fixed = entry.get("fixed_bits", 0)
        if "tied_to" not in entry:
            codes, shape = stored.codes(layer).int().numpy(), entry["shape"]
            for bits in widths:
                assert np.array_equal(codes_at(arrays, layer, bits, shape), codes >> (widths[0] - bits))
            ends = [sum(len(arrays.get(f".{b}/{layer}/codes", ())) for b in widths if b <= bits) for bits in widths]
            assert ends == [max(bits, fixed) for bits in widths]
        for i, bits in enumerate(widths):
            held = arrays[f".{widths[-1] if bits <= fixed else bits}/{layer}/act_scale"]
            assert float(stored.tensors[f"{layer}/act_scale"][i]) in held.tolist()
            assert len(held) == (1 if bits > fixed else sum(b <= max(fixed, widths[-1]) for b in widths))


@pytest.mark.parametrize("kind", [None, "full", "statistics"])
def test_sets_of_norms_go_with_the_wider_of_their_layers(
    prepared: Callable[..., nn.Module], tmp_path: Path, kind: str | None
) -> None:
    """A set of a pair of widths is of use once both are there."""
    config = {"scheme": "nested", "bit_choices": (8, 4, 2), "keep_first_last": False}
    rules = (Rule(pattern="stem", bits=4),)
    model = prepared(rules=rules, **config)
    model = model if kind is None else add_transitions(model, kind)
    save(model, tmp_path / "f", progressive=True)
    save(model, tmp_path / "whole")
    arrays, stored = arrays_of((tmp_path / "f").read_bytes()), read_artifact(tmp_path / "whole")
    assert stored.norms["norm"].get("fed_by") == (None if kind is None else "stem")
    fed_part, own_part = {8: 8, 4: 2, 2: 2}, {8: 8, 4: 4, 2: 2}
    parts = [own_part[own] for own in (8, 4, 2)]
    pairs = [max(fed_part[fed], own_part[own]) for fed in (8, 4, 2) for own in (8, 4, 2)]
    for name, every in (("running_mean", kind is not None), ("weight", kind == "full")):
        rows = np.array(pairs if every else parts)
        for bits in (2, 4, 8):
            wanted = stored.tensors[f"norm/{name}"].numpy()[rows == bits]
            assert np.array_equal(arrays[f".{bits}/norm/{name}"], wanted)
    for name, tensor in read_artifact(tmp_path / "f").tensors.items():
        assert torch.equal(tensor, stored.tensors[name])


def test_a_part_of_it_in_memory(both: Callable[..., tuple[Path, Path]]) -> None:
    whole, path = both(
        scheme="nested+8", activations="asymmetric", plans={"low": BitPlan(default=4), "p": BitPlan(default=6)}
    )
    stored, found = read_artifact(whole), read_artifact(path, bits=5)
    assert (found.bit_choices, found.available, found.widest) == ((8, 6, 4, 2), (4, 2), 4)
    assert (list(found.plans), list(found.available_plans())) == (["low", "p"], ["low"])
    assert found.digest == read_artifact(path).digest
    for layer in ("conv", "left"):
        assert torch.equal(found.codes(layer), stored.codes(layer) >> 4 << 4)
        assert torch.equal(found.tensors[f"{layer}/act_scale"][2:], stored.tensors[f"{layer}/act_scale"][2:])
    with pytest.raises(ArtifactError, match=r"the lowest width of .* is 2"):
        read_artifact(path, bits=1)
    assert read_artifact(whole, bits=4).available == (8, 6, 4, 2)  # it is read as a whole


def test_cut_files(both: Callable[..., tuple[Path, Path]]) -> None:
    _, path = both(scheme="nested")
    data, parts = path.read_bytes(), file_parts(path)
    for size, there in ((parts[0].end, (2,)), (parts[1].end + 1, (4, 2)), (len(data) - 1, (6, 4, 2))):
        path.write_bytes(data[:size])
        assert file_parts(path) == parts
        assert read_artifact(path, cut=True).available == there
        assert read_artifact(path, bits=there[0]).available == there
        for refused in (lambda: read_artifact(path), lambda: repack(path, path.with_name("x"))):
            with pytest.raises(ArtifactError, match=f"cut: it ends at byte {size} of {len(data)}"):
                refused()
    path.write_bytes(data[: parts[0].begin])
    assert file_parts(path) == parts  # the header is enough to know what to fetch
    with pytest.raises(ArtifactError, match="ends within its first part"):
        read_artifact(path, cut=True)
    path.write_bytes(data[: parts[0].begin - 1])
    for call in (lambda: file_parts(path), lambda: read_artifact(path, cut=True)):
        with pytest.raises(ArtifactError, match=r"its header is cut|its header would take"):
            call()


def test_there_is_no_progressive_file_of_schemes_that_round_anew(saved: Callable[..., Path], tmp_path: Path) -> None:
    for scheme in ("double_rounding", "lsq"):
        path = saved(scheme=scheme)
        with pytest.raises(ArtifactError, match=f"scheme '{scheme}' rounds at each width anew"):
            repack(path, tmp_path / "out")
        with pytest.raises(ArtifactError, match="is not a progressive file"):
            file_parts(path)
    assert not (tmp_path / "out").exists()


# --- hostile files ------------------------------------------------------------------------------------------


class Parts:
    """A progressive file as numpy arrays by part; `write` signs whatever they hold."""

    def __init__(self, data: bytes, parts: Any):
        header, self.manifest, _, begin = header_of(data)
        self.arrays: dict[int, dict[str, np.ndarray]] = {part.bits: {} for part in parts}
        for name, array in arrays_of(data).items():
            end = begin + header[name]["data_offsets"][1]
            self.arrays[next(part.bits for part in parts if end <= part.end)][name] = array.copy()

    def write(self, path: Path) -> Path:
        entries, listed, buffer = {}, [], b""
        for bits, arrays in self.arrays.items():
            start = len(buffer)
            for name, array in arrays.items():
                kind = next(key for key, dtype in DTYPES.items() if array.dtype == np.dtype(dtype))
                entries[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [len(buffer), 0]}
                buffer += array.tobytes()
                entries[name]["data_offsets"][1] = len(buffer)
            listed.append({"bits": bits, "end": len(buffer), "digest": hashlib.sha256(buffer[start:]).hexdigest()})
        texts = {"manifest": json.dumps(self.manifest), "parts": json.dumps(listed)}
        total = "\n".join(texts.values())
        total += "".join(f"\n{n} {e['dtype']} {'x'.join(map(str, e['shape']))}" for n, e in entries.items())
        metadata = {**texts, "digest": hashlib.sha256(total.encode()).hexdigest()}
        head = json.dumps({"__metadata__": metadata, **entries}).encode()
        path.unlink(missing_ok=True)  # ext4 waits for the disk where a file is written over
        path.write_bytes(struct.pack("<Q", len(head)) + head + buffer)
        return path


def move(file: Parts, name: str, source: int, target: int) -> None:
    file.arrays[target][name] = file.arrays[source].pop(name)


def change(file: Parts, bits: int, name: str, how: Callable[[np.ndarray], np.ndarray]) -> None:
    file.arrays[bits][name] = how(file.arrays[bits][name])


def renamed(file: Parts, bits: int, name: str, new: str) -> None:
    file.arrays[bits][new] = file.arrays[bits].pop(name)


HOSTILE: list[tuple[Callable[[Parts], Any], str | None]] = [
    (lambda f: None, None),
    (lambda f: move(f, ".4/conv/codes", 4, 6), "not in the part"),
    (lambda f: move(f, "conv/weight_scale", 2, 4), "not in the part"),
    (lambda f: f.arrays[4].pop(".4/conv/codes"), r"'.4/conv/codes' is missing"),
    (lambda f: f.arrays[8].pop(".8/conv/act_scale"), "expected|is missing|does not hold"),
    (lambda f: f.arrays[6].pop(".6/norm/running_mean"), "missing"),
    (lambda f: change(f, 4, ".4/conv/codes", lambda a: a[:1]), "expected U8 of shape"),
    (lambda f: change(f, 4, ".4/conv/codes", lambda a: a[:, :-1]), "expected U8 of shape"),
    (lambda f: change(f, 4, ".4/conv/codes", lambda a: a.astype("i1")), "expected U8 of shape"),
    (lambda f: change(f, 2, ".2/conv/codes", lambda a: a.reshape(-1)), "expected U8 of shape"),
    (lambda f: change(f, 8, ".8/left/codes", lambda a: a | 128), "padding bits"),
    (lambda f: change(f, 4, ".4/conv/act_scale", lambda a: a[:, None]), "expected F32 of shape"),
    (lambda f: change(f, 4, ".4/conv/act_scale", lambda a: -a), "is not positive"),
    (lambda f: change(f, 8, ".8/norm/running_var", lambda a: -a), "a variance is negative"),
    (lambda f: change(f, 8, ".8/norm/running_var", lambda a: a * np.nan), "NaN"),
    (lambda f: renamed(f, 4, ".4/conv/codes", ".5/conv/codes"), "not in the part"),
    (lambda f: renamed(f, 4, ".4/conv/codes", ".4/other/codes"), "missing|nothing for each width"),
    (lambda f: renamed(f, 2, "conv/weight_scale", ".2/conv/weight_scale"), "nothing for each width"),
    (lambda f: renamed(f, 2, ".float/seen", ".2/.float/seen"), "nothing for each width"),
    (lambda f: f.arrays[2].update({"conv/codes": np.zeros((6, 4, 3, 3), "i1")}), "as a whole and in parts"),
    (lambda f: f.arrays[2].update({".2/x/codes": np.zeros((2, 1), "u1")}), "nothing for each width"),
    (lambda f: f.manifest.update(bit_choices=[8, 6, 4, 3]), "its parts are not for its widths"),
    (lambda f: f.manifest.update(bit_choices=[8, 6, 4]), "its parts are not for its widths"),
    (lambda f: f.manifest.update(scheme="double_rounding"), "rounds at each width anew"),
    (lambda f: f.manifest.update(kind="checkpoint"), "not an artifact"),
    (lambda f: f.manifest["layers"]["conv"].update(fixed_bits=4), "expected|unknown|missing"),
    (lambda f: f.manifest["layers"]["conv"].update(fixed_bits="4"), "is not a width"),
    (lambda f: f.manifest["layers"]["conv"].update(fixed_bits=10**30), "expected|unknown"),
    (lambda f: f.manifest["layers"]["conv"].update(shape=[1 << 30] * 4), "expected U8 of shape"),
    (lambda f: f.manifest["layers"]["conv"].update(shape=[6, 0, 3, 3]), "is not the shape"),
    (lambda f: f.manifest["layers"]["conv"].update(shape=[]), "is not the shape"),
    (lambda f: f.manifest["layers"].update(conv=7), "is not a JSON object"),
    (lambda f: f.manifest["norms"].update(norm=[]), "is not a JSON object"),
    (lambda f: f.manifest["norms"]["norm"].update(follows=["conv"]), "not a quantised layer"),
    (lambda f: f.manifest["norms"]["norm"].update(fed_by={}), "not a quantised layer"),
    (lambda f: f.manifest["norms"]["norm"].update(fed_by="conv"), "missing|expected|unknown"),
]


def test_hostile_files(both: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    """Each is refused, with the file in the message, whether it is read as a whole or in parts."""
    _, path = both(scheme="nested")
    whole = Parts(path.read_bytes(), file_parts(path))
    for number, (damage, problem) in enumerate(HOSTILE):
        file = copy.deepcopy(whole)
        damage(file)
        written = file.write(tmp_path / "hostile")
        if problem is None:
            assert read_artifact(written).available == (8, 6, 4, 2)
            continue
        with pytest.raises(ArtifactError, match=problem) as caught:
            read_artifact(written)
        assert str(caught.value).startswith(f"{written}: "), number


def test_a_code_below_the_phase(both: Callable[..., tuple[Path, Path]], tmp_path: Path) -> None:
    """Of a part, only what its planes say: -128 is below -120 at 8 bits, and what both are at 4 bits is not."""
    _, path = both(scheme="nested+8")
    file = Parts(path.read_bytes(), file_parts(path))
    for bits, planes in file.arrays.items():
        planes[f".{bits}/conv/codes"][:, 0] &= 254
    file.arrays[2][".2/conv/codes"][0, 0] |= 1  # the code is -128 now
    written = file.write(tmp_path / "hostile")
    assert read_artifact(written, bits=4).available == (4, 2)
    for refused in (6, 8):
        with pytest.raises(BitdialError, match="layer 'conv': code -128 is below -12"):
            read_artifact(written, bits=refused)
