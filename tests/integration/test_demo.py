"""The demo with half of its epochs: the whole path, and every promise it makes; tests/long/demo.py has them all."""

import json
import sys

import pytest

import bitdial
import bitdial.demos.mixed
from bitdial.cli import main
from bitdial.demos.uniform import run_demo
from bitdial.recipes.digits import digits_test


def test_what_is_missing_is_said_before_anything_trains(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    monkeypatch.setattr(
        sys.modules["bitdial.recipes.digits"], "train_float", lambda *_, **__: pytest.fail("it trained first")
    )
    assert main(["demo", "--out", str(tmp_path)]) == 1
    assert "pip install 'bitdial[demo]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "arguments"), [("bitdial.recipes.digits", ["demo"]), ("bitdial.demos.mixed", ["demo", "--mixed"])]
)
def test_a_file_in_place_of_the_folder_is_said_before_anything_trains(
    tmp_path, monkeypatch, capsys, module, arguments
) -> None:
    pytest.importorskip("highspy")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(sys.modules[module], "train_float", lambda *_, **__: pytest.fail("it trained first"))
    assert main([*arguments, "--out", str(tmp_path / "file")]) == 1
    assert "is not a folder; choose another place" in capsys.readouterr().err


@pytest.mark.slow
def test_demo_keeps_its_promises(tmp_path) -> None:
    outcome = run_demo(tmp_path, epochs=8, progress=False)
    result = json.loads((tmp_path / "demo.json").read_text())
    assert result == outcome.result
    assert set(result) == {"float_top1", "top1", "bytes", "artifact"}
    for bits, points in (("8", 1), ("6", 1), ("4", 1), ("2", 4)):
        assert 100 * (result["float_top1"] - result["top1"][bits]) <= points, bits
    assert result["float_top1"] > 0.97
    assert all(outcome.identical_logits.values())
    assert min(outcome.exact_agreement.values()) >= 0.998
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo.html", "demo.json", "demo.safetensors"]

    path = tmp_path / result["artifact"]
    size = result["bytes"]
    assert size["artifact"] == path.stat().st_size
    assert size["artifact"] < sum(size["separate"].values()) / 1.5
    assert size["artifact"] < size["float"] / 2
    page = (tmp_path / "demo.html").read_text(encoding="utf-8").replace("\u00a0", " ")
    for bits, value in result["top1"].items():  # the page has the numbers of the JSON
        assert f'{{"name":"{bits} bits","title":"{bits} bits: {100 * value:.1f} %, 95 % interval' in page
        assert f">{size['separate'][bits]:,}<" in page
    assert "Accuracy on 500 test images" in page
    live = bitdial.load(path)
    accuracies = bitdial.evaluate(live, digits_test(), (8, 6, 4, 2))
    assert {str(bits): value for bits, value in accuracies.items()} == result["top1"]
