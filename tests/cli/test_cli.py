"""The command line: what it prints, its exit codes, and clear words for wrong input."""

import json

import numpy as np
import pytest
import torch

import bitdial
from bitdial.artifact import amend, sizes
from bitdial.cli import main
from bitdial.cli.arguments import resolve_setting
from bitdial.export.onnx import OnnxExport
from bitdial.planning import MeasuredFront, MeasuredPlan
from bitdial.recipes.cifar10 import cifar10_test


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory):
    torch.manual_seed(0)
    x = torch.rand(16, 1, 8, 8)
    model = bitdial.build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    prepared = bitdial.prepare(model, bitdial.QuantConfig(), x)
    path = tmp_path_factory.mktemp("cli") / "model.safetensors"
    plans = {"narrow-acts": bitdial.BitPlan(default=(8, 2))}
    bitdial.save(prepared, path, plans=plans, metrics={"recipe": "digits", "top1": {"8": 0.5}})
    return path


def test_inspect_shows_layers_sizes_and_digest(file, capsys) -> None:
    assert main(["inspect", str(file)]) == 0
    text = capsys.readouterr().out
    for word in ("double_rounding", "layer1.0.conv1", "narrow-acts", "50.00 %", "(checked)", "8-bit integer codes"):
        assert word in text.replace("\n", " "), word


def test_inspect_shows_the_report_of_prepare(file, capsys) -> None:
    assert main(["inspect", str(file)]) == 0
    assert str(bitdial.describe(bitdial.read_artifact(file))) in capsys.readouterr().out


def test_inspect_says_what_norms_cost(file, capsys, tmp_path) -> None:
    mixed = bitdial.add_transitions(bitdial.load_trainable(file), "statistics")
    bitdial.save(mixed, tmp_path / "mixed.safetensors")
    size = sizes(bitdial.read_artifact(tmp_path / "mixed.safetensors"))
    none, full, now = (
        100 * size["norms_by_transitions"][form] / size["codes"] for form in ("none", "full", "statistics")
    )
    assert none < now < full
    expected = f"without transitions {none:.1f} %, with those of statistics {now:.1f} %, with full ones {full:.1f} %"
    for path, share in ((file, none), (tmp_path / "mixed.safetensors", now)):
        assert main(["inspect", str(path)]) == 0
        assert f"{share:.1f} % of the codes' bytes; {expected}" in capsys.readouterr().out


