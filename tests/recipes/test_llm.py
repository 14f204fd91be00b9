"""Language models: learned at every width, resumed bit for bit, with any way of saving memory the same."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bitdial
from bitdial.errors import ConfigError, TrainingError
from bitdial.recipes import llm as module
from bitdial.recipes import teacher_text as teacher_module
from bitdial.recipes.language_model import LanguageModel, Texts
from bitdial.recipes.llm import LlmOutcome, llm
from bitdial.recipes.llm_options import LlmOptions
from bitdial.recipes.run import FinishedRun
from bitdial.recipes.teacher_text import teacher_text
from bitdial.train.callbacks import Run
from bitdial.train.tokens import TokenData

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def options(tiny_language: Any, tmp_path: Path) -> LlmOptions:
    """A run of six steps in three intervals."""
    return LlmOptions(
        out=tmp_path / "out", model=tiny_language.model, text=(tiny_language.text,), name="tiny", progress=False,
        bit_choices=(8, 4, 2), group_size=16, start="max", length=16, batch=4, steps=6, evaluations=3, held_out=64,
        lr=2e-3,
    )  # fmt: skip


def changed(options: LlmOptions, **changes: Any) -> LlmOptions:
    return dataclasses.replace(options, **changes)


def weights(outcome: LlmOutcome) -> dict[str, torch.Tensor]:
    return {name: value.cpu() for name, value in outcome.model.state_dict().items()}


def differing(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == two.keys()
    return [name for name, value in one.items() if not torch.equal(value, two[name])]


def test_a_run_keeps_what_the_model_knew(options: LlmOptions, tiny_language: Any) -> None:
    """Lower widths come nearer to the float model; the file, reloaded, is what was trained."""
    told: list[str] = []
    outcome = llm(changed(options, steps=60, results=options.out / "rows.json", command="bitdial x"), tell=told.append)
    history = [row["loss"] for row in outcome.history.rows]
    assert history[-1]["2"] < 0.7 * history[0]["2"]
    assert history[-1]["4"] < history[0]["4"]
    files = {path.name for path in options.out.iterdir()}
    assert {name for name in files if not name.startswith("tokens")} == {"tiny.safetensors", "tiny.json", "rows.json"}
    rows = json.loads((options.out / "rows.json").read_text())
    assert rows == outcome.rows == json.loads((options.out / "tiny.json").read_text())["rows"]
    assert [row["bits"] for row in rows] == [8, 4, 2]
    expected = {"tokens": 60 * 4 * 16, "seed": 0, "command": "bitdial x", "group_size": 16, "activations": "float"}
    expected |= {"weights": "double_rounding", "method": "trained", "model": "llama"}
    assert {name: rows[0][name] for name in expected} == expected
    assert len([line for line in told if line.startswith("Step ")]) == 3

    live = bitdial.load(outcome.artifact, LanguageModel.read(tiny_language.model).model)
    outcome.model.cpu()
    tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    for row in rows:
        bitdial.set_bits(live, row["bits"])
        bitdial.set_bits(outcome.model, row["bits"])
        with torch.no_grad():
            assert torch.equal(live(tokens).logits, outcome.model(tokens).logits)
    with pytest.raises(FinishedRun):
        llm(changed(options, steps=60))
    with pytest.raises(ConfigError, match="of another run"):
        llm(changed(options, steps=60, seed=1))


class Stopped(Exception):
    """The power went off."""


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int | None) -> None:
    def on_step(self: Any, run: Run) -> None:
        if run.step == steps:
            raise Stopped

    monkeypatch.setattr(module._Watch, "on_step", on_step)


def test_a_run_that_was_killed_goes_on_bit_for_bit(options: LlmOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    options = changed(options, generate=3, checkpoint_every=1)
    whole = llm(changed(options, out=options.out.with_name("whole")))
    told: list[str] = []
    for last in (1, 4, None):  # within the second interval, and within the third
        stop_after(monkeypatch, last)
        if last is not None:
            with pytest.raises(Stopped):
                llm(options)
    outcome = llm(options, tell=told.append)
    assert told[0] == "The model writes 3 rows of 16 tokens"  # from the file, this time
    assert "Going on from step 3 of 6" in told
    assert differing(weights(whole), weights(outcome)) == []
    assert whole.metrics["perplexity"] == outcome.metrics["perplexity"]
    assert whole.metrics["start_perplexity"] == outcome.metrics["start_perplexity"]
    float_model = LanguageModel.read(options.model).model
    moved = {name for name, value in float_model.state_dict().items() if not torch.equal(value, weights(whole)[name])}
    assert "model.layers.0.mlp.down_proj.weight" in moved


def test_checkpointing_of_activations_is_exact(options: LlmOptions) -> None:
    plain = llm(changed(options, out=options.out.with_name("plain")))
    less = llm(changed(options, checkpointing=True))
    assert less.model.model.layers[0].gradient_checkpointing  # type: ignore[union-attr, index]
    assert differing(weights(plain), weights(less)) == []


@pytest.mark.parametrize("changes", [{"accumulate": 2}, {"accumulate": 4, "update": "accumulated"}], ids=str)
def test_parts_of_a_batch_add_up(changes: dict[str, Any], options: LlmOptions, no_gpu: None) -> None:
    """Within the error of float32; one flipped rounding would make the rest another run, so one step of gradients."""
    few = {"steps": 1, "evaluations": 1, "update": changes.get("update", "separate")}
    whole = llm(changed(options, out=options.out.with_name("whole"), **few))
    parts = llm(changed(options, **(few | changes)))
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(parts)[name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_an_artifact_can_be_gone_on_from(options: LlmOptions) -> None:
    first = llm(options)
    again = changed(
        options,
        calibrated=first.artifact,
        name="again",
        bit_choices=LlmOptions.bit_choices,
        group_size=32,
        start="balanced",
        lr=1e-9,
    )
    second = llm(again)
    assert second.metrics["run"]["settings"]["bit_choices"] == [8, 4, 2]
    assert second.rows[0]["group_size"] == 16
    for bits, value in first.metrics["perplexity"].items():
        assert second.metrics["start_perplexity"][bits] == pytest.approx(value, rel=1e-5)
    with pytest.raises(ConfigError, match="--bits: a run that starts from"):
        changed(again, bit_choices=(8, 2))


@pytest.mark.parametrize("trained", [False, True])
def test_embeddings_stay_in_their_own_dtype_unless_they_are_trained(
    trained: bool, options: LlmOptions, tmp_path: Path
) -> None:
    folder = tmp_path / "short"
    language = LanguageModel.read(options.model)
    language.tokenizer.save_pretrained(folder)
    language.model.bfloat16().save_pretrained(folder)  # type: ignore[operator]
    outcome = llm(changed(options, model=folder, steps=1, evaluations=1, train_embeddings=trained))
    stored = bitdial.read_artifact(outcome.artifact).tensors[".float/model.embed_tokens.weight"]
    before = LanguageModel.read(folder).model.state_dict()["model.embed_tokens.weight"]
    assert stored.dtype == (torch.float32 if trained else torch.bfloat16)
    assert torch.equal(stored.float(), before) != trained
    gains = weights(outcome)["model.norm.weight"]
    assert not torch.equal(gains, LanguageModel.read(folder).model.state_dict()["model.norm.weight"])


def test_a_rotated_model_is_taught_by_the_plain_one(options: LlmOptions) -> None:
    """Its file loads on the plain model, and can be gone on from."""
    first = llm(changed(options, rotate="online", activations="dynamic"))
    assert bitdial.read_artifact(first.artifact).manifest["rotation"]
    level = first.metrics["float_perplexity"]
    assert first.metrics["start_perplexity"]["8"] == pytest.approx(level, rel=0.1)
    live = bitdial.load(first.artifact, LanguageModel.read(options.model).model)
    tokens = torch.arange(32).reshape(2, 16)
    with torch.no_grad():
        assert torch.equal(live(tokens).logits, first.model.cpu()(tokens).logits)
    again = changed(
        options,
        calibrated=first.artifact,
        name="again",
        bit_choices=LlmOptions.bit_choices,
        group_size=32,
        start="balanced",
    )
    second = llm(changed(again, lr=1e-9))
    assert second.metrics["start_perplexity"]["2"] == pytest.approx(first.metrics["perplexity"]["2"], rel=1e-4)
    assert second.rows[0]["activations"] == "dynamic"


def test_lower_widths_can_weigh_more(options: LlmOptions) -> None:
    """In one update for all, the lowest width has more of the step."""
    few = changed(options, steps=20, evaluations=1, update="accumulated", clip_norm=100.0)
    ends = [
        llm(changed(few, out=options.out.with_name(f"w{weight}"), lower_weight=weight)).history.rows[-1]["loss"]
        for weight in (1e-3, 1.0)
    ]
    assert ends[1]["2"] < ends[0]["2"]


def test_nan_is_found_at_its_step_with_the_layer(options: LlmOptions, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_step(self: Any, run: Run) -> None:
        if run.step == 2:
            layer: Any = run.model.get_submodule("model.layers.1.mlp.up_proj")
            layer.register_forward_hook(lambda module, args, out: out * float("nan"))

    monkeypatch.setattr(module._Watch, "on_step", on_step)
    with pytest.raises(TrainingError, match=r"step 2, 8 bits: .* layer 'model.layers.1.mlp.up_proj' put out NaN"):
        llm(changed(options, evaluations=1))


# --- text of the teacher ------------------------------------------------------------------------


class Counting(nn.Module):
    """Says that the next token is the last one plus one, nearly always; what it is asked is written down."""

    def __init__(self, certain: float) -> None:
        super().__init__()
        self.certain, self.calls = nn.Parameter(torch.tensor(certain)), 0

    def forward(self, input_ids: torch.Tensor, past_key_values: Any, use_cache: bool) -> Any:
        self.calls += 1
        logits = self.certain * nn.functional.one_hot((input_ids + 1) % 50, 50).float()
        return type("Output", (), {"logits": logits, "past_key_values": None})()


def rows_of(path: Path, model: nn.Module, **changes: Any) -> np.ndarray[Any, Any]:
    settings: dict[str, Any] = {"rows": 40, "length": 12, "seed": 0, "first": torch.arange(10, 20)} | changes
    tokens = teacher_text(model, path, **settings)
    assert len(tokens) == settings["rows"] * settings["length"] + 1
    return np.asarray(tokens[:-1]).reshape(settings["rows"], settings["length"])


def test_rows_begin_greedily_and_go_on_as_the_model_says(tmp_path: Path) -> None:
    """A model that is hardly certain: the first three steps count up in all rows, the sixth and later in few."""
    rows = rows_of(tmp_path / "a", Counting(1.0))
    counts = (np.diff(rows, axis=1) == 1).mean(axis=0)
    assert counts[:3].tolist() == [1, 1, 1]
    assert 0 < counts[3] < 1, "some rows draw from the fourth on"
    assert counts[5:].max() < 0.3
    assert set(rows[:, 0]) <= set(range(10, 20))
    assert len(set(rows[:, 0])) > 5
    assert not np.array_equal(rows, rows_of(tmp_path / "b", Counting(1.0), seed=1))


def test_groups_that_are_made_together_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each draws from its own seed, so a run can go on behind any of them; a GPU has several at a time."""
    one_by_one = rows_of(tmp_path / "a", Counting(1.0), rows=100)
    model = Counting(1.0)
    monkeypatch.setitem(teacher_module.AT_ONCE, "cpu", 3)
    assert np.array_equal(rows_of(tmp_path / "b.int32", model, rows=100), one_by_one)
    assert model.calls == 2 * 11
    (tmp_path / "c.part").write_bytes(one_by_one.tobytes()[: 32 * 12 * 4])
    assert np.array_equal(rows_of(tmp_path / "c.int32", model, rows=100), one_by_one)
    assert model.calls == 3 * 11


