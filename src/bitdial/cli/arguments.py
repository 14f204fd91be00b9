"""Arguments that several commands take, and how their text is read. PyTorch is imported only where a text needs it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitdial.cli.usage import did_you_mean
from bitdial.config import check_bit_choices
from bitdial.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from bitdial.artifact import Artifact
    from bitdial.dial.plan import BitPlan, LayerBits

FREE = "free"  # what --pin says of a layer that need not keep its own width
BITS_HELP = "width (4), pair (4:8), stored plan, or the .json file of a plan, of `search --out` or of `pareto --out`"


def file_argument(parser: argparse.ArgumentParser) -> None:
    """The artifact that a command is about."""
    parser.add_argument("file", type=Path, metavar="FILE", help="an artifact (.safetensors)")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """A time above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def seed(text: str) -> int:
    """A whole number that every generator takes."""
    if not text.isdecimal() or int(text) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 to 2147483647")
    return int(text)


def bit_list(text: str) -> tuple[int, ...]:
    """Widths such as 8,6,4,2."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not widths with commas between them, such as 8,6,4,2")
    try:
        return check_bit_choices(tuple(map(int, parts)))
    except ConfigError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem


def weight_scheme(text: str) -> str:
    """The name of a weight scheme."""
    from bitdial.functional import SCHEMES, scheme_of

    try:
        scheme_of(text)
    except ConfigError as problem:
        guess = did_you_mean(text, SCHEMES)
        raise argparse.ArgumentTypeError(f"{text!r} is not known{guess}" if guess else str(problem)) from problem
    return text


def bits_setting(text: str) -> "LayerBits | str":
    """A width (4), a pair (4:8), or else the name of a stored plan."""
    parts = text.split(":")
    if len(parts) <= 2 and all(part.isdigit() for part in parts):
        return int(text) if len(parts) == 1 else (int(parts[0]), int(parts[1]))
    return text


def resolve_setting(setting: "LayerBits | str", artifact: "Artifact") -> "LayerBits | BitPlan":
    """What `--bits` asks for: a width or pair as it is, a plan of the file by its name, or one from a .json file.

    Of a file with several plans, `plans.json:NAME` is the one of that name.
    """
    if not isinstance(setting, str):
        return setting
    if setting in artifact.plans:
        return artifact.plans[setting]
    stem, sign, name = setting.partition(".json:")
    if not sign and not setting.endswith(".json"):
        raise ConfigError(
            f"--bits {setting}: not a width, a pair such as 4:8, a .json file, or a stored plan "
            f"({', '.join(artifact.plans) or 'the file has none'})"
        )
    path = f"{stem}.json" if sign else setting
    plans = _plans_in(path)
    if sign and name in plans:
        return plans[name]
    if not sign and len(plans) == 1:
        return next(iter(plans.values()))
    names = ", ".join(map(repr, plans))
    problem = f"has no plan {name!r}" if sign else f"has {len(plans)} plans"
    raise PlanError(f"--bits {setting}: {path} {problem}; choose one by its name, as in {path}:NAME ({names})")


def _plans_in(path: str) -> "dict[str, BitPlan]":
    """The plans in a .json file by name, as `search --out` and `pareto --out` write them; one by itself has none."""
    from bitdial.dial.plan import BitPlan
    from bitdial.files.atomic import read_json
    from bitdial.planning import MeasuredFront

    values: Any = read_json(path)
    try:
        if isinstance(values, dict) and isinstance(found := values.get("plans"), dict) and found:
            return {name: BitPlan.from_dict(one["plan"]) for name, one in found.items()}
        if isinstance(values, dict) and "candidates" in values:
            return MeasuredFront.load(path).plans
        return {"": BitPlan.from_dict(values)}
    except (KeyError, TypeError, ValueError) as problem:  # of ours, PlanError and ConfigError
        raise PlanError(
            f"--bits {path}: not a plan, as json.dumps(plan.to_dict()) gives, nor what `bitdial search --out` or "
            f"`bitdial pareto --out` writes ({problem})"
        ) from problem


def plan_name(text: str) -> str:
    """A name by which --bits finds a plan: none that it would take for a width."""
    if not text.strip() or not isinstance(bits_setting(text), str):
        raise argparse.ArgumentTypeError(f"{text!r} cannot name a plan: --bits would take it for a width, or nothing")
    return text


def shape(text: str) -> tuple[int, ...]:
    """The shape of one input, such as 3x32x32."""
    parts = text.split("x")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 3x32x32")
    return tuple(map(int, parts))


def layer_list(text: str) -> list[str]:
    """Layer names or patterns, such as layer1.*,layer2.0.conv1."""
    return [part for part in text.split(",") if part]


def pin(text: str) -> "tuple[str, LayerBits | None]":
    """A layer (or pattern) and its bits, such as layer1.0.conv1=8 or layer1.*=4:8; None for fc=free."""
    name, sign, bits = text.rpartition("=")
    value = bits_setting(bits)
    if not sign or not name or (isinstance(value, str) and value != FREE):
        raise argparse.ArgumentTypeError(f"{text!r} is not LAYER=BITS, such as layer1.0.conv1=8, nor LAYER={FREE}")
    return name, None if isinstance(value, str) else value