def test_inspect_json_is_complete(file, capsys) -> None:
    assert main(["inspect", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    artifact = bitdial.read_artifact(file)
    assert facts["digest"] == artifact.digest
    assert facts["narrows"] is True
    assert facts["bit_choices"] == [8, 6, 4, 2]
    assert facts["sizes"]["file"] == file.stat().st_size
    assert set(facts["sizes"]["separate"]) == {"8", "6", "4", "2"}
    assert facts["layers"] == artifact.layers


def test_inspect_says_where_float_weights_are_kept(tmp_path, capsys) -> None:
    model = bitdial.build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    prepared = bitdial.prepare(model, bitdial.QuantConfig(scheme="lsq"), torch.rand(4, 1, 8, 8))
    bitdial.save(prepared, tmp_path / "lsq.safetensors")
    assert main(["inspect", str(tmp_path / "lsq.safetensors")]) == 0
    assert "cannot be narrowed from integers" in capsys.readouterr().out.replace("\n", " ")


def test_inspect_shows_clip_ratios(tmp_path, capsys) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    config = bitdial.QuantConfig(bit_choices=(8, 4), activations="dynamic", start="max")
    bitdial.save(bitdial.prepare(net, config, torch.randn(4, 8)), tmp_path / "m.safetensors")
    assert main(["inspect", str(tmp_path / "m.safetensors")]) == 0
    text = capsys.readouterr().out
    assert "dynamic, clip 1 / 0.9" in text.replace("\n", " ")
    assert "a scale for each token in 1 layers" in text


def test_eval_equals_the_library(file, capsys, tmp_path) -> None:
    x, y = torch.rand(40, 1, 8, 8), torch.randint(0, 10, (40,))
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=y.numpy())
    command = ["eval", str(file), "--data", str(tmp_path / "data.npz"), "--bits", "4", "--bits", "4:8"]
    assert main([*command, "--bits", "narrow-acts"]) == 0
    text = capsys.readouterr().out
    live = bitdial.load(file)
    for label, setting in (("4 bits", 4), ("w4a8", (4, 8)), ("narrow-acts", bitdial.BitPlan(default=(8, 2)))):
        bitdial.set_bits(live, setting)
        expected = f"{100 * bitdial.accuracy(live, [(x, y)]):.2f} %"
        row = next(line for line in text.splitlines() if label in line)
        assert expected in row


def test_labels_of_no_class_are_named(file, capsys, tmp_path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((4, 1, 8, 8), np.float32), y=np.array([1, 2, 57, 3]))
    assert main(["eval", str(file), "--data", str(tmp_path / "data.npz"), "--bits", "4"]) == 1
    assert "the label 57 is none of the model's 10 classes, 0 to 9" in capsys.readouterr().err


SEARCHED = {"3.0 bits": bitdial.BitPlan(default=4), "2.5 bits": bitdial.BitPlan({"layer1.0.conv1": 2}, default=8)}


def searched(path, *names: str) -> str:
    """A file as `bitdial search --out` writes it."""
    plans = {name: {"plan": SEARCHED[name].to_dict(), "predicted_loss": 1.0} for name in names}
    path.write_text(json.dumps({"plans": plans}))
    return str(path)


def test_bits_from_what_search_writes(file, capsys, tmp_path) -> None:
    x, y = torch.rand(40, 1, 8, 8), torch.randint(0, 10, (40,))
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=y.numpy())
    one, two = searched(tmp_path / "one.json", "2.5 bits"), searched(tmp_path / "two.json", "3.0 bits", "2.5 bits")
    settings = {one: "2.5 bits", f"{two}:3.0 bits": "3.0 bits", f"{two}:2.5 bits": "2.5 bits"}
    options = [word for setting in settings for word in ("--bits", setting)]
    assert main(["eval", str(file), "--data", str(tmp_path / "data.npz"), *options]) == 0
    text, live = capsys.readouterr().out, bitdial.load(file)
    for setting, name in settings.items():
        bitdial.set_bits(live, SEARCHED[name])
        row = next(line for line in text.splitlines() if line.startswith(f"{setting} "))
        assert f"{100 * bitdial.accuracy(live, [(x, y)]):.2f} %" in row
    assert main(["switch", str(file), "--bits", one, "--data", str(tmp_path / "data.npz")]) == 0
    assert "Accuracy there" in capsys.readouterr().out
    assert main(["export", str(file), "--onnx", str(tmp_path / "x.onnx"), "--bits", one]) == 0
    assert "1 x 2 bits as INT2, 7 x 8 bits as INT8" in capsys.readouterr().out


def measured(path) -> str:
    """A file as `bitdial pareto --out` writes it: a plan on the front, one that is beaten."""
    plans = [
        MeasuredPlan(plan=SEARCHED["2.5 bits"], costs={"average_bits": 2.5}, accuracy=0.5, name="2.50 bits"),
        MeasuredPlan(plan=SEARCHED["3.0 bits"], costs={"average_bits": 3.0}, accuracy=0.4),
    ]
    front = MeasuredFront(label="file", quantity="average_bits", samples=9, candidates=tuple(plans), uniform=())
    front.save(path)
    return str(path)


def test_bits_from_what_pareto_writes(file, tmp_path) -> None:
    """By the budgets and by the names under which `pareto` stores the plans in a file."""
    path, artifact = measured(tmp_path / "front.json"), bitdial.read_artifact(file)
    for name in ("2.5 bits", "3.0 bits", "2.50 bits"):
        assert resolve_setting(f"{path}:{name}", artifact) == SEARCHED["2.5 bits"]
    assert main(["switch", str(file), "--bits", f"{path}:3.0 bits"]) == 0


