"""What the paper prints of the things that the results page shows: numbers only, each with the table it is from."""

from typing import NamedTuple

Widths = tuple[int, ...]


class PaperLine(NamedTuple):
    """A line of the paper: our name of the scheme, its name there, stored bits, ALRS, accuracies by width."""

    scheme: str
    method: str
    stored: int
    alrs: bool
    widths: Widths
    top1: tuple[float, ...]
    float_top1: float
    kd: bool = False

    def by_bits(self) -> dict[int, float]:
        """The accuracies by width."""
        return dict(zip(self.widths, self.top1, strict=True))


FOUR, THREE = (8, 6, 4, 2), (4, 3, 2)

# ResNet20 on CIFAR-10, 90 epochs at 5e-4, without distillation: the two ablation tables of ALRS.
RESNET20 = [
    PaperLine("double_rounding", "Double Rounding", 8, True, FOUR, (92.25, 92.32, 92.09, 90.19), 92.30),
    PaperLine("double_rounding", "Double Rounding", 8, False, FOUR, (92.17, 92.20, 92.17, 89.67), 92.30),
    PaperLine("truncate", "Bit-Mixer", 8, True, FOUR, (92.07, 91.88, 91.97, 59.08), 92.30),
    PaperLine("truncate", "Bit-Mixer", 8, False, FOUR, (91.84, 91.89, 91.34, 38.19), 92.30),
    PaperLine("lsq", "MultiQuant", 32, True, FOUR, (92.04, 92.08, 91.56, 88.50), 92.30),
    PaperLine("lsq", "MultiQuant", 32, False, FOUR, (92.02, 91.89, 91.50, 87.78), 92.30),
    PaperLine("double_rounding", "Double Rounding", 4, True, THREE, (91.79, 91.83, 88.88), 92.30),
    PaperLine("double_rounding", "Double Rounding", 4, False, THREE, (91.19, 90.98, 88.62), 92.30),
]

# MobileNetV2 on ImageNet: the table of {8,6,4,2}-bit results and the first ablation table.
MOBILENETV2 = [
    PaperLine("double_rounding", "Double Rounding, ImageNet", 8, True, FOUR, (70.98, 70.70, 68.77, 50.43), 71.14),
    PaperLine("double_rounding", "Double Rounding, ImageNet", 8, False, FOUR, (70.55, 70.65, 68.08, 45.00), 71.14),
    PaperLine("double_rounding", "Double Rounding, ImageNet", 8, True, FOUR, (71.35, 71.20, 69.85, 53.06), 71.14, True),
]


class PaperCost(NamedTuple):
    """Hours on a V100 (ResNet20, CIFAR-10, 200 epochs, batch 128) and the saving in percent, as printed.

    The printed saving is separate / joint - 1.
    """

    separate: float
    joint: float
    printed: float


COST = {FOUR: PaperCost(0.9, 0.8, 12.5), THREE: PaperCost(0.9, 0.7, 28.6)}
