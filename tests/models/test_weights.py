"""Weights from files: all of them, or a reason."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import bitdial
from bitdial.errors import ConfigError
from bitdial.models.weights import fill, read_metadata, read_weights


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.LazyLinear(2))[:3]


def test_weights_go_in_whole(tmp_path: Path) -> None:
    source, target = network(), network()
    state = {key: tensor for key, tensor in source.state_dict().items() if not key.endswith("num_batches_tracked")}
    save_file({key: tensor.half() for key, tensor in state.items()}, tmp_path / "w.safetensors")
    fill(target, read_weights(tmp_path / "w.safetensors"), "net")
    for key, tensor in state.items():
        assert torch.equal(target.state_dict()[key], tensor.half().float()), key


def test_some_may_be_kept_as_the_model_has_them(tmp_path: Path) -> None:
    source, target = network(), network()
    before = target.state_dict()["1.bias"].fill_(7).clone()
    save_file({**source.state_dict(), "1.bias": torch.zeros(9)}, tmp_path / "w.safetensors")
    weights = read_weights(tmp_path / "w.safetensors")
    with pytest.raises(ConfigError, match=r"1\.bias is \(9,\)"):
        fill(target, weights, "net", keep=["0.bias"])
    fill(target, weights, "net", keep=["1.bias"])
    assert torch.equal(target.state_dict()["1.bias"], before)
    assert torch.equal(target.state_dict()["0.weight"], source.state_dict()["0.weight"])


def test_metadata_say_what_the_weights_are_of(tmp_path: Path) -> None:
    path, told = tmp_path / "w.safetensors", {"model": "net", "arguments": '{"a": 1}', "images": '{"crop": 32}'}
    save_file({"a": torch.zeros(1)}, path, told)
    found = read_metadata(path)
    assert (found.path, found.model, found.arguments, found.images) == (path, "net", {"a": 1}, {"crop": 32})
    assert read_weights(path).metadata == found
    save_file({"a": torch.zeros(1)}, path)
    found = read_metadata(path)
    assert (found.model, found.arguments, found.images) == (None, {}, None)


def test_what_does_not_fit_is_named_and_nothing_changes(tmp_path: Path) -> None:
    model = network()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    good = dict(model.state_dict())
    cases = {
        r"0\.weight is \(1, 2\) in the file and \(4, 3, 3, 3\) in the model": {**good, "0.weight": torch.zeros(1, 2)},
        r"the file has no 1\.bias \(1 are missing\)": {key: good[key] for key in good if key != "1.bias"},
        r"the model has no head\.bias \(1 are too many\)": {**good, "head.bias": torch.zeros(1)},
    }
    for words, tensors in cases.items():
        changed = {key: tensor + 1 for key, tensor in tensors.items()}
        save_file(changed, tmp_path / "w.safetensors")
        with pytest.raises(ConfigError, match=rf"w\.safetensors is not for net: {words}"):
            fill(model, read_weights(tmp_path / "w.safetensors"), "net")
        assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in before.items())


def test_a_header_may_begin_like_a_pickle(tmp_path: Path) -> None:
    """Its first byte is that of a length."""
    path = tmp_path / "w.safetensors"
    for filler in range(300):
        save_file({"a": torch.zeros(1)}, path, {"x": "x" * filler})
        if path.read_bytes()[:1] == b"\x80":
            assert set(read_weights(path).tensors) == {"a"}
            return
    raise AssertionError("no header of 128 bytes was made")


def test_files_of_other_kinds_are_refused_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "w.pth"
    for modern in (True, False):
        torch.save({"a": torch.zeros(1)}, path, _use_new_zipfile_serialization=modern)
        with pytest.raises(
            ConfigError, match=r"w\.pth is pickled.*save_file\(torch\.load\('w\.pth', weights_only=True"
        ):
            read_weights(path)
    path.write_bytes(b"words")
    with pytest.raises(ConfigError, match=r"w\.pth is not a safetensors file"):
        read_weights(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_weights(tmp_path / "missing")
    artifact = tmp_path / "a.safetensors"
    model = bitdial.build_model("cifar_resnet", blocks=1, width=4)
    bitdial.save(bitdial.prepare(model, bitdial.QuantConfig(), torch.rand(2, 3, 8, 8)), artifact)
    with pytest.raises(ConfigError, match="is a bitdial artifact, whose layers are integers; give float weights"):
        read_weights(artifact)
    for arguments, words in (("{", "are not JSON"), ("[]", "no JSON object")):
        save_file({"a": torch.zeros(1)}, artifact, {"arguments": arguments})
        with pytest.raises(ConfigError, match=words):
            read_weights(artifact)
