"""How commands end: exit codes, one line for an error, and what works without the extras."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import bitdial
from bitdial.artifact import amend
from bitdial.cli import main
from bitdial.errors import BitdialError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    model = bitdial.build_model("cifar_resnet", blocks=1, width=4, in_channels=1)
    path = tmp_path / "net.safetensors"
    prepared = bitdial.prepare(model, bitdial.QuantConfig(), torch.rand(4, 1, 8, 8))
    bitdial.save(prepared, path, metrics={"recipe": "digits", "top1": {"8": 0.5}})
    return path


@pytest.mark.parametrize(
    ("problem", "code", "said"),
    [
        (BitdialError("first\n   second"), 1, "bitdial: first second\n"),
        (BitdialError("a \x1b[31mred\x07 name"), 1, "bitdial: a \\x1b[31mred\\x07 name\n"),
        (PermissionError(13, "Permission denied", "x"), 1, "bitdial: [Errno 13] Permission denied: 'x'\n"),
        (KeyboardInterrupt(), 130, "bitdial: interrupted; run the same command again to go on from what was saved\n"),
        (KeyboardInterrupt("stopped by Ctrl-C after step 3"), 130, "bitdial: stopped by Ctrl-C after step 3\n"),
    ],
    ids=str,
)
def test_how_a_command_ends(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    problem: BaseException,
    code: int,
    said: str,
) -> None:
    def fail(options: object) -> None:
        raise problem

    monkeypatch.setattr("bitdial.cli.train.run", fail)
    assert main(["train", "digits", "--out", "x"]) == code
    assert capsys.readouterr().err == said


def test_only_a_training_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bitdial.cli.inspection.run", stop)
    assert main(["inspect", "x"]) == 130
    assert capsys.readouterr().err == "bitdial: interrupted\n"


BARE = """
import sys
for name in ("rich", "matplotlib", "sklearn", "highspy", "onnx", "onnxscript", "onnxruntime", "transformers", "gguf"):
    sys.modules[name] = None
from bitdial.cli import main
sys.exit(main(sys.argv[1:]))
"""


def bare(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BARE, *words], capture_output=True, text=True, timeout=60)


def test_inspect_works_in_a_bare_install(file: Path) -> None:
    run = bare("inspect", str(file))
    assert (run.returncode, run.stderr) == (0, "")
    assert "layer1.0.conv1" in run.stdout
    assert run.stdout.replace("\n", "").isprintable(), "no control characters"
    assert run.stdout.isascii()


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        (["eval", "FILE"], "demo"),
        (["demo", "--out", "OUT"], "demo"),
        (["demo", "--mixed", "--out", "OUT"], "search"),
        (["train", "digits", "--out", "OUT"], "demo"),
        (["export", "FILE", "--onnx", "OUT"], "onnx"),
        (["export", "FILE", "--gguf", "OUT", "--model", "OUT", "--bits", "4"], "gguf"),
        (["eval", "FILE", "--images", "OUT"], "images"),
    ],
    ids=str,
)
def test_what_lacks_is_named_by_its_extra(
    file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    extra: str,
) -> None:
    absent = ("rich", "matplotlib", "sklearn", "sklearn.datasets", "highspy", "onnx", "onnxscript", "PIL.Image", "gguf")
    for name in absent:
        monkeypatch.setitem(sys.modules, name, None)
    places = {"FILE": str(file), "OUT": str(file.parent / "out")}
    assert main([places.get(word, word) for word in words]) == 1
    assert f"is not installed; install it with: pip install 'bitdial[{extra}]'" in capsys.readouterr().err


def test_extras_in_messages_bring_what_they_say() -> None:
    """Each names an extra of pyproject.toml that has the package, as README does."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    brings = {extra: {re.split(r"[<>=;\[ ]", package)[0] for package in packages} for extra, packages in extras.items()}
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    named = re.findall(r'raise MissingDependencyError\.missing\("(\w+)", (?:[\w.]+ or )?"([\w-]+)"\)', sources)
    assert len(named) == sources.count("raise MissingDependencyError.missing("), "one is written in another way"
    assert {extra for extra, _ in named} >= {"demo", "search", "onnx", "hf", "tensorboard"}
    for extra, package in named:
        assert package in brings[extra], (extra, package)
    assert set(re.findall(r"bitdial\[(\w+)\]", sources)) - {"extra"} <= set(extras)
    table = {row[0]: row[1] for row in re.findall(r"^\| `(\w+)` \| ([^|]*) \|", (ROOT / "README.md").read_text(), re.M)}
    for extra in extras:
        assert extra in table, extra
    for extra, packages in brings.items():
        assert extra == "dev" or set(table[extra].split(", ")) == packages, extra


ENDLESS = """
import sys
from bitdial.cli import entry
entry._action = lambda name: lambda options: print("line\\n" * 100_000)
sys.exit(entry.main(["inspect", "x"]))
"""


def test_a_reader_that_has_seen_enough() -> None:
    """As `bitdial inspect FILE | head -1`: the pipe is closed while there is more to write."""
    with subprocess.Popen([sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"line\n"
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.returncode == 0


def test_inspect_says_which_images_and_which_run(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown() -> list[str]:
        assert main(["inspect", str(file)]) == 0
        return capsys.readouterr().out.splitlines()

    assert "By width; stored accuracy on: not recorded" in shown()
    assert any(re.fullmatch(r"made by +not recorded", line) for line in shown())
    images = {"data": "digits", "part": "the test set", "count": 1500}
    amend(file, metrics={"images": images, "run": {"recipe": "digits", "name": "digits-seed=1", "settings": {}}})
    assert "By width; stored accuracy on: 1,500 images of digits, the test set" in shown()
    assert any(re.fullmatch(r"made by +the recipe digits, run digits-seed=1", line) for line in shown())
    amend(file, metrics={"top1": None})
    assert "By width" in shown()


def test_names_in_a_file_do_not_steer_the_terminal(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    amend(file, plans={"a\x1b[2J\nb": bitdial.BitPlan(default=4)}, metrics={"run": {"recipe": "\r", "name": "\x07"}})
    assert main(["inspect", str(file)]) == 0
    text = capsys.readouterr().out
    assert text.replace("\n", "").isprintable()
    assert "a\\x1b[2J\\nb" in text
    assert main(["inspect", str(file), "--json"]) == 0
    assert "a\x1b[2J\nb" in json.loads(capsys.readouterr().out)["plans"]