@pytest.mark.parametrize("command", [["eval"], ["switch"], ["export", "--onnx", "x.onnx"]])
def test_bits_from_files_that_do_not_say_which_plan(file, capsys, tmp_path, command) -> None:
    two = searched(tmp_path / "two.json", "3.0 bits", "2.5 bits")
    (tmp_path / "odd.json").write_text('{"plans": {"a": [4]}}')
    (tmp_path / "empty.json").write_text(
        '{"label": "", "quantity": "average_bits", "samples": 1, "candidates": [], "uniform": []}'
    )
    (tmp_path / "cut.json").write_text('{"candidates": [{"plan": 4}]}')
    for bits, words in (
        (two, f"has 2 plans; choose one by its name, as in {two}:NAME ('3.0 bits', '2.5 bits')"),
        (f"{two}:4", f"has no plan '4'; choose one by its name, as in {two}:NAME ('3.0 bits', '2.5 bits')"),
        (str(tmp_path / "odd.json"), "not a plan, as json.dumps(plan.to_dict()) gives, nor what `bitdial search"),
        (measured(tmp_path / "front.json"), "choose one by its name"),
        (str(tmp_path / "front.json:9.9 bits"), "has no plan '9.9 bits'; choose one by its name"),
        (str(tmp_path / "empty.json:3.0 bits"), "nor what `bitdial search --out` or `bitdial pareto --out` writes"),
        (str(tmp_path / "cut.json:3.0 bits"), "nor what `bitdial search --out` or `bitdial pareto --out` writes"),
        (str(tmp_path / "none.json"), "No such file"),
    ):
        assert main([*command, str(file), "--bits", bits]) == 1
        assert words in capsys.readouterr().err


def test_a_recipe_that_is_no_text_is_no_recipe(file, capsys, tmp_path) -> None:
    odd = tmp_path / "odd.safetensors"
    odd.write_bytes(file.read_bytes())
    amend(odd, metrics={"recipe": ["digits"]})
    assert main(["eval", str(odd)]) == 1
    assert "does not say what it was trained on" in capsys.readouterr().err
    assert main(["switch", str(odd), "--bits", "2"]) == 0


def test_eval_on_integer_kernels(file, capsys, tmp_path) -> None:
    x, y = torch.rand(40, 1, 8, 8), torch.randint(0, 10, (40,))
    np.savez(tmp_path / "data.npz", x=x.numpy(), y=y.numpy())
    command = ["eval", str(file), "--data", str(tmp_path / "data.npz"), "--bits", "2"]
    assert main([*command, "--kernels", "integer"]) == 0
    live = bitdial.load(file, kernels="integer")
    bitdial.set_bits(live, 2)
    assert f"{100 * bitdial.accuracy(live, [(x, y)]):.2f} %" in capsys.readouterr().out
    assert main([*command, "--kernels", "packed"]) == 1
    assert "packed kernels serve no layer of this file" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [["eval"], ["switch", "--bits", "2"]])
def test_a_gpu_that_is_not_there(command, file, capsys) -> None:
    assert main([*command, str(file), "--device", "cuda"]) == 1
    assert "finds no GPU here" in capsys.readouterr().err


def test_eval_on_the_test_images_of_cifar10(capsys, tmp_path) -> None:
    model, images = bitdial.build_model("cifar_resnet", blocks=1, width=4), torch.randint(0, 256, (8, 3, 32, 32))
    images, labels = images.to(torch.uint8).numpy(), torch.arange(8).numpy()
    np.savez(tmp_path / "cifar10.npz", x_test=images, y_test=labels)  # nothing else is read
    data = cifar10_test(tmp_path, device=torch.device("cpu"))
    prepared = bitdial.prepare(model, bitdial.QuantConfig(), data[0])
    bitdial.save(prepared, tmp_path / "model.safetensors", metrics={"recipe": "cifar10-resnet20"})
    assert main(["eval", str(tmp_path / "model.safetensors"), "--bits", "8", "--data", str(tmp_path)]) == 0
    expected = bitdial.accuracy(bitdial.load(tmp_path / "model.safetensors"), [data])
    assert f"{100 * expected:.2f} %" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "model.safetensors")]) == 1
    assert "the folder with CIFAR-10" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["4", "4:8", "", " "])
