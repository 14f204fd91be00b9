"""Settings of a training that do not go together."""

from typing import Any

from bitdial.errors import ConfigError
from bitdial.prepare.model_output import Output
from bitdial.prepare.own_losses import OwnLosses
from bitdial.train.alrs import OWN
from bitdial.train.config import TrainConfig


def check_sharded(config: TrainConfig, optimizer: object) -> None:
    """Raise ConfigError for what needs parameters whole in every process."""
    for wrong, what in (
        (optimizer is not None, "an optimizer of your own"),
        (config.sampling != "none", f"sampling={config.sampling!r}"),
        (config.alrs in OWN, f"alrs={config.alrs!r}"),
    ):
        if wrong:
            raise ConfigError(f"{what} does not go with a model that is spread over processes (fully_shard)")


def check_own_losses(loss: Any, config: TrainConfig, output: Output) -> None:
    """Raise ConfigError for what needs the logits that a model with its own losses does not return."""
    if isinstance(loss, type) and issubclass(loss, OwnLosses):
        raise ConfigError("loss=OwnLosses is the class; pass loss=OwnLosses()")
    if not isinstance(loss, OwnLosses):
        return
    if config.distill != "none":
        raise ConfigError(
            f"distill={config.distill!r} needs class logits, and a model that returns its own losses gives none in "
            "training; train with distill='none'"
        )
    if output is not None:
        raise ConfigError(f"output={output!r} does not go with OwnLosses, which takes the whole dict; leave it out")
