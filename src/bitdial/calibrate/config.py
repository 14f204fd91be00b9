"""Settings of `calibrate`."""

from dataclasses import dataclass, field

from bitdial.config import Config, check_choice
from bitdial.errors import ConfigError

EFFORTS = ("quick", "medium", "full")
ITERATIONS = {"medium": 200, "full": 2000}
BATCH_SIZES = {"medium": 8, "full": 32}


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(Config):
    """What `calibrate` does. Each step can be left out.

    effort             'quick': nothing is learned, minutes on a CPU; 'medium': each width's norms and activation scales
                       learn, up to an hour on a CPU; 'full': weights learn too, for a GPU
    activation_bits    the width of activations at every width of the weights, such as 8, for mixed plans of weights;
                       None: that of the weights
    equalize           scale channels so that one activation scale suits them all, where that is expected to pay
    choose_scales      choose weight and activation scales anew: weights by the product of the errors over the widths
    correct_norms      correct the statistics of each norm by how they differ from the float model's, at each width
    correct_biases     the same for the mean of layers that no norm follows; one bias serves all widths
    round_jointly      choose the code of each weight by the outputs of its layer at all widths, not the nearest
    iterations         of what is learned, in each block; None: 200 of 'medium', 2,000 of 'full'; twice as many to tune
    batch_size         samples in each of them; None: 8 of 'medium', 32 of 'full'
    weight_rate        learning rate of weights, in steps of the lowest width
    scale_rate         learning rate of activation scales, relative to their size
    norm_rate          learning rate of weights and biases of norms, relative to their size; each width has its own
    tune               at last, let what each width has of its own learn from the output of the whole model
    tune_rate          learning rate of that, relative to sizes
    tune_weight_rate   that of weights, which learn first, at all widths at once, with effort 'full'; as weight_rate
    reach              how far a weight may move, in steps of the lowest width
    drop               the share of a block's inputs, and of the activations in it, that stays in float as it learns
    tolerance          the relative error of a block's output below which a width counts as good; of a layer's, a tenth
    importance         of each width to scales, codes and reconstruction, such as {8: 2.0}; a width that is not named
                       has 1, and the highest has no less than that where scales are chosen
    scale_importance   of each width where scales are chosen, in place of `importance`: {8: 0.3} lets 8 bits be clipped
                       for what lower widths gain, which suits groups of inputs; by a scale per row much is lost
    seed               of the samples drawn and of what is dropped
    """

    effort: str = "quick"
    activation_bits: int | None = None
    equalize: bool = True
    choose_scales: bool = True
    correct_norms: bool = True
    correct_biases: bool = True
    round_jointly: bool = True
    tune: bool = True
    iterations: int | None = None
    batch_size: int | None = None
    weight_rate: float = 1e-2
    scale_rate: float = 1e-3
    norm_rate: float = 1e-2
    tune_rate: float = 3e-3
    tune_weight_rate: float = 1e-3
    reach: float = 0.5
    drop: float = 0.5
    tolerance: float = 1e-3
    importance: dict[int, float] = field(default_factory=dict, hash=False)
    scale_importance: dict[int, float] = field(default_factory=dict, hash=False)
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("effort", self.effort, EFFORTS)
        for name in ("equalize", "choose_scales", "correct_norms", "correct_biases", "round_jointly", "tune"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r} must be True or False")
        for name in ("iterations", "batch_size"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name}={value!r} must be a whole number of at least 1")
        if self.activation_bits is not None and type(self.activation_bits) is not int:
            raise ConfigError(f"activation_bits={self.activation_bits!r} must be a width, such as 8, or None")
        if type(self.seed) is not int:
            raise ConfigError(f"seed={self.seed!r} must be a whole number")
        names = "weight_rate", "scale_rate", "norm_rate", "tune_rate", "tune_weight_rate", "drop", "tolerance"
        shares = dict.fromkeys(names, 1.0)
        for name, most in {**shares, "reach": 128.0}.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
                raise ConfigError(f"{name}={value!r} must be a number from 0 to {most:g}")
        if self.tolerance == 0:
            raise ConfigError(
                "tolerance=0 makes the loss of a width without error infinite; use a small number, as 1e-6"
            )
        for name in ("importance", "scale_importance"):
            object.__setattr__(self, name, _by_width(name, getattr(self, name)))

    @property
    def learning(self) -> tuple[int, int]:
        """How many iterations a block learns, and of how many samples each; (0, 0) if nothing is learned."""
        if self.effort == "quick":
            return 0, 0
        return self.iterations or ITERATIONS[self.effort], self.batch_size or BATCH_SIZES[self.effort]

    @property
    def tuning(self) -> tuple[int, int]:
        """The same of the last step, for each width through the whole model."""
        iterations, batch_size = self.learning
        return (2 * iterations, batch_size) if self.tune else (0, 0)

    def importance_of(self, bits: int) -> float:
        """What the error at `bits` weighs in reconstruction."""
        return self.importance.get(bits, 1.0)


def _by_width(name: str, given: dict[int, float]) -> dict[int, float]:
    """Numbers by width, as they come from Python or from JSON; ConfigError if they are none."""
    found = {int(bits) if str(bits).isdigit() else bits: value for bits, value in given.items()}
    for bits, value in found.items():
        if type(bits) is not int or isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise ConfigError(f"{name}={given!r} must give numbers of at least 0 to widths: {{8: 2.0}}")
    return {bits: float(value) for bits, value in found.items()}
