"""A language model in two processes over gloo, whole in each or spread over both, against the same run in one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file

from bitdial.recipes import llm as module
from bitdial.recipes.llm import llm
from bitdial.recipes.llm_options import LlmOptions
from bitdial.train.callbacks import Run

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
)

SCRIPT = '''
import datetime, json, sys, traceback
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from bitdial.errors import BitdialError
from bitdial.recipes import llm as module
from bitdial.recipes.llm import llm
from bitdial.recipes.llm_options import LlmOptions

OUT = Path(sys.argv[1])
SETTINGS = json.loads((OUT / "settings.json").read_text())
MINE = {}
torch.set_num_threads(1)


def options(name, **changes):
    values = SETTINGS | {"out": OUT / name, "model": Path(SETTINGS["model"]), "text": (Path(SETTINGS["text"]),)}
    return LlmOptions(**(values | {"bit_choices": tuple(SETTINGS["bit_choices"])} | changes))


def run(name, **changes):
    """A run; process 0 keeps the weights."""
    outcome = llm(options(name, **changes))
    if dist.get_rank() == 0:
        state = {n: v.contiguous().clone() for n, v in outcome.model.state_dict().items()}
        save_file(state, OUT / name / "state.safetensors")


def stopped(name, step, action, **changes):
    """A run in which `action(run)` happens after `step`; the error that it ends with."""
    watch = module._Watch
    before = watch.on_step
    watch.on_step = lambda self, run: action(run) if run.step == step else None
    try:
        llm(options(name, **changes))
    except (RuntimeError, BitdialError) as error:
        return str(error)
    finally:
        watch.on_step = before


def power_goes(run):
    raise RuntimeError("the power went off")


def break_layer(run):
    if dist.get_rank() == 1:
        layer = run.model.get_submodule("model.layers.1.mlp.up_proj")
        layer.register_forward_hook(lambda m, a, out: out * float("nan"))


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    try:
        run("whole in each")
        run("sharded", shard=True, checkpointing=True)
        run("handed on", shard=True)
        MINE["power"] = stopped("handed back", 3, power_goes, shard=True)
        MINE["nan"] = stopped("nan", 1, break_layer, shard=True)
    except Exception:
        MINE["error"] = traceback.format_exc()
    (OUT / f"{dist.get_rank()}.json").write_text(json.dumps(MINE))
    dist.destroy_process_group()
'''
STEPS = 4


@pytest.fixture(scope="module")
def settings(tiny_language: Any) -> dict[str, Any]:
    return {
        "model": str(tiny_language.model), "text": str(tiny_language.text), "name": "tiny", "progress": False,
        "bit_choices": (8, 4, 2), "group_size": 16, "length": 16, "batch": 4, "steps": STEPS, "evaluations": 1,
        "held_out": 16, "start": "max", "lr": 2e-3, "checkpoint_every": 1, "activations": "signed",
    }  # fmt: skip


def alone(folder: Path, settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The same run in this process."""
    options = LlmOptions(
        **(settings | {"out": folder, "model": Path(settings["model"]), "text": (Path(settings["text"]),)})
    )
    return llm(options).model.state_dict()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, settings: dict[str, Any]) -> dict[str, Any]:
    """The weights that each run came to, and what both processes said, from one launch."""
    folder, threads = tmp_path_factory.mktemp("processes"), torch.get_num_threads()
    torch.set_num_threads(1)
    no_gpu = pytest.MonkeyPatch()  # two processes want two
    no_gpu.setattr(torch.cuda, "is_available", lambda: False)
    no_gpu.setenv("CUDA_VISIBLE_DEVICES", "")
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "script.py").write_text(SCRIPT)
    try:
        found: dict[str, Any] = {"one process": alone(folder / "one", settings)}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module._Watch, "on_step", _stop_after_three)
            with pytest.raises(KeyboardInterrupt):
                alone(folder / "handed on", settings)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        command += ["--nproc-per-node", "2", str(folder / "script.py"), str(folder)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=180, check=False)
        assert ran.returncode == 0, ran.stderr[-3000:]
        said = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
        assert not any("error" in one for one in said), said
        for name in ("whole in each", "sharded", "handed on"):
            found[name] = load_file(folder / name / "state.safetensors")
        found["handed back"] = alone(folder / "handed back", settings)
    finally:
        no_gpu.undo()
        torch.set_num_threads(threads)
    return found | {"said": said}


def _stop_after_three(self: Any, run: Run) -> None:
    if run.step == STEPS // 2:
        raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("name", ["whole in each", "sharded", "handed on", "handed back"])
def test_the_weights_are_those_of_one_process(name: str, outcome: dict[str, Any]) -> None:
    """Also of runs that one process began and two went on with, and the other way round."""
    expected, found = outcome["one process"], outcome[name]
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_that_is_a_small_difference(outcome: dict[str, Any], settings: dict[str, Any]) -> None:
    """The run itself moved the weights a hundred times as far, so the test above can fail."""
    name = "model.layers.0.mlp.down_proj.weight"
    before = load_file(Path(settings["model"]) / "model.safetensors")[name]
    assert float((outcome["one process"][name] - before).abs().median()) > 1e-3


def test_both_processes_end_alike(outcome: dict[str, Any]) -> None:
    for said in outcome["said"]:
        assert said["power"] == "the power went off"
        assert said["nan"].startswith("step 1, 8 bits: the loss is nan")
    assert "layer 'model.layers.1.mlp.up_proj' put out NaN" in outcome["said"][1]["nan"]


def test_shard_needs_processes(settings: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Exception, match="--shard needs several processes"):
        alone(tmp_path, settings | {"shard": True})