def test_text_that_was_begun_is_gone_on_with(tmp_path: Path) -> None:
    """A group of 32 rows is whole; half of the next one is thrown away."""
    whole = rows_of(tmp_path / "a", Counting(1.0))
    (tmp_path / "b.part").write_bytes(whole.tobytes()[: 35 * 12 * 4])
    model = Counting(1.0)
    assert np.array_equal(rows_of(tmp_path / "b.int32", model), whole)
    assert model.calls == 11, "one group"
    assert np.array_equal(rows_of(tmp_path / "b.int32", model), whole)
    assert model.calls == 11, "it is there"


def test_generated_rows_are_trained_on(options: LlmOptions) -> None:
    language = LanguageModel.read(options.model)
    texts = Texts.read(options.text, language, options.out, length=16, held_out=64, tell=lambda line: None)
    more = texts.with_generated(language, options.out, rows=5, length=16, seed=0)
    plain, both = (TokenData(one.streams, length=16, batch_size=1) for one in (texts, more))
    assert plain.samples is not None
    assert both.samples == plain.samples + 5
    assert 0 not in more.streams[1][::16][:5], "no row begins with the end of a text"


# --- texts and options --------------------------------------------------------------------------


def test_the_end_of_the_text_is_held_out(options: LlmOptions) -> None:
    language = LanguageModel.read(options.model)

    def read(length: int, held_out: int) -> Texts:
        return Texts.read(options.text, language, options.out, length=length, held_out=held_out, tell=lambda line: None)

    texts = read(16, 70)
    assert texts.held_out.shape == (4, 16)
    tokens = np.concatenate([texts.streams[0], texts.held_out.flatten().numpy()])
    assert language.tokenizer.decode(tokens.tolist()) == options.text[0].read_text()
    assert len(list(options.out.glob("tokens-*"))) == 1
    assert read(16, 10**9).held_out.numel() <= len(tokens) // 10
    with pytest.raises(ConfigError, match=r"text.txt: \d+ tokens are less than a row of 50000"):
        read(50_000, 70)


