"""The house in numbers: which folder imports which, drawn; the largest file, the longest function, most parameters.

    python benchmarks/house.py       # writes docs/figures/imports.png and the numbers in docs/house.md

The order of the folders is that of `tests/test_import_rules.py`, which fails if an import goes up or in a circle.
"""

import ast
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "bitdial"
PAGE, FIGURE = ROOT / "docs" / "house.md", ROOT / "docs" / "figures" / "imports.png"
BEGIN, END = "<!-- numbers: written by benchmarks/house.py -->", "<!-- end of numbers -->"

sys.path.insert(0, str(ROOT / "tests"))
from test_import_rules import ORDER, bitdial_units, find_circle, module_graph, parse, unit_of  # noqa: E402

ROW = 0.95  # inches a line of the picture
EVERYWHERE = {"errors", "config", "_version"}  # imported by nearly all: left out of the picture


class Function(NamedTuple):
    """A function of the sources: where it is, its lines, its parameters."""

    place: str
    lines: int
    parameters: int


def package_imports(paths: list[Path]) -> Counter[tuple[str, str]]:
    """How many modules of one folder import from another."""
    found: Counter[tuple[str, str]] = Counter()
    for path in paths:
        importer = unit_of(path)
        if importer not in ("__init__", "__main__"):
            found.update((importer, target) for target in bitdial_units(parse(path), path) - {importer, "__init__"})
    return found


def direct(imports: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """`imports` without what follows from others: an arrow goes if there is a longer way to where it leads."""
    pairs = {pair for pair in imports if not EVERYWHERE & set(pair)}
    reach: dict[str, set[str]] = {}

    def reached(unit: str) -> set[str]:
        if unit not in reach:
            found = {target for importer, target in pairs if importer == unit}
            reach[unit] = found | {far for near in found for far in reached(near)}
        return reach[unit]

    longer = {(importer, far) for importer, near in pairs for far in reached(near)}
    return Counter({pair: imports[pair] for pair in pairs - longer})


def functions(paths: list[Path]) -> list[Function]:
    """Every function, methods included."""
    found = []
    for path in paths:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs)
                place = f"`{path.relative_to(SOURCES)}` {node.name}"
                found.append(Function(place, (node.end_lineno or node.lineno) - node.lineno + 1, count))
    return found


def numbers(paths: list[Path]) -> str:
    """The table of sizes."""
    sizes = sorted(((len(path.read_text().splitlines()), path) for path in paths), reverse=True)
    kernels = [path for path in paths if SOURCES / "kernels" / "triton" in path.parents]
    plain = functions([path for path in paths if path not in kernels])
    longest = max(plain, key=lambda f: f.lines)
    most = max(plain, key=lambda f: f.parameters)
    widest = max(functions(kernels), key=lambda f: f.parameters)
    circle = find_circle({name: found for name, found in module_graph(paths).items() if name != "bitdial"})
    rows = [
        ("modules, lines", f"{len(paths)}, {sum(size for size, _ in sizes):,}"),
        ("largest file", f"`{sizes[0][1].relative_to(SOURCES)}`, {sizes[0][0]} lines"),
        ("longest function", f"{longest.place}, {longest.lines} lines"),
        ("most parameters", f"{most.place}, {most.parameters}"),
        ("of a Triton kernel or its launcher", f"{widest.place}, {widest.parameters}"),
        ("modules that import in a circle", ", ".join(circle) or "none"),
    ]
    return "| what | where |\n|---|---|\n" + "".join(f"| {what} | {where} |\n" for what, where in rows)


def draw(imports: Counter[tuple[str, str]], target: Path) -> None:
    """The folders in their order, top to bottom, and an arrow for each pair that imports."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    used = {unit for pair in imports for unit in pair}
    lines = [[unit for unit in line if unit in used] for line in ORDER]
    lines = [line for line in lines if line]
    place = {}
    for level, line in enumerate(lines):
        for i, unit in enumerate(line):
            place[unit] = ((i - (len(line) - 1) / 2) * 2.4 + 0.35 * (-1) ** level, -level * ROW)
    figure, axes = pyplot.subplots(figsize=(11, ROW * len(lines)))
    for (importer, imported), count in imports.items():
        (x0, y0), (x1, y1) = place[importer], place[imported]
        bend = 0.0 if abs(y0 - y1) < 1.2 * ROW and y0 != y1 else 0.15
        axes.annotate(
            "", (x1, y1 - 0.16), (x0, y0 + 0.16),
            arrowprops={"arrowstyle": "-|>", "color": "#33638d", "alpha": 0.7, "lw": 0.8 + 0.2 * min(count, 12),
                        "connectionstyle": f"arc3,rad={bend}"},
        )  # fmt: skip
    for unit, (x, y) in place.items():
        axes.text(
            x, y, unit, ha="center", va="center", fontsize=11,
            bbox={"boxstyle": "round,pad=0.35", "facecolor": "#fde9c9", "edgecolor": "#8a6d3b"},
        )  # fmt: skip
    axes.set_xlim(-6.5, 6.5)
    axes.set_ylim(-ROW * (len(lines) - 0.5), 0.6)
    axes.axis("off")
    axes.set_title("Each folder imports from those above it (arrows that follow from others are left out)", fontsize=11)
    figure.savefig(target, dpi=110, bbox_inches="tight")


def main() -> None:
    """Draw, and put the numbers into the page."""
    paths = sorted(SOURCES.rglob("*.py"))
    draw(direct(package_imports(paths)), FIGURE)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{numbers(paths)}\n{END}{after}")
    print(numbers(paths))


if __name__ == "__main__":
    main()
