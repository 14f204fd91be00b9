"""Two processes over gloo: one model at every step, the whole batch's gradients, one writer, and one end for both."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch.distributed

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="torch without gloo"
)

SCRIPT = '''
import datetime, inspect, json, os, signal, sys, traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import bitdial.files.container as container
from bitdial.prepare.config import QuantConfig
from bitdial.files.container import read_container
from bitdial.errors import BitdialError, CheckpointError, ConfigError
from bitdial.dial.dial import set_bits
from bitdial.prepare.prepare import prepare
from bitdial.train import ArrayData, JointStep, TrainConfig, distributed, train

BITS = (8, 4, 2)
OUT = Path(sys.argv[1])
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(0)
INPUTS, TARGETS = torch.randn(20, 2, 4, 4, generator=generator), torch.randint(0, 3, (20,), generator=generator)
MINE = {}


def make(seed=0, norms=True, dropout=0.0, dtype=torch.float32):
    torch.manual_seed(seed)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4) if norms else nn.Identity(), nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4) if norms else nn.Identity(), nn.ReLU(),
        nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 3),
    )
    return prepare(net, QuantConfig(bit_choices=BITS), INPUTS).to(dtype)


def in_ddp(model):
    """As a user would; torch 2.13 renames the setting that keeps it from overwriting the norm statistics."""
    sync = {"forward_sync_buffers", "broadcast_buffers"} & set(inspect.signature(DistributedDataParallel).parameters)
    return DistributedDataParallel(model, find_unused_parameters=True, **{max(sync): False})


def as_it_is(model):
    return model


WAYS = {"own": as_it_is, "DDP": in_ddp}  # who averages the gradients


def data(batch_size=8):
    return ArrayData(INPUTS, TARGETS, batch_size=batch_size)


def flat(tensors):
    return torch.cat([t.detach().double().reshape(-1) for t in tensors]).nan_to_num(nan=1e9)


def state(model, step=None):
    """Everything that must be the same on all ranks, in one row of numbers."""
    tensors = list(model.state_dict().values())
    if step is not None:
        for optimizer in [step.weight_optimizer, *step.scale_optimizers.values()]:
            for values in optimizer.state_dict()["state"].values():
                tensors += [torch.as_tensor(v) for v in values.values() if v is not None]
        tensors += step.guard.floors
    return flat(tensors)


def same_everywhere(row):
    sizes = [torch.empty(1) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([float(row.numel())]))
    if len({float(s) for s in sizes}) > 1:
        return False
    parts = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, row)
    return all(torch.equal(part, parts[0]) for part in parts)


def check(function):
    """Run it; what it returns (a list of complaints, the same or not on both ranks) is kept by name."""
    name = function.__name__
    try:
        problems = function()
    except Exception:
        problems = [traceback.format_exc()]
    MINE[name] = problems
    (OUT / f"{RANK}.json").write_text(json.dumps(MINE))


def train_quietly(model, source, config, **rest):
    """train(); the error it ends with, if any, as (class name, message)."""
    try:
        train(model, source, config, progress=False, **rest)
    except BitdialError as error:
        return type(error).__name__, str(error)
    return None


CONFIGS = {
    "defaults": {},
    "per_bits": {"scale_state": "per_bits"},
    "sgd, clipped": {"optimizer": "sgd", "clip_norm": 0.5},
    "A.1": {"update": "accumulated", "alrs": "off"},
    "progressive": {"distill": "progressive"},
    "parts": {"accumulate": 2},
    "sampled": {"sampling": "random", "sigma": 0.9, "sigma_warmup": 0},
    "own optimizer": {},
}


def make_step(model, name, epochs=2):
    """The step of a config; each rank starts with weights of its own: the first one's count."""
    own = (lambda named: torch.optim.RMSprop([p for _, p in named], lr=1e-3)) if name == "own optimizer" else None
    config = TrainConfig(epochs=epochs, lr=1e-2, **CONFIGS[name])
    return JointStep(model, config, steps_per_epoch=3, samples=20, optimizer=own)


def equal_after_every_step():
    problems = []
    for name in CONFIGS:
        model = make(seed=RANK)
        step = make_step(model, name)
        shares = []
        for epoch in range(2):
            for batch in data().batches(epoch, rank=RANK, world=2):
                before = state(model)
                step(batch.inputs, batch.targets, batch.index)
                shares.append(batch.index)
                if not same_everywhere(state(model, step)):
                    problems.append(f"{name}: the ranks differ after step {step.step}")
                if torch.equal(before, state(model)):
                    problems.append(f"{name}: step {step.step} did nothing")
            step.end_epoch()
        if same_everywhere(torch.cat(shares).double()):
            problems.append(f"{name}: both ranks saw the same data")
    return problems