@pytest.mark.parametrize(
    ("changes", "intervals"),
    [({}, (3, 2)), ({"steps": 7}, (3, 3)), ({"steps": 2}, (2, 1)), ({"steps": 1000, "tokens": 10 * 64 + 1}, (3, 4))],
    ids=str,
)
def test_steps_become_whole_intervals(changes: dict[str, Any], intervals: tuple[int, int], options: LlmOptions) -> None:
    assert changed(options, **changes).intervals == intervals


def test_rows_longer_than_the_model_takes_are_refused(options: LlmOptions) -> None:
    """A table of positions has no row for them; on a GPU such a look-up ends the process."""
    with pytest.raises(ConfigError, match="rows of 65 tokens; the model takes 64 at once"):
        llm(changed(options, length=65))
    assert not options.out.exists()


@pytest.mark.parametrize("other", ["shard", "checkpointing"])
def test_what_cannot_be_recorded_is_refused(other: str, options: LlmOptions) -> None:
    with pytest.raises(ConfigError, match=f"--record and --{other} do not go together"):
        changed(options, record=True, **{other: True})


def test_recording_changes_nothing(options: LlmOptions) -> None:
    """On a CPU there are no graphs; on a GPU a replay has the kernels of the steps before it."""
    plain = weights(llm(changed(options, out=options.out.with_name("plain"))))
    recorded = weights(llm(changed(options, record=True)))
    if torch.cuda.is_available():  # sums of attention's gradients may go in another order
        for name, value in plain.items():
            torch.testing.assert_close(recorded[name], value, rtol=0.0, atol=6 * 3 * options.lr, msg=name)
    else:
        assert differing(plain, recorded) == []


def test_the_model_is_given_back_with_its_own_attention(options: LlmOptions) -> None:
    assert llm(options).model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


def test_what_saves_memory_or_reports_does_not_name_a_run(options: LlmOptions) -> None:
    other = changed(options, record=True, evaluations=6, checkpoint_every=5)
    assert other.settings() == options.settings()
    other = changed(options, checkpointing=True)
    assert other.settings() == options.settings()
    assert changed(options, lr=1.0).settings() != options.settings()
