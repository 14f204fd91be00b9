"""The documentation is run and checked, so that it cannot rot: code blocks, links, names, signatures, the reader."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bitdial
from bitdial import BitdialError, QuantConfig, Rule, build_model, load, prepare, read_artifact, save, set_bits
from bitdial.artifact import sizes
from bitdial.functional.bitstream import pack_bytes
from bitdial.nn.decompose import DECOMPOSITIONS
from bitdial.nn.layer_kinds import KIND_OF, KINDS
from bitdial.nn.layers import QUANTIZED
from bitdial.recipes.llm_options import LlmOptions

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
FOR_USERS = [path for path in PAGES if path.name != "extending.md"]  # which is for those who change bitdial itself
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.S | re.M)


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code_blocks(text: str, language: str = "python") -> list[str]:
    return [body for kind, body in FENCE.findall(text) if kind == language]


def prose(text: str) -> str:
    return FENCE.sub("", text)


def each_page(pages: list[Path] = PAGES) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", pages, ids=[str(path.relative_to(ROOT)) for path in pages])


def run(name: str) -> dict[str, Any]:
    """Run a page's Python blocks in order, as one script; returns what they defined."""
    names: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(code_blocks(page(name)), start=1):
        exec(compile(block, f"{name}, block {number}", "exec"), names)
    return names


@pytest.fixture
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield tmp_path


# --- the code runs ------------------------------------------------------------------------------