def test_a_plan_is_not_named_like_a_width(name, file, capsys) -> None:
    with pytest.raises(SystemExit):
        main(["search", str(file), "--average-bits", "4", "--name", name, "--store"])
    assert "cannot name a plan" in capsys.readouterr().err


def test_switch_times_each_width_and_evaluates(file, capsys) -> None:
    assert main(["switch", str(file), "--bits", "2"]) == 0
    text = capsys.readouterr().out
    assert text.count("ms") == 4
    assert "Accuracy there" in text


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["inspect", "missing.safetensors"], "there is no file"),
        (["eval", "FILE", "--bits", "5"], "bits=5 is not in bit_choices"),
        (["eval", "FILE", "--bits", "99"], "not a bit-width"),
        (["switch", "FILE", "--bits", "nonsense"], "not a width"),
        (["eval", "FILE", "--data", "nowhere"], "neither a recipe"),
        (["eval", "FILE", "--data", "FILE"], "not an .npz file"),
        (["eval", "FILE", "--data", "SHAPE"], "does not fit the model"),
        (["eval", "FILE", "--data", "LABELS"], "targets of shape"),
        (["eval", "FILE", "--data", "BYTES"], "x is uint8; give float32, scaled as in training"),
        (["eval", "FILE", "--data", "ARRAY"], "give an .npz file"),
        (["train", "digits", "--out", "OUT", "--recalibrate", "2"], "takes no --recalibrate"),
        (["train", "digits", "--out", "OUT", "--data", "OUT"], "takes no --data"),
        (["train", "digits", "--out", "OUT", "--epochs", "1", "--lr", "-1"], "lr=-1.0 must be a positive number"),
    ],
)
def test_wrong_input_is_explained_on_stderr(file, capsys, tmp_path, command, words) -> None:
    np.savez(tmp_path / "shape.npz", x=np.zeros((4, 3, 9), np.float32), y=np.zeros(4, np.int64))
    np.savez(tmp_path / "labels.npz", x=np.zeros((4, 1, 8, 8), np.float32), y=np.zeros((4, 2), np.int64))
    np.savez(tmp_path / "bytes.npz", x=np.zeros((4, 1, 8, 8), np.uint8), y=np.zeros(4, np.int64))
    np.save(tmp_path / "array.npy", np.zeros((4, 1, 8, 8), np.float32))
    files = {"SHAPE": "shape.npz", "LABELS": "labels.npz", "BYTES": "bytes.npz", "ARRAY": "array.npy", "OUT": "o"}
    places = {"FILE": file, **{name: tmp_path / path for name, path in files.items()}}
    assert main([str(places.get(part, part)) for part in command]) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("bitdial: ")
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["nonsense"],
        ["train", "nothing", "--out", "x"],
        ["train", "digits", "--out", "x", "--bits", "2,4"],
        ["train", "digits", "--out", "x", "--seed", "1" + "0" * 30],
    ],
)
def test_wrong_usage_exits_with_2(capsys, command) -> None:
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 2


@pytest.mark.parametrize("bits", ["8,,4", "", "8;4", "8,x", "8,4.0"])
def test_what_bits_look_like(capsys, bits) -> None:
    with pytest.raises(SystemExit):
        main(["train", "digits", "--out", "x", "--bits", bits])
    assert f"{bits!r} is not widths with commas between them, such as 8,6,4,2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["--help"],
        *(
            [name, "--help"]
            for name in ("demo", "train", "calibrate", "eval", "inspect", "switch", "sensitivity", "search", "pareto")
        ),
    ],
)
def test_help_of_every_command(capsys, command) -> None:
    with pytest.raises(SystemExit) as stop:
        main(command)
    assert stop.value.code == 0
    assert "usage: bitdial" in capsys.readouterr().out


