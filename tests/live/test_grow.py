"""Progressive files, running: a model of a cut file, of some parts, or one that grew, is that of the whole file."""

import io
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bitdial import (
    BitPlan,
    QuantConfig,
    Rule,
    add_transitions,
    code_exact,
    file_parts,
    get_bits,
    grow,
    load,
    load_trainable,
    prepare,
    read_artifact,
    repack,
    save,
    set_bits,
    view_at_bits,
)
from bitdial.errors import ArtifactError, BitdialError, ConfigError, PlanError
from bitdial.nn import SwitchableBatchNorm

WIDTHS = (8, 6, 4, 2)


def images() -> Tensor:
    return torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(1))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 6, 3, groups=1), nn.BatchNorm2d(6), nn.ReLU(),
        nn.Flatten(), nn.Linear(24, 7), nn.ReLU(), nn.Linear(7, 3),
    )  # fmt: skip


def made(folder: Path, *, transitions: bool = False, **config: Any) -> tuple[Path, Path]:
    """A whole file and a progressive one of the same model, whose norm sets differ."""
    config = {"scheme": "nested", "keep_first_last": False, **config}
    model = prepare(net(), QuantConfig(**config), images()).eval()
    model = add_transitions(model) if transitions else model
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, SwitchableBatchNorm):
                for value in module.state_dict(keep_vars=True).values():
                    if value.is_floating_point():
                        value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    widths = config.get("bit_choices", WIDTHS)
    plans = {str(bits): BitPlan({"3": bits}, default=widths[-1]) for bits in widths}
    save(model, folder / "whole", plans=plans)
    repack(folder / "whole", folder / "parts")
    return folder / "whole", folder / "parts"


def cut(path: Path, bits: int, more: int = 0) -> Path:
    end = next(part.end for part in file_parts(path) if part.bits == bits)
    target = path.with_name(f"cut-{bits}")
    target.write_bytes(path.read_bytes()[: end + more])
    return target


def check_same(model: nn.Module, other: nn.Module, settings: Any, x: Tensor) -> None:
    """Codes, outputs and exact outputs, bit for bit."""
    for bits in settings:
        set_bits(model, bits)
        set_bits(other, bits)
        assert get_bits(model) == get_bits(other)
        assert torch.equal(model(x), other(x)), bits
        assert torch.equal(code_exact(model)(x), code_exact(other)(x)), bits


SETTINGS: list[dict[str, Any]] = [
    {},
    {"scheme": "nested+8", "activations": "asymmetric", "bit_choices": (8, 5, 4, 2), "kernels": "integer"},
    {"scheme": "centred", "bit_choices": (7, 4, 3), "per_channel": False},
    {"scheme": "truncate", "bit_choices": (6, 4, 2), "transitions": True, "kernels": "integer"},
    {"scheme": "adabits", "bit_choices": (8, 3), "transitions": True},
    {"rules": (Rule(type="Linear", activations="dynamic", bits=6),), "kernels": "integer"},
    {"activations": "float", "group_size": 3, "rules": (Rule(pattern="[039]", group_size=0),)},
]


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_at_every_width_it_is_the_model_of_the_whole_file(tmp_path: Path, config: dict[str, Any]) -> None:
    """From a file that was cut, at first; then with the next part, and with all of them."""
    config = dict(config)
    kernels, x = config.pop("kernels", "float"), images()
    whole, parts = made(tmp_path, **config)
    usual, widths = load(whole, net(), kernels=kernels), config.get("bit_choices", WIDTHS)
    check_same(load(parts, net(), kernels=kernels), usual, (*widths, *map(str, widths)), x)
    for i, first in enumerate(widths[1:], start=1):
        live = load(cut(parts, first), net(), kernels=kernels)
        set_bits(live, widths[-1])
        for last in sorted({i - 1, 0}, reverse=True):
            here = widths[last:]
            buffers = [(id(t), t.data_ptr()) for t in (*live.buffers(), *live.parameters())]
            before = live(x)
            assert grow(live, cut(parts, widths[last])) == here
            assert torch.equal(live(x), before)
            assert buffers == [(id(t), t.data_ptr()) for t in (*live.buffers(), *live.parameters())]
            check_same(live, usual, (*here, *(str(bits) for bits in here)), x)
            for bits in widths[:last]:
                for refused in (bits, str(bits)):
                    with pytest.raises(PlanError):
                        set_bits(live, refused)
            set_bits(live, widths[-1])


class Counting(io.FileIO):
    """A file that counts the bytes that are read from it."""

    bytes_read = 0

    def readinto(self, buffer: Any) -> int:
        got = super().readinto(buffer) or 0
        Counting.bytes_read += got
        return got


