"""docs/troubleshooting.md quotes messages that the sources have."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_quoted_messages_are_in_the_sources() -> None:
    texts = [
        node.value
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `(.+?)` \|", page, re.M)
    assert len(quoted) > 20
    for message in quoted:
        for part in message.split("..."):
            assert any(part.strip() in text for text in texts), f"no source says {part!r}"
