"""What is to be done when another package is imported: then, once, and not at all if that never is."""

import importlib
import sys
import warnings
from pathlib import Path

import pytest

import bitdial
from bitdial._when_imported import when_imported

MODULE = "bitdial_test_host"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with a module `plugins` that has `found`, not imported yet."""
    folder = tmp_path / MODULE
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "plugins.py").write_text('"""Has what others add."""\nfound = []\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in (MODULE, f"{MODULE}.plugins"):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    return folder


def add() -> None:
    sys.modules[f"{MODULE}.plugins"].found.append("here")


@pytest.mark.usefixtures("host")
def test_it_is_done_once_and_behind_the_import() -> None:
    before = list(sys.meta_path)
    when_imported(f"{MODULE}.plugins", add)
    assert MODULE not in sys.modules
    importlib.import_module(MODULE)
    assert f"{MODULE}.plugins" not in sys.modules, "the package alone is not it"
    assert importlib.util.find_spec(f"{MODULE}.plugins").loader.get_source(f"{MODULE}.plugins").endswith("found = []\n")
    module = importlib.import_module(f"{MODULE}.plugins")
    assert module.found == ["here"]
    assert sys.meta_path == before, "and nothing is left behind"
    assert type(module.__loader__) is type(module.__spec__.loader) is type(importlib.import_module(MODULE).__loader__)
    assert importlib.reload(module).found == []
    when_imported(f"{MODULE}.plugins", add)
    assert module.found == ["here"], "at once if it is there already"


def test_a_module_that_fails_can_be_imported_again(host: Path) -> None:
    text = (host / "plugins.py").read_text()
    (host / "plugins.py").write_text("1 / 0")
    when_imported(f"{MODULE}.plugins", add)
    with pytest.raises(ZeroDivisionError):
        importlib.import_module(f"{MODULE}.plugins")
    (host / "plugins.py").write_text(text + "more = 1\n")
    assert importlib.import_module(f"{MODULE}.plugins").found == ["here"]


@pytest.mark.usefixtures("host")
def test_a_failure_does_not_break_the_other_package() -> None:
    when_imported(f"{MODULE}.plugins", lambda: [][0])
    with pytest.warns(RuntimeWarning, match="bitdial could not register itself: IndexError"):
        importlib.import_module(f"{MODULE}.plugins")


def test_a_module_that_is_not_there_stays_so() -> None:
    with warnings.catch_warnings():
        when_imported("bitdial_no_such_module", add)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("bitdial_no_such_module")
    sys.meta_path.pop(0)
    assert bitdial.__version__


def test_transformers_knows_bitdial() -> None:
    pytest.importorskip("transformers", minversion="5")
    from transformers.quantizers import auto

    assert auto.AUTO_QUANTIZER_MAPPING["bitdial"].__name__ == "BitdialQuantizer"
    assert auto.AUTO_QUANTIZATION_CONFIG_MAPPING["bitdial"].__name__ == "BitdialConfig"