def test_only_the_bytes_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, path = made(tmp_path)
    parts, usual = file_parts(path), load(whole, net())
    opened = Path.open
    ours = lambda file, *a, **k: Counting(file) if file == path else opened(file, *a, **k)  # noqa: E731
    monkeypatch.setattr(Path, "open", ours)
    live = load(path, net(), bit_choices=(4, 2))
    assert Counting.bytes_read == parts[1].end < path.stat().st_size
    check_same(live, usual, (4, 2), images())
    for bits in (8, 6):
        with pytest.raises(PlanError):
            set_bits(live, bits)
    Counting.bytes_read = 0
    assert grow(live, path, bits=6) == (6, 4, 2)
    assert Counting.bytes_read == parts[0].begin + parts[2].end - parts[2].begin
    Counting.bytes_read = 0
    assert grow(live, path, bits=6) == (6, 4, 2)
    assert Counting.bytes_read == parts[0].begin
    check_same(live, usual, (6, 4, 2), images())


def test_a_cut_file_says_what_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, path = made(tmp_path)
    for bits, words in ((2, "at 2 bits, without 8, 6, 4;"), (6, "at 6, 4, 2 bits, without 8;")):
        for more in (0, 1):
            caplog.clear()
            file = cut(path, bits, more)
            load(file, net())
            (record,) = caplog.records
            assert record.levelno == logging.WARNING
            assert f"{file} ends at byte {file.stat().st_size} of {path.stat().st_size}" in record.message
            assert words in record.message
    caplog.clear()
    load(path, net(), bit_choices=(4,))
    load(cut(path, 4), net(), bit_choices=(4, 2))
    assert caplog.records == []
    for kernels in ("float", "integer"):
        with pytest.raises(ConfigError, match="behind its part of 4 bits"):
            load(cut(path, 4), net(), bit_choices=(8, 4), kernels=kernels)
    with pytest.raises(ConfigError, match="of a file that is whole"):
        load(tmp_path / "whole", net(), bit_choices=(4, 2))
    part = read_artifact(path, bits=4)
    assert load(part, net())[3].bit_choices == (4, 2)  # type: ignore[index,union-attr]
    for source in (cut(path, 4), part):
        with pytest.raises(ArtifactError, match=r"cut: it ends|only the parts of up to 4 bits were read"):
            load_trainable(source, net())


def test_a_damaged_part_is_named_when_it_is_asked_for(tmp_path: Path) -> None:
    whole, path = made(tmp_path)
    part, data = file_parts(path)[2], bytearray(path.read_bytes())
    data[part.begin + 5] ^= 4
    path.write_bytes(data)
    live = load(path, net(), bit_choices=(4, 2))
    check_same(live, load(whole, net()), (4, 2), images())
    before = {name: tensor.clone() for name, tensor in live.state_dict().items()}
    for asked in (lambda: load(path, net()), lambda: grow(live, path), lambda: grow(live, path, bits=6)):
        with pytest.raises(ArtifactError, match=r"part of 6 bits is damaged.* the parts before it serve 4, 2 bits"):
            asked()
    assert all(torch.equal(tensor, before[name]) for name, tensor in live.state_dict().items())
    with pytest.raises(PlanError):
        set_bits(live, 6)


def test_fixed_layers_are_whole_in_the_first_part(tmp_path: Path) -> None:
    """With a part of 2 bits, a layer that stays at 8 is there at 8, and the dial turns all others."""
    whole, path = made(tmp_path, rules=(Rule(pattern="9", bits=8), Rule(pattern="0", bits=4)))
    usual, live = load(whole, net()), load(cut(path, 2), net())
    check_same(live, usual, (2, BitPlan({"9": (8, 2)}, default=2), BitPlan({"0": 2}, default=2)), images())
    assert dict(get_bits(live))["9"] == (8, 8) or dict(get_bits(live))["9"] == (8, 2)
    set_bits(live, 2)
    assert {name: pair[0] for name, pair in get_bits(live).items()} == {"0": 4, "3": 2, "7": 2, "9": 8}
    with pytest.raises(PlanError):
        set_bits(live, BitPlan({"3": 4}, default=2))
    assert grow(live, path) == WIDTHS
    check_same(live, usual, WIDTHS, images())