def test_train_runs_a_recipe_with_overrides(tmp_path, capsys) -> None:
    command = ["train", "digits", "--out", str(tmp_path), "--epochs", "1", "--bits", "4,2", "--scheme", "nested"]
    assert main(command) == 0
    assert "Saved" in capsys.readouterr().out
    artifact = bitdial.read_artifact(tmp_path / "digits.safetensors")
    assert artifact.scheme == "nested"
    assert artifact.bit_choices == (4, 2)


def test_export_writes_an_onnx_file_at_a_setting(file, capsys, tmp_path, monkeypatch) -> None:
    """The settings that reach `export_onnx`, the words about what it wrote, and once the bytes themselves."""
    asked = []

    def export(live, path, sample, **options):
        """Twice for real; what the others would have written is plain."""
        asked.append(options["bits"])
        if plain := {(6, 4): (6, 8), bitdial.BitPlan(default=(8, 2)): (8, 8)}.get(options["bits"]):
            return OnnxExport(path=path, bytes=1, opset=21, weights=dict.fromkeys(bitdial.get_bits(live), plain))
        return bitdial.export_onnx(live, path, sample, **options)

    monkeypatch.setattr("bitdial.cli.export.export_onnx", export)
    mixed = bitdial.BitPlan({"layer1.0.conv1": 2}, default=(4, 8))
    (tmp_path / "mixed.json").write_text(json.dumps(mixed.to_dict()))
    target = tmp_path / "out" / "model.onnx"
    said = {
        "6:4": "8 x 6 bits as INT8",
        "narrow-acts": "8 x 8 bits as INT8",
        str(tmp_path / "mixed.json"): "1 x 2 bits as INT2, 7 x 4 bits as INT4",
    }
    for bits, words in said.items():
        assert main(["export", str(file), "--onnx", str(target), "--bits", bits, "--input", "1x8x8"]) == 0
        assert words in capsys.readouterr().out
    assert asked == [(6, 4), bitdial.BitPlan(default=(8, 2)), mixed]
    bitdial.export_onnx(bitdial.load(file), tmp_path / "library.onnx", torch.rand(1, 1, 8, 8), bits=mixed)
    assert target.read_bytes() == (tmp_path / "library.onnx").read_bytes()
    assert main(["export", str(file), "--onnx", str(target), "--bits", "2", "--opset", "21"]) == 0
    assert "8 x 2 bits as INT4" in capsys.readouterr().out, "the recipe says what an input looks like"
    assert asked[-1] == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--bits", "5"], "bits=5 is not in bit_choices (8, 6, 4, 2)"),
        (["--bits", "wide"], "--bits wide: not a width, a pair such as 4:8, a .json file, or a stored plan (narrow-"),
        (["--bits", "none.json"], "cannot read none.json: No such file"),
        (["--bits", "4", "--input", "3x8x8"], "the model does not run on the sample"),
    ],
)
def test_export_explains_what_does_not_fit(file, capsys, tmp_path, options, words) -> None:
    assert main(["export", str(file), "--onnx", str(tmp_path / "x.onnx"), "--input", "1x8x8", *options]) == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "x.onnx").exists()


def test_export_asks_for_the_shape_that_a_file_does_not_tell(capsys, tmp_path) -> None:
    model = bitdial.build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    bitdial.save(bitdial.prepare(model, bitdial.QuantConfig(), torch.rand(4, 1, 8, 8)), tmp_path / "m.safetensors")
    assert main(["export", str(tmp_path / "m.safetensors"), "--onnx", str(tmp_path / "x.onnx")]) == 1
    assert "--input" in capsys.readouterr().err