def the_same_as_under_ddp():
    """Bit for bit: a mean of two is one rounding. With parts, DDP averages each of them and ours their sum: float64."""
    problems = []
    for name in CONFIGS:
        rows, reports = {}, {}
        dtype = torch.float64 if name == "parts" else torch.float32
        for way, wrap in WAYS.items():
            model = make(dtype=dtype)
            step = make_step(wrap(model), name, epochs=1)
            for batch in data().batches(0, rank=RANK, world=2):
                reports[way] = step(batch.inputs.to(dtype), batch.targets, batch.index)
            rows[way] = state(model, step)
        peaks = [flat([*r.weight_scale_peaks.values(), *r.act_scale_peaks.values()]) for r in reports.values()]
        for mine, theirs in (rows.values(), peaks):
            same = torch.allclose(mine, theirs, rtol=1e-9) if name == "parts" else torch.equal(mine, theirs)
            if not same:
                problems.append(f"{name}: {float((mine - theirs).abs().max())} off")
    return problems


class Branches(nn.Module):
    """Goes one of two ways, by the data."""

    def __init__(self):
        super().__init__()
        self.stem, self.one, self.other, self.idle, self.head = (nn.Linear(4, 4) for _ in range(5))

    def forward(self, x):
        x = torch.relu(self.stem(x))
        return self.head(torch.relu(self.one(x) if x.shape[0] % 2 else self.other(x)))


def a_parameter_that_one_rank_uses():
    """It gets half of that rank's gradient, on both; what no rank uses gets none and stays."""
    problems, ends = [], {}
    for way, wrap in WAYS.items():
        torch.manual_seed(0)
        model = prepare(Branches(), QuantConfig(bit_choices=(8, 2)), torch.randn(9, 4))
        step = JointStep(wrap(model), TrainConfig(epochs=1, lr=1e-2), steps_per_epoch=2)
        before = model.idle.weight.detach().clone()
        step(torch.ones(2 + RANK, 4), torch.zeros(2 + RANK, dtype=torch.int64))
        if not torch.equal(before, model.idle.weight) or model.other.weight.grad is not None:
            problems.append(f"{way}: a layer at rest moved, or a gradient is left")
        ends[way] = state(model, step)
        if not same_everywhere(ends[way]):
            problems.append(f"{way}: the ranks differ")
        if way == "own" and step.reducer.uniform:
            problems.append("nobody noticed that the ranks went different ways")
    if not torch.equal(*ends.values()):
        problems.append("not as under DDP")
    return problems


def different_models_are_refused():
    try:
        JointStep(make(norms=RANK == 0), TrainConfig(epochs=1), steps_per_epoch=1)
    except ConfigError as error:
        return [] if "the processes hold different models" in str(error) else [str(error)]
    return ["they were taken"]


def tables_equal_after_an_epoch():
    problems = []
    model = make()
    step = JointStep(model, TrainConfig(epochs=2, distill="progressive"), steps_per_epoch=3, samples=20)
    for batch in data().batches(0, rank=RANK, world=2):
        step(batch.inputs, batch.targets, batch.index)
    known = int((~step.distiller.current[:, 0].isnan()).sum())
    step.end_epoch()
    table = step.distiller.previous
    if known != 10:
        problems.append(f"a rank knew {known} rows before the end of the epoch")
    if not same_everywhere(flat([table])):
        problems.append("the tables differ")
    if bool(table.isnan().any()):
        problems.append("rows are unknown")
    return problems


