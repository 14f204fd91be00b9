import json

import pytest

from bitdial import CalibrateConfig
from bitdial.errors import ConfigError


def test_settings_go_through_json_and_are_checked() -> None:
    config = CalibrateConfig(effort="full", importance={8: 2, 4: 0.5})
    assert CalibrateConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert (config.importance_of(8), config.importance_of(6)) == (2.0, 1.0)
    config = CalibrateConfig(scale_importance={8: 0.3})
    assert CalibrateConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert config.importance_of(8) == 1.0
    for name, value in {
        "effort": "slow",
        "activation_bits": 8.0,
        "equalize": 1,
        "iterations": 0,
        "batch_size": 2.5,
        "drop": 1.5,
        "reach": -1,
        "tolerance": "small",
        "seed": None,
        "importance": {8: -1.0},
        "scale_importance": {"high": 1.0},
    }.items():
        with pytest.raises(ConfigError, match=name):
            CalibrateConfig(**{name: value})
    efforts = [CalibrateConfig(effort=effort).learning for effort in ("quick", "medium", "full")]
    assert efforts == [(0, 0), (200, 8), (2000, 32)]
    assert CalibrateConfig(effort="medium", iterations=3).learning == (3, 8)
    assert CalibrateConfig(iterations=3, batch_size=4).learning == (0, 0)
    with pytest.raises(ConfigError, match="unknown settings"):
        CalibrateConfig.from_dict({"labels": True})
