"""The embedded recipe: fixed data, resumable stages."""

import sys
from pathlib import Path

import pytest
import torch

from bitdial.artifact import read_artifact
from bitdial.cli import main
from bitdial.errors import ConfigError
from bitdial.recipes import RecipeOptions
from bitdial.recipes.digits import digits, digits_data


def test_split_is_fixed_and_disjoint() -> None:
    x, y, x_test, y_test = digits_data()
    assert (len(x), len(y), len(x_test), len(y_test)) == (1297, 1297, 500, 500)
    assert x.shape[1:] == (1, 8, 8)
    assert float(x.min()) == 0
    assert float(x.max()) == 1
    assert torch.equal(digits_data()[2], x_test)
    seen = {tuple(image.flatten().tolist()) for image in x}
    assert not any(tuple(image.flatten().tolist()) in seen for image in x_test)


def test_images_are_held_out_of_the_training_set() -> None:
    x, y, *_ = digits_data()
    kept, labels, held, held_labels = digits_data(holdout=True)
    assert torch.equal(torch.cat((kept, held)), x)
    assert torch.equal(torch.cat((labels, held_labels)), y)
    assert len(held) == len(held_labels) == 401
    assert len(kept) % 64 == 0


def test_recipe_holds_images_out_if_told_to(tmp_path) -> None:
    options = {"epochs": 1, "bit_choices": (2,), "progress": False}
    outcome = digits(RecipeOptions(out=tmp_path, holdout=True, **options))
    assert sum(len(y) for _, y in outcome.test) == 401
    assert read_artifact(outcome.artifact).metrics["holdout"] is True
    (tmp_path / "float-holdout.ckpt").touch()  # a whole run does not go on from what a held-out run left
    whole = digits(RecipeOptions(out=tmp_path, replace=True, **options))
    assert read_artifact(whole.artifact).metrics["holdout"] is False


def test_recipe_leaves_the_artifact_and_no_checkpoint(tmp_path) -> None:
    outcome = digits(RecipeOptions(out=tmp_path / "run", epochs=1, bit_choices=(4, 2), progress=False))
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["digits.safetensors"]
    assert set(outcome.top1) == {4, 2}
    assert outcome.history.rows[-1]["top1"] == {str(b): v for b, v in outcome.top1.items()}
    assert outcome.top1[4] > 0.3  # chance is 0.1


def test_a_finished_run_is_shown_and_no_other_is_overwritten(tmp_path, capsys, monkeypatch) -> None:
    command = ["train", "digits", "--epochs", "1", "--out", str(tmp_path)]
    assert main(command) == 0
    before = (tmp_path / "digits.safetensors").read_bytes()
    table, saved = capsys.readouterr().out.split("Saved ")
    assert "Accuracy on 500 images of digits, the test set" in table
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules["bitdial.recipes.digits"], "train_float", lambda *_, **__: pytest.fail("again"))
        assert main(command) == 0
        assert capsys.readouterr().out.startswith(f"{table}{saved.strip()} is there: this run is finished")
        assert main([*command, "--seed", "1"]) == 1
        assert "of another run (seed: 0 then, 1 now)" in capsys.readouterr().err
    assert (tmp_path / "digits.safetensors").read_bytes() == before
    assert main([*command, "--seed", "1", "--replace"]) == 0
    assert (tmp_path / "digits.safetensors").read_bytes() != before
    assert read_artifact(tmp_path / "digits.safetensors").metrics["run"]["name"] == "digits-seed=1-epochs=1"


def test_every_option_reaches_the_run(tmp_path, monkeypatch) -> None:
    """An option that a recipe takes and then ignores would make its results something else than they say."""
    seen: dict[str, object] = {}

    class Reached(Exception):
        pass

    def spy(model, data, config, *, teacher, **rest):
        seen.update(config=config, teacher=teacher, scale=model.layer1[0].conv1.weight_quantizer.scale.detach().clone())
        raise Reached

    monkeypatch.setattr(sys.modules["bitdial.recipes.digits"], "train", spy)  # the package has a function of that name
    scales = []
    for start in ("mse", "3std"):
        options = RecipeOptions(
            out=tmp_path / start,
            epochs=1,
            alrs="literal",
            distill="teacher",
            start=start,
            lr=3e-4,
            seed=7,
            per_channel=False,
            weight_decay=0.1,
        )
        with pytest.raises(Reached):
            digits(options)
        scales.append(seen["scale"])
    assert not torch.equal(scales[0], scales[1])
    assert scales[0].shape == (1,)
    assert seen["config"].weight_decay == 0.1
    assert (seen["config"].alrs, seen["config"].distill, seen["config"].lr) == ("literal", "teacher", 3e-4)
    assert seen["teacher"] is not None


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("batch", {"batch": 4}),
        ("float-epochs", {"float_epochs": 2}),
        ("history", {"history": Path("history.json")}),
        ("teacher", {"distill": "teacher", "teacher": "resnet56"}),
    ],
)
def test_what_the_recipe_does_not_have_is_refused(tmp_path, option, changes) -> None:
    with pytest.raises(ConfigError, match=f"it takes no --{option}"):
        digits(RecipeOptions(out=tmp_path, **changes))
