"""The comparison on ImageNet, as a whole on a few made-up images; random plans and the paired test by hand."""

import importlib.util
import itertools
import json
import math
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bitdial import BitPlan, QuantConfig, build_model, measure_costs, prepare, save
from bitdial.planning.cost import Costs

pytest.importorskip("highspy")
Image = pytest.importorskip("PIL.Image")

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


def load_script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("plan_comparison", monkeypatch)


def test_mcnemar_counts_tosses_of_a_coin(comparison: ModuleType) -> None:
    for gained, lost in itertools.product(range(5), repeat=2):
        one = [True] * gained + [False] * lost + [True, False, True]
        other = [False] * gained + [True] * lost + [True, False, True]
        tosses = gained + lost
        extreme = [
            heads
            for heads in itertools.product((0, 1), repeat=tosses)
            if abs(sum(heads) - Fraction(tosses, 2)) >= abs(gained - Fraction(tosses, 2))
        ]
        wanted = len(extreme) / 2**tosses
        assert comparison.mcnemar(one, other) == pytest.approx(wanted), (gained, lost)
    assert comparison.mcnemar([True] * 200, [False] * 200) == 2 / 2**200
    assert comparison.mcnemar([True] * 2000, [False] * 2000) == 0  # less than a float can hold
    assert math.isclose(comparison.mcnemar([True] * 10 + [False] * 2, [False] * 10 + [True] * 2), 158 / 4096)


@pytest.fixture(scope="module")
def costs() -> Costs:
    torch.manual_seed(0)
    net = build_model("cifar_resnet", blocks=1, width=4)
    config = QuantConfig(bit_choices=(8, 6, 4, 3, 2), keep_first_last=False)
    return measure_costs(prepare(net, config, torch.rand(4, 3, 8, 8)), torch.rand(1, 3, 8, 8))


def test_random_plans_are_as_large_as_the_budget_allows(comparison: ModuleType, costs: Costs) -> None:
    limit = costs.of((4, 8))["bytes"]
    plans = [comparison.random_plan(costs, "bytes", limit, seed=seed, activation_bits=8) for seed in range(8)]
    assert len(set(plans)) == 8
    assert plans[3] == comparison.random_plan(costs, "bytes", limit, seed=3, activation_bits=8)
    for plan in plans:
        assert costs.of(plan)["bytes"] <= limit
        assert {act for _, act in plan.values()} == {8}
        for name, (bits, _) in plan.items():
            higher = [b for b in costs.bit_choices[name] if b > bits]
            if higher:
                assert costs.of(BitPlan({**plan, name: (min(higher), 8)}))["bytes"] > limit
    with pytest.raises(ValueError, match="no plan has bytes"):
        comparison.random_plan(costs, "bytes", 10, seed=0)


def make_images(folder: Path) -> None:
    rng = np.random.default_rng(0)
    labels: dict[str, dict[str, int]] = {}
    for part, count in (("calibration", 6), ("dev", 10)):
        (folder / part).mkdir(parents=True)
        labels[part] = {f"{i:03}.jpg": int(rng.integers(10)) for i in range(count)}
        for name in labels[part]:
            Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / part / name)
    (folder / "labels.json").write_text(json.dumps(labels))


def test_a_run_writes_a_row_for_each_method(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    net = build_model("cifar_resnet", blocks=1, width=4)
    normalisation = {"mean": [127.0] * 3, "std": [128.0] * 3, "order": "RGB"}
    metadata = {"model": "cifar_resnet", "arguments": json.dumps({"blocks": 1, "width": 4})}
    save_file(net.state_dict(), tmp_path / "float.safetensors", {**metadata, "images": json.dumps(normalisation)})
    config = QuantConfig(bit_choices=(8, 4, 2), keep_first_last=False)
    save(prepare(net, config, torch.randn(4, 3, 16, 16)), tmp_path / "net.safetensors")
    make_images(tmp_path / "images")
    out = tmp_path / "rows.json"
    script = load_script("imagenet_mixed", monkeypatch)
    words = [str(tmp_path / "net.safetensors"), "--weights", str(tmp_path / "float.safetensors")]
    words += ["--images", str(tmp_path / "images"), "--random", "2", "--hessian-samples", "2", "--batch", "4"]
    words += ["--patience", "3", "--device", "cpu", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["imagenet_mixed.py", *words])
    script.main()
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    assert [(row["method"], row["seed"]) for row in rows] == [
        ("measured", 0), ("hessian", 0), ("random", 0), ("random", 1),
    ]  # fmt: skip
    for row in rows:
        assert row["bytes"] <= row["uniform_bytes"]
        assert row["images"] == 10
        assert 0 <= row["p_value"] <= 1
        assert (row["model"], row["effort"], row["activation_bits"]) == ("cifar_resnet", "none", 8)
        assert str(tmp_path) not in json.dumps(row)
    assert rows[0]["kl"] <= rows[0]["uniform_kl"]
    assert rows[0]["samples"] == 6
    again = ["imagenet_mixed.py", *words, "--methods", "random"]
    monkeypatch.setattr(sys, "argv", again)
    script.main()
    assert len(json.loads(out.read_text())) == 4  # rows of the same run are replaced
    assert "random" in capsys.readouterr().out
