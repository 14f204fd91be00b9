"""`bitdial search` and `bitdial pareto`: what they find, print, write and store, and clear words for wrong input."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bitdial
from bitdial.artifact import amend
from bitdial.cli import main
from bitdial.cli.arguments import resolve_setting
from bitdial.errors import ArtifactError
from bitdial.files.container import read_container, write_container
from bitdial.planning import MeasuredFront
from bitdial.sensitivity.result import LayerSensitivity, Sensitivity

pytest.importorskip("highspy")

WIDTHS = (4, 3, 2)


def make_file(path: Path, *, width: int = 4, stored: bool = True, **config: Any) -> Path:
    torch.manual_seed(0)
    net = bitdial.build_model("cifar_resnet", blocks=1, width=width, in_channels=1)
    model = bitdial.prepare(net, bitdial.QuantConfig(bit_choices=WIDTHS, **config), torch.rand(16, 1, 8, 8))
    bitdial.save(model, path, metrics={"recipe": "digits", "holdout": True})
    layers = {
        name: LayerSensitivity(trace=10.0**-place, error=0.01, parameters=int(np.prod(entry["shape"])), samples=16)
        for place, (name, entry) in enumerate(bitdial.read_artifact(path).layers.items())
    }
    found = Sensitivity(layers=layers, images=7)
    found.save(path.with_suffix(".sensitivity.json"))
    if stored:
        amend(path, sensitivity=found)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return make_file(tmp_path / "net.safetensors")


def expected(file: Path, budgets: dict[str, float], **settings: Any) -> Any:
    artifact = bitdial.read_artifact(file)
    model = bitdial.load_trainable(artifact)
    costs = bitdial.measure_costs(model, torch.zeros(1, 1, 8, 8), latency=settings.pop("latency", None))
    assert artifact.sensitivity is not None
    return bitdial.search(model, artifact.sensitivity, costs, budgets, **settings)


# --- search -------------------------------------------------------------------------------------


def test_search_prints_writes_and_stores_what_the_library_finds(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plans.json"
    assert (
        main(["search", "--average-bits", "3", "--average-bits", "2.25", str(file), "--out", str(out), "--store"]) == 0
    )
    text = capsys.readouterr().out
    found = {"3.0 bits": expected(file, {"average_bits": 3.0}), "2.25 bits": expected(file, {"average_bits": 2.25})}
    written = json.loads(out.read_text())
    assert written == {"plans": {name: json.loads(json.dumps(one.to_dict())) for name, one in found.items()}}
    assert bitdial.read_artifact(file).plans == {name: one.plan for name, one in found.items()}
    for name, one in found.items():
        row = next(line for line in text.splitlines() if line.startswith(f"{name} "))
        assert f" {one.costs['bytes']:,} " in row
        assert f" {one.costs['bitops']:,} " in row
    for layer in found["3.0 bits"].plan:
        row = next(line for line in text.splitlines() if line.startswith(f"{layer} "))
        assert row.split()[-2:] == [str(one.plan[layer][0]) for one in found.values()]
    live = bitdial.load(file)
    bitdial.set_bits(live, "3.0 bits")
    assert bitdial.get_bits(live) == found["3.0 bits"].plan
    for name, one in found.items():
        assert resolve_setting(f"{out}:{name}", bitdial.read_artifact(file)) == one.plan


def test_search_leaves_the_file_alone_unless_told(file: Path) -> None:
    before = file.read_bytes()
    assert main(["search", str(file), "--bytes", "4300"]) == 0
    assert file.read_bytes() == before


def test_search_takes_budgets_together_groups_pins_objective_and_times(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = list(bitdial.read_artifact(file).layers)
    table = {name: {"4": 3.0, "3": 2.0, "2": 1.0, "4:2": 2.5} for name in names}
    (tmp_path / "times.json").write_text(json.dumps(table))
    command = ["search", str(file), "--latency", "18", "--bitops", "500000", "--layer-average-bits", "2.75"]
    command += ["--latency-table", str(tmp_path / "times.json"), "--objective", "bits"]
    command += ["--group", "layer3.*", "--group", f"{names[0]},{names[1]}", "--pin", "layer2.0.conv1=2"]
    assert main([*command, "--name", "mine", "--store"]) == 0
    times: Any = {name: {4: 3.0, 3: 2.0, 2: 1.0, (4, 2): 2.5} for name in names}
    found = expected(
        file,
        {"latency": 18, "bitops": 500_000, "layer_average_bits": 2.75},
        latency=times,
        objective="bits",
        groups=[[n for n in names if n.startswith("layer3.")], names[:2]],
        pinned={"layer2.0.conv1": 2},
    )
    assert bitdial.read_artifact(file).plans == {"mine": found.plan}
    assert found.plan["layer2.0.conv1"] == (2, 2)
    assert len({found.plan[name] for name in names[:2]}) == 1
    assert found.costs["latency"] <= 18
    assert "latency" in capsys.readouterr().out


def test_search_takes_sensitivities_from_a_file_and_the_shape_of_an_input(tmp_path: Path) -> None:
    file = make_file(tmp_path / "net.safetensors", stored=False)
    given = ["--sensitivity", str(file.with_suffix(".sensitivity.json"))]
    assert main(["search", str(file), "--average-bits", "3", *given, "--store"]) == 0
    assert bitdial.read_artifact(file).sensitivity is None
    out = tmp_path / "p.json"
    assert main(["search", str(file), "--average-bits", "3", *given, "--input", "1x16x16", "--out", str(out)]) == 0
    large = json.loads(out.read_text())["plans"]["3.0 bits"]["costs"]["bitops"]
    assert main(["search", str(file), "--average-bits", "3", *given, "--out", str(out)]) == 0
    assert large == 4 * json.loads(out.read_text())["plans"]["3.0 bits"]["costs"]["bitops"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give at least one budget"),
        (["--average-bits", "1.5"], "average_bits <= 1.5 (the least is 2)"),
        (["--average-bits", "nan"], "is not a number"),
        (["--bytes", "10"], "bytes <= 10 (the least is"),
        (["--average-bits", "2", "--bitops", "-1"], "bitops <= -1 (the least is"),
        (["--average-bits", "3", "--pin", "layer1.0.conv1=8"], "bits=8 is not in bit_choices (4, 3, 2)"),
        (["--average-bits", "3", "--pin", "nothing*=4"], "'nothing*' matches no quantised layer"),
        (["--average-bits", "3", "--group", "conv9,layer3.*"], "'conv9' matches no quantised layer"),
        (["--average-bits", "2", "--pin", "layer*=4"], "the least is 4"),
        (["--latency", "3"], "--latency-table"),
        (["--latency", "3", "--latency-table", "MISSING"], "No such file"),
        (["--latency", "3", "--latency-table", "TEXT"], "not a JSON file"),
        (["--latency", "3", "--latency-table", "LIST"], "expected {layer:"),
        (["--latency", "3", "--latency-table", "WORD"], "has a time for 'four'"),
        (["--latency", "3", "--latency-table", "OTHER"], "lacks layer"),
        (["--average-bits", "3", "--sensitivity", "OTHER"], "not what Sensitivity.save writes"),
        (["--average-bits", "3", "--sensitivity", "ANOTHER_MODEL"], "layers.0.conv', which is not a quantised layer"),
        (["--average-bits", "3", "--input", "3x9"], "does not fit the model"),
        (["--average-bits", "3", "--average-bits", "2", "--name", "x"], "--name names one plan"),
    ],
)
def test_search_explains_wrong_input(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    names = list(bitdial.read_artifact(file).layers)
    entry = {"trace": 1.0, "error": 0.1, "parameters": 144, "samples": 16}
    texts = {
        "TEXT": "times",
        "LIST": "[1, 2]",
        "WORD": json.dumps({name: {"four": 1.0} for name in names}),
        "OTHER": json.dumps({names[0]: {"4": 1.0}}),
        "ANOTHER_MODEL": json.dumps({"layers": {"layers.0.conv": entry}, "images": 3}),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    before = file.read_bytes()
    places = {name: str(tmp_path / name) for name in (*texts, "MISSING")}
    assert main(["search", str(file), "--store", *(places.get(part, part) for part in arguments)]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("bitdial: ")
    assert "Traceback" not in error
    assert file.read_bytes() == before


@pytest.mark.parametrize("arguments", [["--pin", "conv=many"], ["--pin", "4"], ["--input", "3xx2"], ["--input", "0x2"]])
def test_wrong_usage_of_search_exits_with_2(file: Path, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["search", str(file), "--average-bits", "3", *arguments])
    assert stop.value.code == 2


# --- both -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [["search", "--average-bits", "3"], ["pareto"]])
def test_a_file_that_cannot_be_searched_is_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    bare = make_file(tmp_path / "bare.safetensors", stored=False)
    assert main([command[0], str(bare), *command[1:]]) == 1
    error = capsys.readouterr().err
    assert "stores no sensitivities" in error
    assert f"bitdial sensitivity {bare}" in error

    tensors, manifest, _ = read_container(bare, error=ArtifactError)
    floats = {name: tensor for name, tensor in tensors.items() if name.startswith(".float/")}
    nothing = tmp_path / "nothing.safetensors"
    write_container(nothing, floats, {**manifest, "layers": {}, "norms": {}}, error=ArtifactError)
    assert main([command[0], str(nothing), *command[1:]]) == 1
    assert "has no quantised layer" in capsys.readouterr().err

    whole = make_file(tmp_path / "whole.safetensors")
    monkeypatch.setitem(sys.modules, "highspy", None)
    assert main([command[0], str(whole), *command[1:]]) == 1
    assert "pip install 'bitdial[search]'" in capsys.readouterr().err


# --- pareto -------------------------------------------------------------------------------------


def make_data(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(40, 1, 8, 8, generator=generator), torch.arange(40) % 10
    np.savez(path, x=x.numpy(), y=y.numpy())
    return x, y


def test_pareto_measures_stores_and_shows_the_front(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = make_data(tmp_path / "held.npz")
    out, page = tmp_path / "front.json", tmp_path / "page.html"
    command = ["pareto", str(file), "--data", str(tmp_path / "held.npz"), "--points", "6"]
    assert main([*command, "--out", str(out), "--report", str(page)]) == 0
    captured = capsys.readouterr()
    front, artifact = MeasuredFront.load(out), bitdial.read_artifact(file)
    assert (front.label, front.samples, front.quantity) == ("net", 40, "average_bits")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # where the command works
    live = bitdial.load(file, device=device)
    for one in (*front.candidates, *front.uniform):
        with bitdial.at_bits(live, one.plan), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            assert one.accuracy == bitdial.accuracy(live, [(x.to(device), y.to(device))])
    assert artifact.plans == front.plans
    assert {"2.0 bits", "3.0 bits", "4.0 bits"} <= set(artifact.plans)
    assert artifact.metrics["front"] == json.loads(json.dumps(front.summary()))
    assert artifact.metrics["recipe"] == "digits"
    bitdial.set_bits(live, "3.0 bits")
    middle = expected(file, {"average_bits": 3.0})
    assert middle.plan in {one.plan for one in front.candidates}  # the alternatives are those at the middle
    assert len(front.candidates) > 6 + 3
    for one in front.front:
        row = next(line for line in captured.out.splitlines() if line.startswith(f"{one.name} "))
        assert f" {100 * one.accuracy:.2f} % " in row
    for name, value in front.correlation.items():
        assert f"{name.capitalize()} {value:.2f}" in captured.out
    assert "bitdial:" not in captured.err
    assert "plans by layer" in page.read_text(encoding="utf-8")


def test_pareto_replaces_the_front_that_was_there_and_keeps_other_plans(file: Path, tmp_path: Path) -> None:
    make_data(tmp_path / "held.npz")
    amend(file, plans={"mine": bitdial.BitPlan(default=4)})
    command = ["pareto", str(file), "--data", str(tmp_path / "held.npz"), "--points", "3"]
    assert main([*command, "--cost", "bytes", "--objective", "bits"]) == 0
    first = bitdial.read_artifact(file).plans
    assert file.with_suffix(".html").is_file()
    assert main([*command, "--pin", "layer1.0.conv1=3", "--out", str(tmp_path / "front.json")]) == 0
    front = MeasuredFront.load(tmp_path / "front.json")
    assert all(one.plan["layer1.0.conv1"] == (3, 3) for one in front.candidates)
    assert bitdial.read_artifact(file).plans == {"mine": bitdial.BitPlan(default=4), **front.plans}
    assert set(first) - set(front.plans) - {"mine"}  # or nothing had to go


def test_pareto_takes_held_out_digits_and_says_if_they_were_trained_on(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, before = tmp_path / "front.json", file.read_bytes()
    assert main(["pareto", str(file), "--points", "2", "--no-store", "--out", str(out)]) == 0
    assert MeasuredFront.load(out).samples == 401
    assert file.read_bytes() == before
    assert "bitdial:" not in capsys.readouterr().err
    amend(file, metrics={"holdout": False})
    assert main(["pareto", str(file), "--points", "2", "--no-store"]) == 0
    assert "did not hold these images out" in capsys.readouterr().err


def test_pareto_draws_other_fronts_beside(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_data(tmp_path / "held.npz")
    other = make_file(tmp_path / "other.safetensors")
    data = ["--data", str(tmp_path / "held.npz"), "--points", "3"]
    assert main(["pareto", str(other), *data, "--out", str(tmp_path / "other.json")]) == 0
    assert main(["pareto", str(file), *data, "--compare", str(tmp_path / "other.json")]) == 0
    text = file.with_suffix(".html").read_text(encoding="utf-8")
    assert "Fronts compared" in text
    assert "other" in text
    capsys.readouterr()
    for wrong, words in (
        (["--compare", str(tmp_path / "other.json"), "--cost", "bytes"], "is over average_bits, this one over bytes"),
        (["--compare", str(tmp_path / "other.json")] * 2, "two fronts have one label"),
        (["--compare", str(tmp_path / "held.npz")], "is not a JSON file"),
    ):
        assert main(["pareto", str(file), *data, *wrong]) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "nowhere"], "not digits, a folder or a file"),
        (["--data", "SHAPE"], "does not fit the model"),
        (["--alternatives-at", "1"], "average_bits <= 1 (the least is 2)"),
        (["--points", "1"], "at least 2"),
        (["--cost", "latency"], "needs times"),
    ],
)
def test_pareto_explains_wrong_input(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    np.savez(tmp_path / "shape.npz", x=np.zeros((4, 3, 9), np.float32), y=np.zeros(4, np.int64))
    before = file.read_bytes()
    command = ["pareto", str(file), *(str(tmp_path / "shape.npz") if a == "SHAPE" else a for a in arguments)]
    assert main(command) == 1
    assert words in capsys.readouterr().err
    assert file.read_bytes() == before
    assert not file.with_suffix(".html").exists()


def test_layers_with_a_width_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They are pinned unless --pin says otherwise; `inspect` shows them; uniform settings say that they are there."""
    file = make_file(tmp_path / "net.safetensors", keep_first_last=4)
    fixed = bitdial.read_artifact(file).fixed_bits
    assert set(fixed.values()) == {4}
    assert main(["inspect", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split()[-2:] == ["fixed", "bits"] for line in lines)
    assert all(any(line.startswith(f"{name} ") and line.split()[-1] == "4" for line in lines) for name in fixed)
    assert any(line.startswith("fixed widths   2 layers at 4 bits") for line in lines)
    assert main(["search", str(file), "--average-bits", "3", "--store"]) == 0
    plan = bitdial.read_artifact(file).plans["3.0 bits"]
    assert all(plan[name] == (4, 4) for name in fixed)
    first = next(iter(fixed))
    assert main(["search", str(file), "--average-bits", "3", "--pin", f"{first}=2", "--store"]) == 0
    assert bitdial.read_artifact(file).plans["3.0 bits"][first] == (2, 2)
    pins = [word for name in fixed for word in ("--pin", f"{name}=free")]
    assert main(["search", str(file), "--average-bits", "2", *pins]) == 0, "less than those at 4 bits would allow"
    capsys.readouterr()
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).random((40, 1, 8, 8), np.float32), y=np.arange(40) % 10)
    assert main(["pareto", str(file), "--data", str(tmp_path / "data.npz"), "--points", "3"]) == 0
    text, page = capsys.readouterr().out, file.with_suffix(".html").read_text()
    for name in ("2 bits, fixed layers at theirs", "3 bits, fixed layers at theirs", "4 bits everywhere"):
        assert name in text
        assert name in page
    live = bitdial.load(file)
    for name in bitdial.read_artifact(file).plans:
        bitdial.set_bits(live, name)
    assert main(["export", str(file), "--bits", "2", "--onnx", str(tmp_path / "net.onnx")]) == 0
