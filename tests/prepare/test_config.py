"""Settings: what is refused and how the message says so, and the way through JSON and back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from bitdial.config import check_bit_choices
from bitdial.errors import ConfigError
from bitdial.functional import SCHEMES
from bitdial.prepare.config import QuantConfig, Rule

FULL = QuantConfig(
    bit_choices=(8, 4, 3),
    scheme="nested",
    ties="up",
    per_channel=False,
    group_scales="float",
    activations="asymmetric",
    attention="quantized",
    start="balanced",
    importance={8: 2.0},
    scale_gradient="printed",
    keep_first_last=False,
    switch_norms=False,
    rules=(
        Rule(pattern="layer1.*", quantize=False),
        Rule(type="Linear", activations="float", per_channel=True, group_size=0),
    ),
)

GROUPS = QuantConfig(group_size=32, rules=(Rule(type="Linear", group_size=64),))


def through_json(values: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(values, allow_nan=False))


# --- defaults and round trips -------------------------------------------------------------------


def test_defaults() -> None:
    config = QuantConfig()
    assert config.bit_choices == (8, 6, 4, 2)
    assert (config.scheme, config.ties, config.activations) == ("double_rounding", "even", "auto")
    assert config.scale_gradient == "exact"
    assert config.per_channel
    assert config.keep_first_last
    assert config.switch_norms
    assert config.rules == ()


def test_the_full_config_differs_from_the_default_in_every_setting() -> None:
    """So that the round trip below cannot lose a setting unseen."""
    for field in dataclasses.fields(QuantConfig):
        full = GROUPS if field.name == "group_size" else FULL  # which does not go with per_channel=False
        assert getattr(full, field.name) != getattr(QuantConfig(), field.name), field.name


@pytest.mark.parametrize("config", [QuantConfig(), FULL, GROUPS], ids=["default", "full", "groups"])
def test_config_round_trips_through_json(config: QuantConfig) -> None:
    back = QuantConfig.from_dict(through_json(config.to_dict()))
    assert back == config
    assert hash(back) == hash(config)
    assert isinstance(back.bit_choices, tuple)
    assert all(isinstance(rule, Rule) for rule in back.rules)


@pytest.mark.parametrize("rule", FULL.rules, ids=str)
def test_rule_round_trips_through_json(rule: Rule) -> None:
    assert Rule.from_dict(through_json(rule.to_dict())) == rule


def test_sequences_become_tuples() -> None:
    rule = {"pattern": "a*", "quantize": False}
    config = QuantConfig(bit_choices=[8, 2], rules=[rule])  # type: ignore[arg-type]
    assert config.bit_choices == (8, 2)
    assert config.rules == (Rule(pattern="a*", quantize=False),)


def test_configs_are_frozen_and_take_names_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        QuantConfig().scheme = "lsq"  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Rule(pattern="a", quantize=True).quantize = False  # type: ignore[misc]
    with pytest.raises(TypeError):
        QuantConfig((8, 4))  # type: ignore[misc]


def test_rule_prints_what_it_sets_only() -> None:
    assert str(Rule(pattern="a*", quantize=False)) == "Rule(pattern='a*', quantize=False)"
    assert str(Rule(type="Linear", activations="float")) == ("Rule(type='Linear', activations='float')")


# --- what is refused ----------------------------------------------------------------------------

BIT_CHOICES: list[tuple[Any, str]] = [
    ((), r"\(\)"),
    ((9, 4), "9"),
    ((4, 1), "1"),
    ((8, 4.0), "4.0"),
    ((8, True), "True"),
    ((8, "4"), "'4'"),
    ((4, 8), "descending"),
    ((8, 4, 4), "repeats"),
    (8, "8"),
    ("842", "842"),
    (None, "None"),
]


@pytest.mark.parametrize(("bit_choices", "message"), BIT_CHOICES)
def test_bad_bit_choices_are_named(bit_choices: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"bit_choices=.*{message}"):
        QuantConfig(bit_choices=bit_choices)
    with pytest.raises(ConfigError, match="bit_choices"):
        check_bit_choices(bit_choices)


@pytest.mark.parametrize("bits", [(8,), (2,), (8, 7, 6, 5, 4, 3, 2)])
def test_good_bit_choices(bits: tuple[int, ...]) -> None:
    assert QuantConfig(bit_choices=bits).bit_choices == bits


@pytest.mark.parametrize(
    ("setting", "value", "offers"),
    [
        ("scheme", "triple_rounding", "double_rounding"),
        ("scheme", None, "double_rounding"),
        ("ties", "odd", "even"),
        ("activations", "int8", "unsigned"),
        ("activations", None, "auto"),
        ("start", "minmax", "3std"),
        ("scale_gradient", "rounded", "printed"),
    ],
)
def test_unknown_choices_are_named_with_what_is_offered(setting: str, value: object, offers: str) -> None:
    with pytest.raises(ConfigError, match=f"{setting}={value!r}.*{offers}"):
        QuantConfig(**{setting: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_printed_gradient_needs_a_shared_scale(scheme: str) -> None:
    if scheme in ("double_rounding", "nested", "centred", "truncate"):
        assert QuantConfig(scheme=scheme, scale_gradient="printed").scale_gradient == "printed"
        return
    with pytest.raises(ConfigError, match=f"'printed'.*'{scheme}' has none.*leave scale_gradient out"):
        QuantConfig(scheme=scheme, scale_gradient="printed")


RULES: dict[str, tuple[Callable[[], Rule], str]] = {
    "matches nothing": (lambda: Rule(quantize=False), "pattern"),
    "says nothing": (lambda: Rule(pattern="layer1.*"), r"'layer1\.\*' changes nothing"),
    "says nothing of a type": (lambda: Rule(type="Linear"), "'Linear' changes nothing"),
    "activations": (lambda: Rule(pattern="a", activations="int8"), "Rule.activations='int8'"),
}


@pytest.mark.parametrize("case", RULES)
def test_bad_rules_are_named(case: str) -> None:
    build, message = RULES[case]
    with pytest.raises(ConfigError, match=message):
        build()


@pytest.mark.parametrize("activations", ["auto", "float", "unsigned", "signed", "asymmetric", "dynamic"])
def test_every_kind_of_activation_is_accepted(activations: str) -> None:
    assert QuantConfig(activations=activations).activations == activations
    assert Rule(pattern="a", activations=activations).activations == activations


def test_unknown_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"QuantConfig.*\['bits', 'shceme'\].*bit_choices"):
        QuantConfig.from_dict({**QuantConfig().to_dict(), "shceme": "lsq", "bits": 4})
    with pytest.raises(ConfigError, match=r"Rule.*\['layer'\].*pattern"):
        Rule.from_dict({"layer": "a", "quantize": False})
    with pytest.raises(ConfigError, match=r"Rule.*\['layer'\]"):
        QuantConfig.from_dict({**QuantConfig().to_dict(), "rules": [{"layer": "a"}]})


@pytest.mark.parametrize("values", [None, [], "scheme", 3, [("scheme", "lsq")]])
def test_from_dict_wants_a_dict(values: Any) -> None:
    with pytest.raises(ConfigError, match="QuantConfig: expected a dict"):
        QuantConfig.from_dict(values)


# A string is true, even "False": settings of the wrong type must not be read as something else.
WRONG_TYPES: list[tuple[str, Any]] = [
    ("per_channel", "False"),
    ("per_channel", None),
    ("keep_first_last", 0),
    ("switch_norms", "no"),
    ("scheme", ["lsq"]),
    ("ties", ["even"]),
    ("rules", None),
    ("rules", 5),
    ("rules", Rule(pattern="a", quantize=False)),
    ("rules", "a"),
    ("rules", [None]),
]


@pytest.mark.parametrize(("setting", "value"), WRONG_TYPES, ids=lambda v: str(v)[:20])
def test_settings_of_the_wrong_type_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError):
        QuantConfig(**{setting: value})


@pytest.mark.parametrize(
    "settings",
    [
        {"pattern": 3, "quantize": False},
        {"type": 3, "quantize": False},
        {"pattern": "a", "quantize": "False"},
        {"pattern": "a", "quantize": 1},
        {"pattern": "a", "per_channel": "no"},
        {"pattern": "a", "activations": ["auto"]},
    ],
    ids=str,
)
def test_rules_of_the_wrong_type_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Rule.from_dict(settings)


# --- groups -------------------------------------------------------------------------------------


def test_groups_are_for_schemes_that_narrow() -> None:
    for scheme, rule in SCHEMES.items():
        for settings in ({"group_size": 32}, {"rules": (Rule(type="Linear", group_size=32),)}):
            if rule.narrows:
                QuantConfig(scheme=scheme, **settings)
                continue
            with pytest.raises(ConfigError, match=f"group_size.*'{scheme}'.*Choose double_rounding"):
                QuantConfig(scheme=scheme, **settings)
        QuantConfig(scheme=scheme, rules=(Rule(type="Linear", group_size=0),))


@pytest.mark.parametrize("value", [0, -1, 32.0, "32", True, [32]])
def test_a_group_size_is_a_whole_number(value: object) -> None:
    with pytest.raises(ConfigError, match=r"group_size=.*whole number of inputs, such as 32"):
        QuantConfig(group_size=value)  # type: ignore[arg-type]
    if value != 0 or isinstance(value, bool):
        with pytest.raises(ConfigError, match=r"Rule\.group_size=.*whole number of inputs"):
            Rule(type="Linear", group_size=value)  # type: ignore[arg-type]


def test_groups_and_one_scale_per_tensor_contradict() -> None:
    with pytest.raises(ConfigError, match=r"group_size=32 and per_channel=False ask for different scales; drop one"):
        QuantConfig(group_size=32, per_channel=False)
    with pytest.raises(ConfigError, match=r"Rule\.group_size=32 and per_channel=False"):
        Rule(type="Linear", group_size=32, per_channel=False)
    Rule(type="Linear", group_size=0, per_channel=False)


def test_an_unknown_kind_of_group_scales() -> None:
    with pytest.raises(ConfigError, match="group_scales='int8' is not known; choose one of 'integer', 'half', 'float'"):
        QuantConfig(group_scales="int8")


def test_a_rule_may_set_the_group_size_alone() -> None:
    assert str(Rule(type="Linear", group_size=0)) == "Rule(type='Linear', group_size=0)"
    with pytest.raises(ConfigError, match=r"changes nothing.*group_size"):
        Rule(type="Linear")


def test_importance_weighs_widths_of_a_balanced_start() -> None:
    config = QuantConfig(start="balanced", importance={8: 2, "4": 0.5})
    assert config.importance == {8: 2.0, 4: 0.5}
    assert [config.importance_of(bits) for bits in (8, 6, 4, 2)] == [2.0, 1.0, 0.5, 1.0]
    assert QuantConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert hash(config) == hash(QuantConfig(start="balanced"))
    for wrong in ({7: 1.0}, {8: 0}, {8: float("inf")}, {8: True}, {8: "2"}, {"x": 1.0}, [8], 2.0):
        with pytest.raises(ConfigError, match="importance"):
            QuantConfig(start="balanced", importance=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="start='balanced'"):
        QuantConfig(importance={8: 2.0})


# --- widths of their own ------------------------------------------------------------------------


def test_keep_first_last_is_a_switch_or_a_width() -> None:
    for value in (True, False, 8, 4):
        config = QuantConfig(keep_first_last=value)
        back = QuantConfig.from_dict(through_json(config.to_dict()))
        assert (back, type(back.keep_first_last)) == (config, type(value))
    for wrong in (1, 0, 5, 3, -8, 8.0, "8", None, (8,)):  # 1 is no True
        with pytest.raises(ConfigError, match=r"keep_first_last=.* must be True .*widths \(8, 6, 4, 2\)"):
            QuantConfig(keep_first_last=wrong)  # type: ignore[arg-type]


def test_the_bits_of_a_rule() -> None:
    rule = Rule(pattern="a", bits=6)
    assert str(rule) == "Rule(pattern='a', bits=6)"
    assert Rule.from_dict(through_json(rule.to_dict())) == rule
    assert QuantConfig(rules=(rule,)).rules == (rule,)
    assert Rule(pattern="a", bits=6, quantize=True, activations="float").bits == 6
    for wrong in (True, False, 1, 0, 9, 8.0, "8", (8, 8)):
        with pytest.raises(ConfigError, match=r"Rule\.bits=.* is not a width"):
            Rule(pattern="a", bits=wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="bits=6 and quantize=False contradict"):
        Rule(pattern="a", bits=6, quantize=False)
    with pytest.raises(ConfigError, match=r"Rule\(pattern='a', bits=6\): bits=6 is not one of the widths \(8, 4\)"):
        QuantConfig(bit_choices=(8, 4), rules=(rule,))
