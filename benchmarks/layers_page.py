"""The table of layers that bitdial quantises, from the tables of the code.

python benchmarks/layers_page.py       # writes the tables in docs/layers.md
"""

from pathlib import Path

from bitdial.live.engines.integer.shapes import SHAPES
from bitdial.nn import KINDS, LayerKind
from bitdial.nn.decompose import DECOMPOSITIONS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "layers.md"
BEGIN, END = "<!-- tables: written by benchmarks/layers_page.py -->", "<!-- end of tables -->"


def kernels(kind: LayerKind) -> str:
    """What runs a layer of that kind, beside float kernels and exact sums."""
    served = ["integer"] if kind.name in SHAPES else []
    return ", ".join([*served, *(["packed"] if kind.name == "Linear" else [])]) or "none"


def tables() -> str:
    """Both tables, in Markdown."""
    rows = ["| layer | weight | input | further kernels |", "|---|---|---|---|"]
    for kind in KINDS.values():
        weight = "by a rule only" if kind.gathers else "by default"
        read = "as the config says" if kind.multiplies else "never"
        rows.append(f"| `{kind.name}` | {weight} | {read} | {kernels(kind)} |")
    rows += ["", "| module | becomes |", "|---|---|"]
    rows += [f"| `{each.name}` | {each.layers} |" for each in DECOMPOSITIONS.values()]
    return "\n".join(rows)


def page() -> str:
    """docs/layers.md as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page())
