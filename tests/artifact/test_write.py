"""Saving: what goes in comes out, the model stays as it was, and nothing is written that cannot be read."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from bitdial import BitPlan, QuantConfig, build_model, load, load_trainable, prepare, read_artifact, save, set_bits
from bitdial.errors import ArtifactError, BitdialError, ConfigError, PlanError
from bitdial.files import container
from bitdial.prepare.transitions import add_transitions

PLANS = {
    "mixed": BitPlan({"conv": 8, "depth": (4, 8), "left": 2, "right": (2, 6)}),
    "some": BitPlan({"conv": (2, 4)}, default=6),
    "all two": BitPlan(default=2),
    "": BitPlan(default=(8, 2)),
    'ünï "code"\n': BitPlan(default=4),
}
METRICS = {
    "accuracy": {"8": 0.9265, "2": 1 / 3},
    "list": [1, 2.5, None, True, "text", [], {}],
    "unicode": "Genauigkeit √2\n",
    "large": 2**60,
    "small": 1e-300,
}


def everything(model: nn.Module) -> dict[str, Any]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    modes = {name: module.training for name, module in model.named_modules()}
    return {"state": state, "modes": modes, "types": {n: type(m) for n, m in model.named_modules()}}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    if left["state"].keys() != right["state"].keys() or left["modes"] != right["modes"]:
        return False
    return left["types"] == right["types"] and all(torch.equal(v, right["state"][k]) for k, v in left["state"].items())


def nothing_but(folder: Path, *names: str) -> bool:
    return sorted(p.name for p in folder.iterdir()) == sorted(names)


# --- round trips ------------------------------------------------------------------------------------


def test_plans_and_metrics_round_trip(saved: Callable[..., Path]) -> None:
    artifact = read_artifact(saved(plans=PLANS, metrics=METRICS))
    assert artifact.plans == PLANS
    assert list(artifact.plans["mixed"]) == list(PLANS["mixed"])
    assert artifact.metrics == METRICS


def test_a_stored_plan_runs(saved: Callable[..., Path], small: Callable[..., nn.Module], inputs: Tensor) -> None:
    path = saved(plans=PLANS)
    live, other = load(path, small()), load(path, small())
    for name, plan in read_artifact(path).plans.items():
        set_bits(live, plan)
        set_bits(other, PLANS[name])
        assert torch.equal(live(inputs), other(inputs))


def test_save_returns_the_digest_and_repeats_itself(tmp_path: Path, prepared: Callable[..., nn.Module]) -> None:
    digest = save(prepared(), tmp_path / "1")
    assert digest == read_artifact(tmp_path / "1").digest
    assert save(prepared(), tmp_path / "2") == digest
    assert (tmp_path / "1").stat().st_size == (tmp_path / "2").stat().st_size
    changed = prepared()
    with torch.no_grad():
        changed.head.bias[0] *= 1 + 2**-20
    assert save(changed, tmp_path / "3") != digest


def test_the_selected_width_and_mode_do_not_matter_and_stay(tmp_path: Path, prepared: Callable[..., nn.Module]) -> None:
    model = prepared()
    digest = save(model, tmp_path / "1")
    set_bits(model, BitPlan({"conv": 4, "left": (2, 8)}, default=6))
    model.train()
    before = everything(model)
    assert save(model, tmp_path / "2") == digest
    assert same(everything(model), before)
    assert (model.conv.weight_bits, model.left.act_bits, model.depth.weight_bits) == (4, 8, 6)


def test_wrapped_models(tmp_path: Path, prepared: Callable[..., nn.Module]) -> None:
    class Compiled(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self._orig_mod = model

    digest = save(prepared(), tmp_path / "plain")
    assert save(Compiled(nn.DataParallel(prepared())), tmp_path / "wrapped") == digest
    assert save(AveragedModel(nn.DataParallel(prepared())), tmp_path / "averaged") == digest


def test_a_prepared_model_inside_another(tmp_path: Path, small: Callable[..., nn.Module], inputs: Tensor) -> None:
    """Norms follow layers by the names that these had in the prepared model."""
    ready = nn.Sequential(prepare(small(), QuantConfig(start="3std"), inputs).eval())
    save(ready, tmp_path / "m")
    live = load(tmp_path / "m", nn.Sequential(small()))
    for bits in (8, 2):
        set_bits(ready, bits)
        set_bits(live, bits)
        assert torch.equal(ready(inputs), live(inputs))


def test_a_new_file_replaces_the_old(saved: Callable[..., Path], prepared: Callable[..., nn.Module]) -> None:
    path = saved()
    save(prepared(bit_choices=(4, 2)), path)
    assert read_artifact(path).bit_choices == (4, 2)
    assert nothing_but(path.parent, path.name)


def test_the_architecture_of_our_own_models_is_kept(tmp_path: Path) -> None:
    arguments = {"blocks": 1, "width": 4, "in_channels": 1, "num_classes": 3}
    model = prepare(build_model("cifar_resnet", **arguments), QuantConfig(start="3std"), torch.randn(2, 1, 8, 8))
    save(copy.deepcopy(model), tmp_path / "m")
    assert read_artifact(tmp_path / "m").manifest["architecture"] == {"name": "cifar_resnet", "arguments": arguments}


# --- what is refused, before anything is written ----------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "where",
    ["conv.weight", "left.weight", "conv.bias", "head.weight", "gain", "norm.sets.4.running_var", "norm.sets.2.weight"],
)
def test_values_that_are_not_finite(
    saved: Callable[..., Path], prepared: Callable[..., nn.Module], where: str, bad: float
) -> None:
    path = saved()
    before = path.read_bytes()
    model = prepared()
    with torch.no_grad():
        model.state_dict(keep_vars=True)[where].view(-1)[1] = bad
    name = where.split(".")[0]
    with pytest.raises(ArtifactError, match=rf"{name}\b.*holds NaN or infinity"):
        save(model, path)
    with pytest.raises(ArtifactError, match="NaN or infinity"):
        save(model, path.parent / "new")
    assert path.read_bytes() == before
    assert nothing_but(path.parent, path.name)


def test_a_buffer_with_nan(tmp_path: Path, small: Callable[..., nn.Module], prepared: Callable[..., nn.Module]) -> None:
    model = small()
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.nan]))
    with pytest.raises(ArtifactError, match=r"mask.*holds NaN"):
        save(prepared(model), tmp_path / "m")
    assert nothing_but(tmp_path)


@pytest.mark.parametrize("which", ["weight", "act"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 0.0, -1.0])
def test_scales_that_are_not_positive(
    saved: Callable[..., Path], prepared: Callable[..., nn.Module], which: str, bad: float
) -> None:
    path = saved()
    before = path.read_bytes()
    model = prepared()
    scale = model.conv.weight_quantizer.scale if which == "weight" else model.conv.act_quantizer.scales["4"]
    with torch.no_grad():
        scale[0] = bad
    with pytest.raises(BitdialError):
        save(model, path)
    assert path.read_bytes() == before


def test_a_bad_weight_scale_names_its_layer(tmp_path: Path, prepared: Callable[..., nn.Module]) -> None:
    model = prepared()
    with torch.no_grad():
        model.depth.weight_quantizer.scale[3] = -1.0
    with pytest.raises(BitdialError, match="depth"):
        save(model, tmp_path / "m")


def test_a_float64_model(tmp_path: Path, prepared: Callable[..., nn.Module]) -> None:
    with pytest.raises(ArtifactError, match=r"'conv'.*torch\.float64.*\.float\(\)"):
        save(prepared().double(), tmp_path / "m")
    with pytest.raises(ArtifactError, match=r"'conv'.*torch\.bfloat16.*\.float\(\)"):
        save(prepared().bfloat16(), tmp_path / "m")
    assert nothing_but(tmp_path)


def test_a_live_model(saved: Callable[..., Path], small: Callable[..., nn.Module]) -> None:
    path = saved()
    before = path.read_bytes()
    live = load(path, small())
    with pytest.raises(ArtifactError, match=r"live one; .* prepare\(\) or load_trainable"):
        save(live, path)
    with pytest.raises(ConfigError, match=r"live one; .* load_trainable"):
        add_transitions(live)
    assert path.read_bytes() == before
    save(load_trainable(path, small()), path)  # whereas this is how to go on


def test_a_float_model(tmp_path: Path, small: Callable[..., nn.Module]) -> None:
    with pytest.raises(ArtifactError, match=r"prepare\(\)"):
        save(small(), tmp_path / "m")
    assert nothing_but(tmp_path)


@pytest.mark.parametrize(
    "plan",
    [BitPlan({"conv": 8}), BitPlan({"stem": 8}, default=8), BitPlan({"conv": 5}, default=8), BitPlan(default=3)],
)
def test_a_plan_that_does_not_fit(tmp_path: Path, prepared: Callable[..., nn.Module], plan: BitPlan) -> None:
    with pytest.raises(PlanError):
        save(prepared(), tmp_path / "m", plans={"good": BitPlan(default=8), "bad": plan})
    assert nothing_but(tmp_path)


@pytest.mark.parametrize("plan", [4, "8", None, {"conv": 8}, [8, 4]])
def test_a_plan_that_is_no_plan(tmp_path: Path, prepared: Callable[..., nn.Module], plan: Any) -> None:
    with pytest.raises(BitdialError):
        save(prepared(), tmp_path / "m", plans={"night": plan})
    assert nothing_but(tmp_path)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"plans": [BitPlan(default=8)]}, r"plans is a list; give a dict: plans=\{name: \.\.\.\}"),
        ({"plans": {4: BitPlan(default=4)}}, "a plan is called 4; its name must be text"),
        ({"metrics": [0.5]}, "metrics is a list; give a dict"),
    ],
)
def test_what_is_stored_by_name_comes_with_names(
    tmp_path: Path, prepared: Callable[..., nn.Module], given: dict[str, Any], words: str
) -> None:
    with pytest.raises(ArtifactError, match=words):
        save(prepared(), tmp_path / "m", **given)
    assert nothing_but(tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), torch.ones(1), {1, 2}, object()])
def test_metrics_that_are_not_json(tmp_path: Path, prepared: Callable[..., nn.Module], bad: object) -> None:
    with pytest.raises(ArtifactError, match="cannot write"):
        save(prepared(), tmp_path / "m", metrics={"deep": [bad]})
    assert nothing_but(tmp_path)


def test_state_that_is_not_a_tensor(tmp_path: Path, prepared: Callable[..., nn.Module]) -> None:
    class Extra(nn.Identity):
        def get_extra_state(self) -> Any:
            return {"anything": object()}

        def set_extra_state(self, state: Any) -> None:
            pass

    model = prepared()
    model.other = Extra()
    with pytest.raises(ArtifactError, match=r"other\._extra_state"):
        save(model, tmp_path / "m")
    assert nothing_but(tmp_path)


# --- what load would refuse is not written ----------------------------------------------------------


def compiled_part(model: nn.Module) -> None:
    model.conv = torch.compile(model.conv, backend="eager")


def half_bias(model: nn.Module) -> None:
    model.conv.bias = nn.Parameter(model.conv.bias.detach().half())


def wide_act_scale(model: nn.Module) -> None:
    model.conv.act_quantizer.scales["4"] = nn.Parameter(model.conv.act_quantizer.scales["4"].detach().double())


def wide_weight_scale(model: nn.Module) -> None:
    model.conv.weight_quantizer.scale = nn.Parameter(model.conv.weight_quantizer.scale.detach().double())


def negative_variance(model: nn.Module) -> None:
    model.norm.sets["4"].running_var[0] = -1.0


def complex_buffer(model: nn.Module) -> None:
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex64))


def sparse_buffer(model: nn.Module) -> None:
    model.register_buffer("mask", torch.eye(3).to_sparse())


def lazy_layer(model: nn.Module) -> None:
    model.late = nn.LazyLinear(3)


def meta_buffer(model: nn.Module) -> None:
    model.register_buffer("nowhere", torch.ones(2, device="meta"))


def extra_state(model: nn.Module) -> None:
    class Extra(nn.Identity):
        def get_extra_state(self) -> Any:
            return torch.ones(2)

        def set_extra_state(self, state: Any) -> None:
            pass

    model.extra = Extra()


def another_scheme(model: nn.Module) -> None:
    other = prepare(nn.Sequential(nn.Linear(3, 3)), NESTED, torch.ones(1, 3))
    model.other = other


def deep_metrics(model: nn.Module) -> dict[str, Any]:
    deep: list[Any] = []
    for _ in range(950):
        deep = [deep]
    return {"metrics": {"deep": deep}}


NESTED = QuantConfig(scheme="nested", keep_first_last=False)
REFUSED: list[tuple[Callable[[nn.Module], dict[str, Any] | None], str]] = [
    (compiled_part, r"'conv' is a compiled module.*model\.conv\.compile\(\)"),
    (half_bias, r"was not written, since load\(\) would refuse it: the tensor 'conv/bias' is .*untouched"),
    (wide_act_scale, r"'conv/act_scale' is torch\.float64.*\.float\(\)"),
    (wide_weight_scale, r"'conv/weight_scale' is torch\.float64"),
    (negative_variance, r"norm 'norm': a variance is negative"),
    (complex_buffer, r"phase' \(torch\.complex64\); convert it, or keep it out"),
    (sparse_buffer, r"mask' is sparse"),
    (lazy_layer, r"late\.weight' is lazy"),
    (meta_buffer, r"nowhere' is on the meta device"),
    (extra_state, r"'extra\._extra_state' is no parameter or buffer"),
    (another_scheme, r"layer 'other\.0' has scheme='nested' and layer 'conv' 'double_rounding'"),
    (deep_metrics, r"900 levels|recursion"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=lambda value: getattr(value, "__name__", ""))
def test_what_cannot_be_loaded_is_not_written(
    saved: Callable[..., Path],
    prepared: Callable[..., nn.Module],
    change: Callable[[nn.Module], dict[str, Any] | None],
    words: str,
) -> None:
    path = saved()
    before = path.read_bytes()
    model = prepared()
    with torch.no_grad():
        given = change(model) or {}
    with pytest.raises(ArtifactError, match=words):
        save(model, path, **given)
    with pytest.raises(ArtifactError, match=words):
        save(model, path.parent / "new", **given)
    assert path.read_bytes() == before
    assert nothing_but(path.parent, path.name)


def test_what_was_written_is_read_before_it_takes_its_name(
    saved: Callable[..., Path], prepared: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that does not keep what it was given."""
    path = saved()
    before = path.read_bytes()

    def damaging(tensors: Any, target: Path, metadata: Any) -> None:
        save_file(tensors, target, metadata)
        data = bytearray(target.read_bytes())
        data[-1] ^= 1
        target.write_bytes(data)

    monkeypatch.setattr(container, "save_file", damaging)
    with pytest.raises(ArtifactError, match=rf"{path} was not written.* the file is damaged"):
        save(prepared(), path)
    assert path.read_bytes() == before
    assert nothing_but(path.parent, path.name)


