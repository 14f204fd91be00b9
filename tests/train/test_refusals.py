"""Settings that do not go together."""

import pytest

from bitdial import OwnLosses, TrainConfig
from bitdial.errors import ConfigError
from bitdial.train.refusals import check_own_losses, check_sharded


def test_what_goes_together_passes_and_the_rest_is_named() -> None:
    config = TrainConfig(epochs=1)
    check_sharded(config, None)
    check_own_losses(OwnLosses(), config, None)
    check_own_losses(len, TrainConfig(epochs=1, distill="in_place"), "logits")
    for problem, attempt in (
        ("an optimizer of your own", lambda: check_sharded(config, object())),
        ("alrs='layer'", lambda: check_sharded(TrainConfig(epochs=1, alrs="layer"), None)),
        ("distill='in_place'", lambda: check_own_losses(OwnLosses(), TrainConfig(epochs=1, distill="in_place"), None)),
        ("output='boxes'", lambda: check_own_losses(OwnLosses(), config, "boxes")),
        ("is the class", lambda: check_own_losses(OwnLosses, config, None)),
    ):
        with pytest.raises(ConfigError, match=problem):
            attempt()
