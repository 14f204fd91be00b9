"""Build the sdist and the wheel, look into them, install the wheel into an empty environment and use it there.

    make wheel-test

The environment gets what the wheel asks for and nothing else (the versions of constraints.txt), so an import of an
optional package that crept into the core is found. About a minute, most of it the installation of torch.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "bitdial"
EXPECTED = {"filelock", "numpy", "safetensors", "torch"}
URLS = {"Paper, https://arxiv.org/abs/2502.01199"}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        run(sys.executable, "-m", "build", "--outdir", str(place / "dist"), str(ROOT))
        (wheel,), (sdist,) = place.glob("dist/*.whl"), place.glob("dist/*.tar.gz")
        check_wheel(wheel)
        check_sdist(sdist)
        use(wheel, place)
    print("The wheel is complete, and works in an empty environment.")


def run(*command: str, cwd: Path | None = None) -> str:
    """What a command prints, without the checkout on its path; if it fails, this script does too, and shows it."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, text=True, capture_output=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def check_wheel(wheel: Path) -> None:
    """Every file of the package, the licence, and metadata that an index shows."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (message_from_bytes(archive.read(n)) for n in names if n.endswith(".dist-info/METADATA"))
    package = {f"bitdial/{path.relative_to(PACKAGE).as_posix()}" for path in tracked(PACKAGE)}
    same("the wheel's package", {n for n in names if n.startswith("bitdial/")}, package)
    assert "bitdial/py.typed" in names
    assert any(n.endswith(".dist-info/licenses/LICENSE") for n in names), "the licence is in the wheel"
    required = {re.split(r"[^\w-]", r)[0] for r in metadata.get_all("Requires-Dist", []) if "extra ==" not in r}
    same("what the wheel requires", required, EXPECTED)
    classifiers = " ".join(metadata.get_all("Classifier", []))
    for part in ("Python :: 3.11", "Python :: 3.12", "Operating System", "Topic", "Typing :: Typed"):
        assert part in classifiers, f"a classifier for {part}"
    same("the wheel's URLs", set(metadata.get_all("Project-URL", [])), URLS)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Description-Content-Type"] == "text/markdown"


def check_sdist(sdist: Path) -> None:
    """All that `make test` and `make docs` need."""
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {path.relative_to(ROOT).as_posix() for path in tracked(ROOT) if not path.is_relative_to(ROOT / ".ci")}
    assert not wanted - names, f"not in the sdist: {sorted(wanted - names)[:5]}"
    assert not any(part in name for name in names for part in (".venv", "__pycache__", "site/"))


def tracked(folder: Path) -> list[Path]:
    """The files of the repository in `folder` that are there, also those that are not committed yet."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=folder).splitlines()
    return [folder / name for name in listed if (folder / name).is_file()]


def same(what: str, found: set[str], expected: set[str]) -> None:
    assert found == expected, f"{what}: missing {sorted(expected - found)[:5]}, too much {sorted(found - expected)[:5]}"


def use(wheel: Path, place: Path) -> None:
    """The README's ten lines, and the command line on what they wrote."""
    venv.create(place / "empty", with_pip=True)
    tools = place / "empty" / ("Scripts" if sys.platform == "win32" else "bin")
    pip = [str(tools / "python"), "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel))
    block = re.search(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    assert block is not None
    (place / "ten_lines.py").write_text(block[1], encoding="utf-8")
    printed = run(str(tools / "python"), "-W", "error", "ten_lines.py", cwd=place)
    assert re.findall(r"^(\d) tensor", printed, re.M) == ["8", "6", "4", "3", "2"], printed
    assert "What prepare made of the model" in run(str(tools / "bitdial"), "inspect", "model.safetensors", cwd=place)
    found = json.loads(run(str(tools / "bitdial"), "inspect", "model.safetensors", "--json", cwd=place))
    assert found["file"] == "model.safetensors"
    where = run(str(tools / "python"), "-c", "import bitdial; print(bitdial.__file__)", cwd=place)
    assert Path(where.strip()).is_relative_to(place.resolve()), "the installed one ran, not the checkout"


if __name__ == "__main__":
    main()
