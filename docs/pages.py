"""Lay out the pages that mkdocs builds: the repository's Markdown files where they are, and a reference.

The links between README, docs and results then hold as they do in the repository. The reference has the docstrings of
all public names, in the sections of docs/api.md and with its signatures.
"""

import inspect
import re
import shutil
from pathlib import Path

import bitdial

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
ITEM, PLAIN = re.compile(r"- |\d+\. "), re.compile(r"(?!- |\d+\. |#|\|)\S")  # of a list; of a paragraph
TABLE = re.compile(r"^\w[\w, ]*?  +\S.*(?:\n(?:  +|\w[\w, ]*?  +)\S.*)*$", re.M)  # names, and what they are in a column


def reference() -> str:
    """Markdown: each public name with its signature and its docstring."""
    parts = ["# API, from the docstrings", "[API](api.md) has the same names at a glance."]
    missing = set(bitdial.__all__) - {"__version__"}
    for line in (ROOT / "docs" / "api.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            parts.append(line)
        elif (named := re.match(r"- `(\w+)(.*?)`", line)) and named[1] in missing:
            missing.remove(named[1])
            doc = inspect.getdoc(getattr(bitdial, named[1])) or ""
            parts += [f"### {named[1]}", f"```python\n{named[1]}{named[2]}\n```", TABLE.sub(_as_it_stands, doc)]
    if missing:
        raise SystemExit(f"docs/api.md has no line for {sorted(missing)}")
    return "\n\n".join(parts) + "\n"


def _as_it_stands(table: re.Match[str]) -> str:
    return f"\n```text\n{table[0]}\n```\n"


def for_mkdocs(text: str) -> str:
    """`text` as mkdocs reads it: four spaces for what belongs to an item of a list, and a blank line before lists."""
    lines: list[str] = []
    fence: int | None = None  # the indent of the block of code that we are in
    loose = False  # whether we are in an item of several paragraphs
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if fence is None and ITEM.match(line):
            if lines and (loose or PLAIN.match(lines[-1])):
                lines.append("")
            loose = False
        elif indent and lines and not lines[-1]:
            loose = True
        lines.append(" " * _wider(indent if fence is None else fence) + line[indent if fence is None else fence :])
        if line.lstrip().startswith("```"):
            fence = indent if fence is None else None
    return "\n".join(lines) + "\n"


def _wider(indent: int) -> int:
    return 4 * ((indent + 1) // 2) if indent != 3 else 4  # 3 is that of "1. "


def main() -> None:
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, PAGES)
    for name in ("docs", "results"):
        shutil.copytree(ROOT / name, PAGES / name, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (PAGES / "docs" / "reference.md").write_text(reference(), encoding="utf-8")
    for path in PAGES.rglob("*.md"):
        path.write_text(for_mkdocs(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