def gradients_of_halves_are_those_of_the_whole():
    """Nothing is updated: what the optimizers would have received is compared."""
    problems = []
    inputs, targets = INPUTS[:8].double(), TARGETS[:8]
    mine = slice(4 * RANK, 4 * RANK + 4)
    alone = make(norms=False, dtype=torch.float64)
    whole, total = {}, {}
    for bits in BITS:
        set_bits(alone, bits)
        alone.zero_grad(set_to_none=True)
        F.cross_entropy(alone(inputs), targets).backward()
        whole[bits] = {n: p.grad.clone() for n, p in alone.named_parameters() if p.grad is not None}
        for n, g in whole[bits].items():
            total[n] = total[n] + g if n in total else g
    for update, way in (("separate", "own"), ("accumulated", "own"), ("separate", "DDP"), ("accumulated", "DDP")):
        model = make(norms=False, dtype=torch.float64)
        step = JointStep(WAYS[way](model), TrainConfig(epochs=1, update=update, alrs="off"), steps_per_epoch=1)
        found = {}
        step._update = lambda report, bits: found.update(
            {bits: {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}
        )
        step(inputs[mine], targets[mine])
        expected = whole if update == "separate" else {BITS[0]: total}
        if found.keys() != expected.keys():
            problems.append(f"{update}: updates at {list(found)}")
            continue
        for bits in found:
            if found[bits].keys() != expected[bits].keys():
                problems.append(f"{update}, {bits} bits: gradients of {found[bits].keys() ^ expected[bits].keys()}")
                continue
            for n, g in found[bits].items():
                if not torch.allclose(g, expected[bits][n], rtol=1e-9, atol=1e-12):
                    problems.append(f"{update}, {bits} bits: {n} is off")
            if not any(bool(g.any()) for n, g in found[bits].items() if "scale" in n):
                problems.append(f"{update}, {bits} bits: no scale has a gradient")
    return problems


def other_widths_stay_at_rest():
    problems = []
    model = make()
    step = JointStep(model, TrainConfig(epochs=1, lr=1e-2), steps_per_epoch=4)
    batch = next(data().batches(0, rank=RANK, world=2))
    step(batch.inputs, batch.targets)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    step.bit_choices = (4,)
    step(batch.inputs, batch.targets)
    for n, v in model.state_dict().items():
        moved = not torch.equal(v, before[n])
        other = any(f"{kind}.{bits}" in n for kind in ("scales", "sets") for bits in (8, 2))
        if moved and other:
            problems.append(f"{n} moved in a pass at 4 bits")
    return problems


def only_the_first_writes():
    written, real = [], container.save_file

    def save_file(tensors, path, metadata):
        written.append(str(path))
        real(tensors, path, metadata)

    container.save_file = save_file
    try:
        error = train_quietly(make(), data(), TrainConfig(epochs=1, checkpoint_every=1), checkpoint=OUT / "one" / "c")
    finally:
        container.save_file = real
    dist.barrier()
    problems = [] if error is None else [f"it ended with {error}"]
    if len(written) != (3 if RANK == 0 else 0):
        problems.append(f"rank {RANK} wrote {len(written)} files")
    if os.listdir(OUT / "one") != ["c"]:
        problems.append(f"the folder holds {os.listdir(OUT / 'one')}")
    return problems


class Stopping(ArrayData):
    """Ends without warning before batch `at` of the whole run, on every rank."""

    at = -1

    def batches(self, epoch, *, start=0, rank=0, world=1):
        for number, batch in enumerate(super().batches(epoch, start=start, rank=rank, world=world), start=start):
            if epoch * len(self) + number == self.at:
                raise BitdialError("the power went off")
            yield batch


def a_resumed_run_equals_one_that_never_stopped():
    """Inside the second epoch, with dropout that differs from rank to rank and tables only half known to each."""
    problems = []
    config = TrainConfig(epochs=3, lr=1e-2, distill="progressive", distill_weight=0.9, checkpoint_every=1)
    outcomes = {}
    for name, at, seed in (("whole", -1, 0), ("stopped", 5, 0), ("resumed", -1, 7)):
        model = make(dropout=0.3)
        torch.manual_seed(seed + RANK)
        source = Stopping(INPUTS, TARGETS, batch_size=8)
        source.at = at
        where = {} if name == "whole" else {"checkpoint": OUT / "resume" / "c"}
        error = train_quietly(model, source, config, **where)
        if (error is None) != (name != "stopped"):
            problems.append(f"{name}: {error}")
        outcomes[name] = state(model)
        if not same_everywhere(outcomes[name]):
            problems.append(f"{name}: the ranks differ")
        dist.barrier()
    if not torch.equal(outcomes["whole"], outcomes["resumed"]):
        problems.append("the resumed run ended elsewhere")
    return problems


def a_last_batch_smaller_than_the_ranks():
    error = train_quietly(make(), ArrayData(INPUTS[:17], TARGETS[:17], batch_size=8), TrainConfig(epochs=2))
    return [] if error is None else [str(error)]


def nan_on_one_rank_stops_both():
    class Spoiled(ArrayData):
        def batches(self, epoch, **share):
            for number, batch in enumerate(super().batches(epoch, **share)):
                if number == 1 and RANK == 1:
                    batch.inputs[0, 0, 0, 0] = float("nan")
                yield batch

    error = train_quietly(make(), Spoiled(INPUTS.clone(), TARGETS, batch_size=8), TrainConfig(epochs=2))
    problems = []
    if error is None or error[0] != "TrainingError" or "step 1, 8 bits" not in error[1]:
        problems.append(f"rank {RANK} ended with {error}")
    if RANK == 1 and "the input batch holds NaN" not in str(error):
        problems.append(f"the rank with the NaN says {error}")
    points_elsewhere = any(word in str(error) for word in ("rank", "process"))
    MINE["the_healthy_rank_points_to_the_other"] = [str(error)] if RANK == 0 and not points_elsewhere else []
    return problems


def sigterm_to_one_rank_stops_both():
    """At steps that the ranks reach at different times; both must save and stop at one and the same."""
    problems = []
    for at in (1, 2):  # the middle and the last batch of an epoch
        class Terminating(ArrayData):
            def batches(self, epoch, **share):
                for number, batch in enumerate(super().batches(epoch, **share)):
                    if (epoch, number) == (0, at) and RANK == 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                    yield batch

        path = OUT / f"terminated{at}"
        source = Terminating(INPUTS, TARGETS, batch_size=8)
        error = train_quietly(make(), source, TrainConfig(epochs=3), checkpoint=path)
        if error is None or f"stopped by SIGTERM after step {at + 1};" not in error[1]:
            problems.append(f"rank {RANK} ended with {error}")
        dist.barrier()
        if not path.exists() or read_container(path, error=CheckpointError)[1]["step"] != at + 1:
            problems.append(f"the checkpoint is not that of step {at + 1}")
        dist.barrier()
    return problems


if __name__ == "__main__":
    distributed.join(torch.device("cpu"))
    RANK = dist.get_rank()
    MINE["joined"] = [] if (distributed.world_size(), dist.get_backend()) == (2, "gloo") else ["not joined"]
    dist.destroy_process_group()
    dist.init_process_group(  # the same again, with less patience
        "gloo", init_method=f"file://{OUT}/store", rank=RANK, world_size=2, timeout=datetime.timedelta(seconds=20)
    )
    for function in (
        equal_after_every_step, the_same_as_under_ddp, a_parameter_that_one_rank_uses, different_models_are_refused,
        tables_equal_after_an_epoch,
        gradients_of_halves_are_those_of_the_whole,
        other_widths_stay_at_rest, only_the_first_writes, a_last_batch_smaller_than_the_ranks,
        a_resumed_run_equals_one_that_never_stopped, nan_on_one_rank_stops_both, sigterm_to_one_rank_stops_both,
    ):
        check(function)
    dist.destroy_process_group()
    sys.exit(any(MINE.values()))
'''


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What both ranks say of each check, from one launch."""
    folder = tmp_path_factory.mktemp("distributed")
    script = folder / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", str(script), str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    log = folder / "log"
    with log.open("wb") as stream:
        try:
            code: int | str = subprocess.run(
                command, stdout=stream, stderr=stream, env=environment, timeout=120, cwd=folder, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            code = "no end after 120 s"
    said = [json.loads(p.read_text()) if (p := folder / f"{rank}.json").exists() else {} for rank in range(2)]
    return {"code": code, "ranks": said, "log": log.read_text(errors="replace")[-3000:]}


@pytest.mark.parametrize(
    "name",
    [
        "joined",
        "equal_after_every_step",
        "the_same_as_under_ddp",
        "a_parameter_that_one_rank_uses",
        "different_models_are_refused",
        "tables_equal_after_an_epoch",
        "gradients_of_halves_are_those_of_the_whole",
        "other_widths_stay_at_rest",
        "only_the_first_writes",
        "a_last_batch_smaller_than_the_ranks",
        "a_resumed_run_equals_one_that_never_stopped",
        "nan_on_one_rank_stops_both",
        "the_healthy_rank_points_to_the_other",
        "sigterm_to_one_rank_stops_both",
    ],
)
@pytest.mark.slow
def test_two_processes(name: str, outcome: dict[str, Any]) -> None:
    for rank, said in enumerate(outcome["ranks"]):
        assert name in said, f"rank {rank} never got there (exit {outcome['code']}):\n{outcome['log']}"
        assert said[name] == []


def test_nothing_hangs(outcome: dict[str, Any]) -> None:
    """The launch ends by itself, and with 0 if and only if no check complained."""
    complaints = [name for said in outcome["ranks"] for name in said if said[name]]
    assert outcome["code"] == (1 if complaints else 0), outcome["log"]
