"""The demo of mixed precision, shortened: the whole path, and every promise it makes."""

import json
import re
import sys

import pytest

import bitdial
from bitdial.cli import main
from bitdial.demos.mixed import _compare_logits, run_mixed_demo
from bitdial.errors import ArtifactError
from bitdial.nn import TransitionalBatchNorm
from bitdial.recipes.digits import digits_data, digits_test

pytest.importorskip("highspy")


@pytest.mark.parametrize(("package", "extra"), [("highspy", "search"), ("sklearn", "demo")])
def test_what_is_missing_is_said_before_anything_trains(tmp_path, monkeypatch, capsys, package, extra) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    monkeypatch.setattr("bitdial.demos.mixed.train_float", lambda *_, **__: pytest.fail("it trained first"))
    assert main(["demo", "--mixed", "--out", str(tmp_path)]) == 1
    assert f"pip install 'bitdial[{extra}]'" in capsys.readouterr().err


@pytest.mark.slow
def test_mixed_demo_keeps_its_promises(tmp_path) -> None:
    told: list[str] = []
    outcome = run_mixed_demo(tmp_path, epochs=2, points=5, progress=False, tell=told.append)
    assert len(told) == 6
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mixed.html", "mixed.json", "mixed.safetensors"]
    result = json.loads((tmp_path / "mixed.json").read_text())
    assert result == json.loads(json.dumps(outcome.result))
    assert result["bytes"] == outcome.artifact.stat().st_size

    artifact, live = bitdial.read_artifact(outcome.artifact), bitdial.load(outcome.artifact)
    assert any(isinstance(module, TransitionalBatchNorm) for module in live.modules())
    assert artifact.plans == outcome.front.plans
    assert artifact.sensitivity is not None
    assert set(artifact.sensitivity.layers) == set(artifact.layers)
    assert artifact.metrics["front"] == json.loads(json.dumps(outcome.front.summary()))

    *_, x, y = digits_data(holdout=True)
    for name, plan in result["plans"].items():
        bitdial.set_bits(live, name)
        assert bitdial.accuracy(live, [(x, y)]) == pytest.approx(plan["held_out"])
        assert bitdial.accuracy(live, digits_test()) == plan["test"]
        assert plan["average_bits"] <= float(name.split()[0])
    held_out = [plan["held_out"] for plan in result["plans"].values()]
    assert held_out == sorted(held_out)  # more bits are never chosen to be worse
    assert held_out[-1] > 0.6  # chance is 0.1
    assert set(result["top1"]["hasb"]) == set(result["top1"]["none"]) == {"4", "3", "2"}
    assert all(0.1 < value <= 1 for value in result["mean_held_out"].values())
    page = (tmp_path / "mixed.html").read_text(encoding="utf-8")
    for words in ("Turn the dial", "Fronts compared", "HASB", "random sampling", "no mixed stage", "Hessian trace by"):
        assert words in page
    cells = re.findall(r'<th scope="row">([^<]*)</th><td>([\d.]+).%</td><td>[^<]*</td><td>([\d.]+).%</td>', page)
    shown = {name.partition(" (")[0]: (held, test) for name, held, test in cells}
    assert len(result["front"]) == len(outcome.front.front)
    for name, plan in result["front"].items():  # the page has the numbers of the JSON
        assert shown[name] == (f"{100 * plan['held_out']:.1f}", f"{100 * plan['test']:.1f}")

    # The check of the reloaded model can fail: against other plans it does.
    trained = bitdial.load_trainable(artifact).eval()
    plans = dict(artifact.plans)
    _compare_logits(trained, live, plans, digits_test())
    swapped = {"2.0 bits": plans["4.0 bits"]}
    with pytest.raises(ArtifactError, match=r"'2\.0 bits' the reloaded model differs"):
        _compare_logits(trained, live, swapped, digits_test())
