"""The benchmarks of the packed kernels run as far as a machine without a GPU can take them.

What needs Triton's interpreter runs with the other tests of kernels (`test_interpreter.py`), but for one script, which
turns it on by itself.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
Run = Callable[..., str]


def run(script: str, *arguments: str) -> None:
    """Run a benchmark in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(FOLDER / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    spec = importlib.util.spec_from_file_location("linear", FOLDER / "linear.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_linear_writes_a_row_for_each_contender(tmp_path: Path) -> None:
    out = tmp_path / "linear.json"
    arguments = ["--tiny", "--rounds", "1", "--bits", "3", "--shapes", "16x256", "--tokens", "1", "--peers"]
    run("linear.py", *arguments, "--out", str(out))
    record = json.loads(out.read_text())
    assert record["command"] == f"python benchmarks/linear.py {' '.join(arguments)}"
    assert {"seed", "versions", "device", "copy_tb_s"} <= set(record)
    assert record["complete"] is True
    assert [(row["kernel"], row["weight_bits"]) for row in record["rows"]] == [
        ("bf16", 16),
        ("nested", 3),
        ("packed", 3),
    ]
    assert {"N", "K", "M", "act_bits", "speedup_vs_bf16", "floor_share"} <= set(record["rows"][0])


@pytest.mark.interpreter(only=True)
def test_linear_has_groups_beside_a_scale_per_row(run_here: Run, tmp_path: Path) -> None:
    out = tmp_path / "linear.json"
    arguments = "--tiny --rounds 1 --bits 2 --shapes 16x256 --tokens 1 --kernels nested --group-size 0 64 96 --floats"
    printed = run_here("linear.py", *arguments.split(), "--peers", "--out", str(out))
    record = json.loads(out.read_text())
    times = {row["kernel"]: row["us"] for row in record["rows"]}
    assert list(times) == ["bf16", "nested", "nested g64", "nested g64f"]  # 96 does not divide 256 columns
    ratios = {row["kernel"]: row["time_vs_per_row"] for row in record["rows"] if "time_vs_per_row" in row}
    assert list(ratios) == ["nested g64", "nested g64f"]
    assert all(abs(ratio - times[name] / times["nested"]) < 2e-3 for name, ratio in ratios.items())
    assert set(record["groups_vs_per_row"]) == {"nested g64 w2 M1", "nested g64f w2 M1"}
    assert "of the time with a scale per row: nested g64 w2 M1" in printed


def test_group_ratios_are_means_and_the_worst(linear: ModuleType) -> None:
    def row(kernel: str, ratio: float | None) -> dict[str, object]:
        return {"kernel": kernel, "weight_bits": 4, "M": 1} | ({} if ratio is None else {"time_vs_per_row": ratio})

    rows = [row("nested", None), row("nested g64", 1.0), row("nested g64", 1.21), row("packed g64", 1.05)]
    assert linear.group_ratios(rows) == {
        "nested g64 w4 M1": {"mean": 1.1, "worst": 1.21},
        "packed g64 w4 M1": {"mean": 1.05, "worst": 1.05},
    }


def test_a_run_that_ends_half_way_leaves_its_rows(
    linear: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timer(bench: object, name: str, contender: Any, x: object) -> Callable[[], float]:
        if contender.values.shape == (32, 256) and name == "packed":
            raise RuntimeError("no more time")
        return lambda: 1.0

    out = tmp_path / "linear.json"
    arguments = "--tiny --device cpu --rounds 1 --bits 3 --shapes 16x256 32x256 --tokens 1 --peers --out"
    monkeypatch.setattr(linear.Bench, "timer", timer)
    monkeypatch.setattr(sys, "argv", ["linear.py", *arguments.split(), str(out)])
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # main sets it; here it is reset afterwards
    with pytest.raises(RuntimeError, match="no more time"):
        linear.main()
    record = json.loads(out.read_text())
    assert record["complete"] is False
    assert [(row["kernel"], row["N"]) for row in record["rows"]] == [("bf16", 16), ("nested", 16), ("packed", 16)]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.interpreter(only=True)
def test_the_sweep_names_the_best_settings(run_here: Run) -> None:
    arguments = "--tiny --sweep --rounds 1 --bits 2 --shapes 16x256 --tokens 1 --kernels nested"
    printed = run_here("linear.py", *arguments.split(), "--few", "1,2,1,1,1,0 1,1,1,0,1,0,1", "--group-size", "64")
    assert "best nested g64 M 1 w2: 1," in printed


def test_headline_is_a_geometric_mean_over_all_shapes(linear: ModuleType) -> None:
    def row(shape: tuple[int, int], tokens: int, ratio: float) -> dict[str, object]:
        return {"kernel": "nested", "N": shape[0], "K": shape[1], "M": tokens, "weight_bits": 4,
                "speedup_vs_bf16": ratio}  # fmt: skip

    shapes = [(16, 256), (32, 256)]
    rows = [row(shapes[0], 1, 2.0), row(shapes[1], 1, 8.0), row(shapes[0], 4, 100.0)]
    assert linear.headline(rows, shapes) == {"nested w4": 4.0}
    assert linear.headline(rows[:1], shapes) == {}  # a shape is missing


def test_rounds_touch_more_than_any_cache_and_the_floor_counts_every_byte(linear: ModuleType) -> None:
    for shape in linear.SHAPES:
        for bits in (16, *linear.BITS):
            count = min(linear.MOST_CALLS, linear.copies(shape, bits))
            assert count * shape[0] * shape[1] * bits / 8 > 256e6
    assert linear.floor_bytes((16, 256), 2, 3) == 16 * 256 * 3 / 8 + 16 * 4 + 2 * 2 * (16 + 256)
    for floats, size in ((False, 1), (True, 4)):
        more = linear.Ours("nested", 64, floats).group_bytes((16, 256))
        assert more == 16 * 4 * size
        assert linear.floor_bytes((16, 256), 2, 3, more) == linear.floor_bytes((16, 256), 2, 3) + more


def test_wrong_results_are_not_timed(linear: ModuleType) -> None:
    import torch

    with pytest.raises(ValueError, match="off by"):
        linear.check("kernel", torch.zeros(2), torch.ones(2), 0.02)
    with pytest.raises(ValueError, match="off by"):
        linear.check("kernel", torch.full((2,), torch.nan), torch.ones(2), 0.02)


@pytest.mark.interpreter(only=True)
def test_switch_writes_rows_and_ends_as_freshly_made(run_here: Run, tmp_path: Path) -> None:
    out = tmp_path / "switch.json"
    run_here("switch.py", "--tiny", "--rounds", "1", "--out", str(out))
    record = json.loads(out.read_text())
    assert record["complete"] is True
    rows = record["rows"]
    assert {"model", "scheme", "from", "to", "ms", "copy_ms", "bytes_moved"} <= set(rows[0])
    assert [(r["scheme"], r["from"], r["to"]) for r in rows[:2]] == [
        ("double_rounding", 8, 2),
        ("double_rounding", 2, 4),
    ]
    assert [r["bytes_moved"] for r in rows[:4]] == [2 * 256 * 256 * 10 // 8, 2 * 256 * 256 * 12 // 8, 0, 0]
    found = {"switches": 3, "bytes_grown": 0, "equal_to_fresh": True}
    assert record["random"].pop("tiny") == found
    assert [(r["model"], r["scheme"], r["from"], r["to"]) for r in rows[4:]] == [
        ("live tiny", scheme, *pair)
        for scheme in ("double_rounding", "nested")
        for pair in ((8, 2), (2, 4), (8, "plan 1"), ("plan 1", "plan 2"))
    ]
    whole = rows[4]["bytes_moved"]
    assert [r["bytes_moved"] == whole for r in rows[4:8]] == [True, True, False, False]
    for scheme in ("double_rounding", "nested"):
        name = f"live tiny, {scheme}"
        assert record["random"].pop(name) == {**found, "addresses_kept": True}
        assert set(record["memory"][name]) == {"master", "active", "table", "words", "blocks"}
    assert not record["random"]


def test_memory_counts_what_each_scheme_holds(run_here: Run, tmp_path: Path) -> None:
    """From first principles: nested has the widest choice once; double_rounding a master of 8 bits beside it."""
    out = tmp_path / "memory.json"
    run_here("memory.py", "--tiny", "--device", "cpu", "--out", str(out))
    record = json.loads(out.read_text())
    assert record["complete"] is True
    rows = record["rows"]
    found = [(r["scheme"], r["bit_choices"][0], r["master_on"], r["active"], r["master"], r["host"]) for r in rows]
    assert found == [
        *(("nested", widest, "device", widest, 0, 0) for widest in (8, 4, 2)),
        *(
            ("double_rounding", widest, place, widest, 8 * (place == "device"), 8 * (place == "host"))
            for widest in (8, 4, 2)
            for place in ("device", "host")
        ),
    ]
    staging = 8 / 2  # the master of one of the two layers
    for row in rows:
        scales = 32 / 256
        least = scales + (staging if row["master_on"] == "host" else 0)
        assert least <= row["other"] < least + 0.02
    networks = record["networks"]
    assert networks["file_mb"] > 0
    for kernels in ("float", "integer", "float model"):
        assert set(networks[kernels]) == {"held", "peak"}
        assert networks[kernels]["peak"] >= 0


def test_decoding_on_the_cpu_has_a_row_for_each_contender(run_here: Run, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "decode.json"
    run_here("cpu_decode.py", "--tiny", "--bits", "8", "2", "--tokens", "1", "--rounds", "1", "--out", str(out))
    record = json.loads(out.read_text())
    assert [row["what"] for row in record["rows"]] == ["bf16", "float32", "8", "2"]
    assert all(row["tokens_per_s"] > 0 for row in record["rows"])
    assert record["rows"][0]["ratio_to_bf16"] == 1
    assert record["rows"][2]["resident_bytes"]["active"] > 0
    assert record["command"] == "python benchmarks/cpu_decode.py --tiny --bits 8 2 --tokens 1 --rounds 1"