def test_the_readme_runs(in_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("README.md")
    found = {
        int(bits): float(share)
        for bits, share in re.findall(r"^(\d) tensor\(([\d.]+)\)$", capsys.readouterr().out, re.M)
    }
    assert set(found) == {8, 6, 4, 3, 2}
    assert min(found.values()) > 0.5, "four classes: a reader should see that it learns"
    assert (in_tmp_path / "model.safetensors").stat().st_size > 0


def test_the_readme_keeps_to_about_ten_lines() -> None:
    (block,) = code_blocks(page("README.md"))
    assert len([line for line in block.splitlines() if line.strip()]) <= 14


def test_the_quickstart_runs(in_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("highspy")
    run("docs/quickstart.md")
    out = capsys.readouterr().out
    for comment in re.findall(r"print\(.*?\)  # (BitPlan\(.*\))$", page("docs/quickstart.md"), re.M):
        assert comment in out, f"the page says {comment}"
    written = {path.name for path in in_tmp_path.iterdir()}
    assert {"net.safetensors", "net-2.safetensors", "small.safetensors", "ddp.safetensors", "run.ckpt"} <= written


def test_the_page_on_progressive_files_runs(
    in_tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    names = run("docs/progressive.md")
    printed = capsys.readouterr().out.splitlines()
    part = names["two_bits"]
    assert printed == [f"2 {part.begin} {part.end}", "(8, 6, 4, 2)"]
    said = [record.message for record in caplog.records if record.name != "bitdial.nn.untouched"]
    assert ["runs at 2 bits, without 8, 6, 4" in message for message in said] == [True]
    for comment in ("# (8, 6, 4, 2): all", "the model runs at 2 bits, without 8, 6, 4"):
        assert comment in page("docs/progressive.md")


def test_the_export_page_runs(in_tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    names = run("docs/export.md")
    assert names["logits"].shape == (8, 10)
    assert torch.equal(names["program"].module()(names["x"]), load(in_tmp_path / "model.safetensors")(names["x"]))


def test_the_page_on_pretrained_models_runs(in_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL")
    pytest.importorskip("transformers", minversion="5")
    names = run("docs/pretrained.md")
    found = re.findall(r"^(\d) tensor\(([\d.]+)\) [\d.]+$", capsys.readouterr().out, re.M)
    assert [int(bits) for bits, _ in found] == [8, 6, 4, 3]
    assert float(found[0][1]) > 0.9, "8 bits answer as the float model does"
    assert read_artifact("mobile.safetensors").metrics["image_settings"] == names["settings"].to_dict()
    assert [block.name for block in names["report"].blocks] == ["model.layers.0", "model.layers.1", "lm_head"]


def test_the_page_on_detectors_runs(in_tmp_path: Path) -> None:
    pytest.importorskip("highspy")
    if torch.__version__ < (2, 13):
        pytest.skip("hessian_trace wants second derivatives of the small detector's crops, which torch 2.11 lacks")
    pytest.importorskip("onnxscript")
    names = run("docs/detectors.md")
    assert names["found"].costs["average_bits"] <= 4
    assert set(names["history"].rows[-1]["losses"]) == {"8", "6", "4", "2"}
    set_bits(names["live"], 8)
    kept = names["live"](names["images"])
    assert all(int(one["labels"][0]) == int(t["labels"][0]) for one, t in zip(kept, names["targets"], strict=True))


def test_the_page_on_language_models_runs(in_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5")
    names = run("docs/language-models.md")
    before, after = names["before"], names["after"]
    level = float(re.findall(r"^float ([\d.]+)$", capsys.readouterr().out, re.M)[0])
    assert level < 3, "the toy knows its text"
    assert after[2] - level < 0.5 * (before[2] - level), "a reader should see that it helps"
    assert max(after.values()) < 1.2 * level
    assert (in_tmp_path / "llama.safetensors").stat().st_size > 0


def test_the_page_on_language_models_says_the_defaults() -> None:
    """Of the command, as LlmOptions has them."""
    rows = re.findall(r"^\| (`--.*?) \| (.*?) \|", page("docs/language-models.md"), re.M)
    fields = {f.name: f.default for f in dataclasses.fields(LlmOptions)}
    said = {}
    for options, defaults in rows:
        for option, default in zip(re.findall(r"`--([\w-]+)`", options), re.split(r", ", defaults), strict=False):
            name = {"bits": "bit_choices"}.get(option, option.replace("-", "_"))
            said[name] = default.removesuffix(" steps")
    assert fields["bit_choices"] == tuple(map(int, said.pop("bit_choices").split(",")))
    numbers = {name: float(text) for name, text in said.items() if re.fullmatch(r"[\d.e-]+", text)}
    assert len(numbers) >= 8
    assert numbers == {name: fields[name] for name in numbers}
    assert {name: fields[name] for name in ("scheme", "activations", "update")} == {
        name: said[name] for name in ("scheme", "activations", "update")
    }


@pytest.fixture
def tables_put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """docs/extending.md adds to the tables of bitdial itself, and to the modules that can be imported."""
    monkeypatch.setitem(sys.modules, "my_device", ModuleType("my_device"))
    tables: list[dict[Any, Any]] = [KINDS, KIND_OF, QUANTIZED, DECOMPOSITIONS]
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


def test_the_extending_page_runs(in_tmp_path: Path, tables_put_back: None) -> None:
    names = run("docs/extending.md")
    assert read_artifact("up.safetensors").layers["up"]["type"] == "ConvTranspose1d"
    assert dict(bitdial.get_bits(names["live"])) == {"up": (2, 2)}
    assert dict(bitdial.get_bits(names["running"])) == {"1.value": (2, 2), "1.gate": (2, 2)}
    assert read_artifact("gated.safetensors").manifest["decomposed"] == {"1": "Gated"}
    assert names["count_codes"](names["codes"], 4).sum() == 1000
    assert torch._C._dispatch_has_kernel_for_dispatch_key("bitdial::count_codes", "CPU")


def test_the_transformers_page_runs(in_tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    names = run("docs/transformers.md")
    assert names["text"].shape[1] > 8
    assert set(bitdial.get_bits(names["live"]).values()) == {(2, 2)}


def test_the_page_on_serving_runs(in_tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers", minversion="5")
    names = run("docs/serving.md")
    try:
        assert capsys.readouterr().out.splitlines() == ["[8, 4, 2] 8"]
        for answer in [*names["answers"], names["quiet"]]:
            set_bits(names["live"], answer["bits"])
            text = names["live"].generate(names["tokens"], max_new_tokens=5, do_sample=False, pad_token_id=0)
            assert answer["tokens"] == text[0, names["tokens"].shape[1] :].tolist()
        assert [names["width_for"](count) for count in (0, 1, 2, 3, 4)] == [8, 8, 4, 4, 2]
    finally:
        names["server"].server_close()


def test_the_page_on_drafts_runs(in_tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    names = run("docs/speculation.md")
    assert names["text"].shape == (1, 32)
    assert names["fast"].statistics.tokens == 20


def test_the_page_on_evaluating_language_models_runs(in_tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5")
    scores = run("docs/evaluating-language-models.md")["scores"]
    assert scores[8]["perplexity"] == pytest.approx(scores["float"]["perplexity"], rel=1e-2)
    assert scores[2]["perplexity"] != pytest.approx(scores[8]["perplexity"], rel=1e-4)


def test_the_quickstart_says_what_a_pair_and_a_plan_look_like() -> None:
    assert len(re.findall(r"# BitPlan\(", page("docs/quickstart.md"))) >= 2  # or the test above compares nothing


def test_the_readme_gives_the_sizes_of_the_demo(in_tmp_path: Path) -> None:
    float_model = build_model("cifar_resnet", blocks=1, width=16, in_channels=1)
    save(prepare(float_model, QuantConfig(), torch.rand(4, 1, 8, 8)), "file.safetensors")
    separate = sizes(read_artifact("file.safetensors"))["separate"]
    rows = re.findall(r"^(\d) bits .*?([\d,]{5,}) ", page("README.md"), re.M)
    assert {int(bits): int(count.replace(",", "")) for bits, count in rows} == separate
    float_bytes = sum(tensor.nbytes for tensor in float_model.state_dict().values())
    assert f"{sum(separate.values()):,} bytes together" in page("README.md")
    assert f"Float: {float_bytes:,} bytes" in page("README.md")


# --- the reader of docs/artifact-format.md ------------------------------------------------------


GRANULARITIES: list[dict[str, Any]] = [
    {},
    {"per_channel": False},
    {"group_size": 15},
    {"group_size": 15, "group_scales": "float", "activations": "float"},
]


class Tied(nn.Module):
    """Two convolutions, one transposed; two linear layers of one weight; an odd number of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 3, 3, bias=False)
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.up = nn.ConvTranspose2d(5, 5, 1)
        self.first = nn.Linear(45, 45)
        self.second = nn.Linear(45, 45, bias=False)
        self.second.weight = self.first.weight
        self.head = nn.Linear(45, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(self.norm(self.conv(self.stem(x).relu())).relu()).flatten(1)
        return self.head(self.second(self.first(x).relu()))


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    return run("docs/artifact-format.md")


@pytest.mark.parametrize("bit_choices", [(8, 6, 4, 2), (7, 4, 3), (4, 3, 2)])
@pytest.mark.parametrize(
    ("scheme", "ties"),
    [
        ("double_rounding", "even"),
        ("double_rounding", "up"),
        ("nested", "even"),
        ("nested+2", "even"),
        ("centred", "even"),
        ("truncate", "even"),
        ("adabits", "even"),
    ],
)
def test_the_reader_reproduces_the_weights(
    scheme: str, ties: str, bit_choices: tuple[int, ...], reader: dict[str, Any], in_tmp_path: Path
) -> None:
    for scales in GRANULARITIES:
        config = QuantConfig(bit_choices=bit_choices, scheme=scheme, ties=ties, start="3std", **scales)
        model: Any = prepare(Tied(), config, torch.rand(8, 1, 5, 5))
        save(model, "file.safetensors")
        live = load("file.safetensors", Tied())
        manifest, tensors = reader["read"]("file.safetensors")
        assert set(manifest["layers"]) == {"conv", "up", "first", "second"}
        for bits in bit_choices:
            for name in manifest["layers"]:
                layer = model.get_submodule(name)
                found = reader["weight"](manifest, tensors, name, bits)
                assert found.dtype == np.float32
                expected = layer.weight_quantizer(layer.weight_rows(), bits).detach().numpy()
                np.testing.assert_array_equal(found, expected)
                np.testing.assert_array_equal(found, live.get_submodule(name).codes.weight_values(bits).numpy())
        assert len(np.unique(reader["weight"](manifest, tensors, "first", bit_choices[-1]))) > 2


def test_the_reader_refuses_a_damaged_file(reader: dict[str, Any], in_tmp_path: Path) -> None:
    save(prepare(Tied(), QuantConfig(), torch.rand(8, 1, 5, 5)), "file.safetensors")
    content = bytearray(Path("file.safetensors").read_bytes())
    content[-1] ^= 1
    Path("file.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        reader["read"]("file.safetensors")


def test_the_reader_of_progressive_files(reader: dict[str, Any], in_tmp_path: Path) -> None:
    for choices in ((8, 6, 4, 2), (7, 4, 3)):
        config = QuantConfig(bit_choices=choices, scheme="nested", rules=(Rule(pattern="up", bits=4),))
        save(prepare(Tied(), config, torch.rand(8, 1, 5, 5)), "file.safetensors", progressive=True)
        stored = read_artifact("file.safetensors")
        content, ends = Path("file.safetensors").read_bytes(), [part.end for part in stored.parts]
        for bits, end in zip(reversed(choices), ends, strict=True):
            Path("cut.safetensors").write_bytes(content[:end])
            for name in ("conv", "up", "first"):
                found = reader["read_codes"]("cut.safetensors", name, bits)
                np.testing.assert_array_equal(found, stored.codes(name).numpy() >> (choices[0] - bits))
        Path("cut.safetensors").write_bytes(content[:-1])
        with pytest.raises(ValueError, match="is cut or damaged"):
            reader["read_codes"]("cut.safetensors", "conv", choices[0])


@pytest.mark.parametrize(("bits", "packed"), [(3, "0xF1, 0x08"), (4, "0xE1, 0xC3")])
def test_the_packing_example(bits: int, packed: str, reader: dict[str, Any]) -> None:
    codes = [1, -2, 3, -4]
    assert packed in page("docs/artifact-format.md")
    stream = pack_bytes(torch.tensor(codes), bits)
    assert ", ".join(f"0x{byte:02X}" for byte in stream.tolist()) == packed
    assert reader["unpack"](stream.numpy(), bits, len(codes)).tolist() == codes


def test_the_specification_names_every_field_and_tensor(in_tmp_path: Path) -> None:
    rules = (Rule(pattern="conv", activations="asymmetric"),)
    text = page("docs/artifact-format.md")
    for scheme, size in (("double_rounding", 15), ("lsq", None)):
        config = QuantConfig(scheme=scheme, rules=rules, group_size=size)
        save(prepare(Tied(), config, torch.rand(8, 1, 5, 5)), "file.safetensors")
        artifact = read_artifact("file.safetensors")
        fields = {*artifact.manifest, *(f for e in artifact.layers.values() for f in e)}
        fields |= {f for e in artifact.norms.values() for f in e}
        assert sorted(f for f in fields if f"`{f}`" not in text) == []
        parts = {name.rpartition("/")[2] for name in artifact.tensors if not name.startswith(".float/")}
        assert sorted(p for p in parts if f"LAYER/{p}`" not in text and f"NORM/{p}`" not in text) == []


# --- names --------------------------------------------------------------------------------------


def imported_from_bitdial(block: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(block)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "bitdial":
            for alias in node.names:
                yield alias.name if node.module == "bitdial" else f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("bitdial."))


@each_page(FOR_USERS)
def test_code_imports_public_names_only(path: Path) -> None:
    names = {n for block in code_blocks(path.read_text(encoding="utf-8")) for n in imported_from_bitdial(block)}
    assert sorted(names - set(bitdial.__all__)) == []


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ("from bitdial import load, save as s", {"load", "save"}),
        ("from bitdial.nn import QuantLinear", {"bitdial.nn.QuantLinear"}),
        ("import bitdial.train", {"bitdial.train"}),
        ("import torch\nfrom torch import nn", set()),
    ],
)
def test_imports_are_found(block: str, expected: set[str]) -> None:
    assert set(imported_from_bitdial(block)) == expected


ENTRY = re.compile(r"^- `(\w+)(?:\((.*?)\))?`:", re.M | re.S)


def documented() -> dict[str, str | None]:
    """Signatures by name, as docs/api.md has them; None for a name without one."""
    entries = ENTRY.findall(page("docs/api.md"))
    names = [name for name, _ in entries]
    assert len(names) == len(set(names)), "a name appears twice"
    return {name: signature or None for name, signature in entries}


def test_the_api_page_has_every_public_name_and_no_other() -> None:
    assert sorted(documented()) == sorted(bitdial.__all__)


def parameters(signature: str) -> list[tuple[str, Any, Any]]:
    """Name, kind and default (its source; None without one) of each parameter in the text of a signature."""
    (function,) = ast.parse(f"def f({signature}): pass").body
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    found: list[tuple[str, Any, Any]] = []
    missing = [None] * (len(arguments.args) - len(arguments.defaults))
    for argument, default in zip(arguments.args, [*missing, *arguments.defaults], strict=True):
        found.append((argument.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, default))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((argument.arg, inspect.Parameter.KEYWORD_ONLY, default))
    if arguments.kwarg is not None:
        found.append((arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD, None))
    return found


def differences(signature: str, target: Callable[..., Any]) -> list[str]:
    """What a documented signature says otherwise than the code."""
    actual = list(inspect.signature(target).parameters.values())
    written = parameters(signature)
    if [(name, kind) for name, kind, _ in written] != [(p.name, p.kind) for p in actual]:
        return [f"parameters are {[p.name for p in actual]}"]
    wrong = []
    for (name, _, default), parameter in zip(written, actual, strict=True):
        if (default is None) != (parameter.default is inspect.Parameter.empty):
            wrong.append(f"{name}: one has a default")
        elif isinstance(default, ast.Name):
            if default.id != parameter.default.__name__:
                wrong.append(f"{name}: the default is {parameter.default!r}")
        elif default is not None and ast.unparse(default) != "{}" and ast.literal_eval(default) != parameter.default:
            wrong.append(f"{name}: the default is {parameter.default!r}")
    return wrong


@pytest.mark.parametrize("name", bitdial.__all__)
def test_documented_signatures_are_those_of_the_code(name: str) -> None:
    target, signature = getattr(bitdial, name), documented()[name]
    if not callable(target) or (inspect.isclass(target) and issubclass(target, BitdialError)):
        assert signature is None
    else:
        assert differences(signature or "", target) == []


def test_wrong_signatures_are_found() -> None:
    def sample(x: int, *, y: int = 2, loss: Any = sorted) -> None: ...

    assert differences("x, *, y=2, loss=sorted", sample) == []
    for wrong in ("x, y=2, loss=sorted", "x, *, y=3, loss=sorted", "x, *, y, loss=sorted", "x=1, *, y=2, loss=sorted",
                  "x, *, y=2, loss=sum", "z, *, y=2, loss=sorted", "x, *, y=2"):  # fmt: skip
        assert differences(wrong, sample), wrong


# --- links and paths ----------------------------------------------------------------------------


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", prose(text))


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page()
def test_relative_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    broken = []
    for link in links(text):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.is_file() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            broken.append(link)
    assert broken == []


def test_anchors_and_links_are_found() -> None:
    text = "# One\n## 12. Norm statistics, `a` b\n[x](y.md#z) and [w](#one)\n```text\n[no](link)\n# no\n```\n"
    assert anchors(text) == {"one", "12-norm-statistics-a-b"}
    assert links(text) == ["y.md#z", "#one"]


@each_page()
def test_named_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("benchmarks/one.py", "")  # stands for any script
    named = set(re.findall(r"\b((?:src/bitdial|tests|benchmarks|docs)/[\w/]+\.(?:py|md))\b", text))
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_every_page_is_reached_from_the_readme() -> None:
    linked = {link.partition("#")[0] for link in links(page("README.md"))}
    assert sorted(str(p.relative_to(ROOT)) for p in PAGES[1:] if str(p.relative_to(ROOT)) not in linked) == []


def test_documented_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    from bitdial.cli import main

    text = page("README.md") + page("docs/quickstart.md")
    commands = set(
        re.findall(
            r"\bbitdial (demo|train|calibrate|calibrate-llm|eval|eval-llm|inspect|switch|export|repack|sensitivity|"
            r"search|search-llm|pareto)(?![\w-])",
            text,
        )
    )
    assert commands == {
        "demo",
        "train",
        "calibrate",
        "calibrate-llm",
        "eval",
        "eval-llm",
        "inspect",
        "switch",
        "export",
        "repack",
        "sensitivity",
        "search",
        "search-llm",
        "pareto",
    }
    for command in commands:
        with pytest.raises(SystemExit) as leaving:
            main([command, "--help"])
        assert leaving.value.code == 0
    with pytest.raises(SystemExit):
        main(["--help"])
    offered = re.findall(r"^    ([\w-]+)(?: |$)", capsys.readouterr().out.rpartition("COMMAND")[2], re.M)
    assert set(offered) == commands, "the README lists every command"


def test_documented_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", page("Makefile"), re.M))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)\b", page("README.md"), re.M))
    assert {"demo", "test"} <= named <= targets


def test_troubleshooting_quotes_messages_of_the_sources() -> None:
    texts = [
        node.value
        for path in (ROOT / "src").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    quoted = re.findall(r"^\| `(.+?)` \|", page("docs/troubleshooting.md"), re.M)
    assert len(quoted) > 20
    for message in quoted:
        for part in message.split("..."):
            assert any(part.strip() in text for text in texts), f"no source says {part!r}"