def test_packed_kernels_take_parts_and_do_not_grow(tmp_path: Path) -> None:
    rules = (Rule(pattern="9", bits=8),)
    whole, path = made(tmp_path, activations="float", switch_norms=False, rules=rules)
    usual, x = load(whole, net(), kernels="packed", dtype=torch.float16), images().half()
    for live in (
        load(cut(path, 4), net(), kernels="packed", dtype=torch.float16),
        load(path, net(), kernels="packed", dtype=torch.float16, bit_choices=(4, 2)),
        load(path, net(), kernels="packed", dtype=torch.float16),
    ):
        for bits in (4, 2):
            set_bits(live, bits)
            set_bits(usual, bits)
            assert torch.equal(live[7].codes.weight_values(bits), usual[7].codes.weight_values(bits))  # type: ignore[index]
            hidden = torch.randn(3, 24, generator=torch.Generator().manual_seed(3)).half()
            assert torch.equal(live[9](live[7](hidden)), usual[9](usual[7](hidden)))  # type: ignore[index]
        with pytest.raises(ConfigError, match="layer '7' runs on packed kernels"):
            grow(live, path)
    assert x.dtype == torch.float16


def test_views_grow_by_themselves(tmp_path: Path) -> None:
    """They share the codes, and offer what they did until they are grown, too."""
    whole, path = made(tmp_path)
    usual, live = load(whole, net()), load(path, net(), bit_choices=(4, 2))
    view = view_at_bits(live, 4)
    grow(live, path)
    check_same(view, usual, (4, 2), images())
    with pytest.raises(PlanError):
        set_bits(view, 8)
    assert grow(view, path) == WIDTHS
    check_same(view, usual, WIDTHS, images())
    check_same(live, usual, WIDTHS, images())


def test_growing_does_not_disturb_a_model_that_runs(tmp_path: Path) -> None:
    _, path = made(tmp_path)
    live, x = load(path, net(), bit_choices=(2,)), images()
    expected, stop, wrong = live(x), threading.Event(), []

    def run() -> None:
        while not stop.is_set():
            if not torch.equal(live(x), expected):
                wrong.append(1)

    thread = threading.Thread(target=run)
    thread.start()
    for bits in (4, 6, 8):
        grow(live, path, bits=bits)
    stop.set()
    thread.join()
    assert wrong == []
    set_bits(live, 8)
    assert not torch.equal(live(x), expected)


def hostile(path: Path, name: str, value: float) -> Path:
    """The file with a value in `name` that cannot be, signed."""
    from bitdial.artifact.parts import Layout
    from bitdial.files.parts import write_parts

    artifact = read_artifact(path)
    artifact.tensors[name].flatten()[0] = value
    write_parts(path, Layout(artifact.manifest).split(artifact.tensors), artifact.manifest, error=ArtifactError)
    return path


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("3/act_scale", -1.0, "is not positive"),
        ("3/act_scale", 3e38, "values overflow"),
        ("4/running_var", -1.0, "a variance is negative"),
        ("4/bias", float("nan"), "holds NaN"),
        ("7/act_clip_ratio", 1.5, "has ratios"),
        ("3/codes", -128, "code -128 is below -120"),
    ],
)
def test_values_of_further_parts_are_checked(tmp_path: Path, name: str, value: float, problem: str) -> None:
    """The first row is that of 8 bits; nothing is written before all is checked."""
    _, path = made(tmp_path, scheme="nested+8", rules=(Rule(pattern="7", activations="dynamic"),))
    live = load(hostile(path, name, value), net(), bit_choices=(2,))
    before = {key: tensor.clone() for key, tensor in live.state_dict().items()}
    with pytest.raises(ArtifactError, match=problem):
        grow(live, path)
    assert all(torch.equal(tensor, before[key]) for key, tensor in live.state_dict().items())


def test_what_cannot_grow(tmp_path: Path) -> None:
    whole, path = made(tmp_path)
    live = load(path, net(), bit_choices=(2,))
    (tmp_path / "other").mkdir()
    _, other = made(tmp_path / "other", activations="signed")
    cases: list[tuple[Callable[[], Any], type[BitdialError], str]] = [
        (lambda: grow(load(whole, net()), path), ConfigError, "not one that load"),
        (lambda: grow(net(), path), ConfigError, "not one that load"),
        (lambda: grow(live, whole), ArtifactError, "is not the progressive file"),
        (lambda: grow(live, other), ArtifactError, "is not the progressive file"),
        (lambda: grow(live, tmp_path / "none"), ArtifactError, "there is no file"),
        (lambda: grow(live, path, bits=5), ConfigError, "bits=5 is not one of"),
        (lambda: grow(live, cut(path, 4, 3), bits=6), ArtifactError, "before the end of its part of 6 bits"),
    ]
    for call, error, problem in cases:
        with pytest.raises(error, match=problem):
            call()
    assert grow(live, cut(path, 2)) == (2,)