# --- what is written can be read --------------------------------------------------------------------


def whole_eps(model: nn.Module) -> None:
    model.norm = nn.BatchNorm2d(6, eps=1)


def whole_momentum(model: nn.Module) -> None:
    model.norm = nn.BatchNorm2d(6, momentum=1)


def no_momentum(model: nn.Module) -> None:
    model.norm = nn.BatchNorm2d(6, momentum=None)


def not_affine(model: nn.Module) -> None:
    model.norm = nn.BatchNorm2d(6, affine=False)


def untracked(model: nn.Module) -> None:
    model.norm = nn.BatchNorm2d(6, track_running_stats=False)


def bare(model: nn.Module) -> None:
    model.norm = nn.BatchNorm2d(6, affine=False, track_running_stats=False)


def synchronised(model: nn.Module) -> None:
    model.norm = nn.SyncBatchNorm(6)


def same_padding(model: nn.Module) -> None:
    model.conv = nn.Conv2d(4, 6, 3, padding="same", padding_mode="reflect")


def own_architecture(model: nn.Module) -> None:
    model.architecture = "small-v2"


def architecture_object(model: nn.Module) -> None:
    model.architecture = nn.Identity()


def architecture_dict(model: nn.Module) -> None:
    model.architecture = {"name": ["encoder", "decoder"], "arguments": {}}


def scalar_buffer(model: nn.Module) -> None:
    model.register_buffer("scalar", torch.tensor(3.5))
    model.register_buffer("empty", torch.zeros(0, 3))
    model.register_buffer("short", torch.ones(2, dtype=torch.bfloat16))


def odd_tensors(model: nn.Module) -> None:
    """Of other types, not contiguous, parts of one memory, under names with a slash, not persistent, without values."""
    base = torch.arange(12.0)
    buffers = {"float64": base.double(), "flipped": base.view(3, 4).t(), "wide": torch.ones(1).expand(4), "none": None}
    for name, tensor in {**buffers, "all": base, "part": base[3:], "again": base, "a/b": base.clone()}.items():
        model.register_buffer(name, tensor)
    model.register_buffer("passing", torch.ones(2), persistent=False)
    model.register_parameter("counts", nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False))
    model.nothing = nn.Sequential(nn.Identity(), nn.ModuleList())


def slashes(model: nn.Module) -> None:
    """A quantised layer that is first found under a name which reads like a tensor of another."""
    layers = dict(model._modules)
    model._modules.clear()
    model._modules.update({"conv/bias": layers["depth"], **layers})


def channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)


def infinite_mask(model: nn.Module) -> None:
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))


@pytest.mark.parametrize(
    "change",
    [
        whole_eps,
        whole_momentum,
        no_momentum,
        not_affine,
        untracked,
        bare,
        synchronised,
        same_padding,
        own_architecture,
        architecture_object,
        architecture_dict,
        scalar_buffer,
        odd_tensors,
        slashes,
        channels_last,
        infinite_mask,
    ],
    ids=lambda f: f.__name__,
)
def test_what_can_be_saved_can_be_loaded(
    tmp_path: Path,
    small: Callable[..., nn.Module],
    prepared: Callable[..., nn.Module],
    inputs: Tensor,
    change: Callable[[nn.Module], None],
) -> None:
    """A user may build all of these; days of training must not end in a file that nobody reads."""
    model = small()
    change(model)
    ready = prepared(model)
    save(ready, tmp_path / "m")
    live = load(tmp_path / "m", model)
    with torch.no_grad():
        for bits in (8, 2):
            set_bits(ready, bits)
            set_bits(live, bits)
            assert torch.equal(ready(inputs), live(inputs))


def test_norms_in_double_are_refused_by_name(tmp_path: Path, prepared: Callable[..., nn.Module]) -> None:
    model = prepared()
    model.norm.double()
    with pytest.raises(ArtifactError, match=r"norm.*float64"):
        save(model, tmp_path / "m")
    assert nothing_but(tmp_path)
