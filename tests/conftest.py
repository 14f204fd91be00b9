"""What all tests share."""

import dataclasses
import functools
import gc
import importlib.util
import inspect
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

# Processes that tests start see this tree too, installed or not.
ROOT = Path(__file__).resolve().parent.parent
SOURCE = str(ROOT / "src")
os.environ["PYTHONPATH"] = os.pathsep.join([SOURCE, *filter(None, [os.environ.get("PYTHONPATH")])])


# No file of a test need survive a power cut; to wait for the disk takes longer than most tests.
os.fsync = lambda handle: None


def quicken_the_interpreter() -> None:
    """Spare Triton's interpreter what comes to nothing, or to the same every time: more than half of its work.

    It rewires its language at every call from one kernel function to another, and sets it back after each launch; here
    it stays as it is after the first. It computes whether integers overflow, which it only looks at if it debugs. And
    for every number that it computes it derives anew what follows from a type and a shape alone. In a Triton that does
    these in another way, nothing is changed.
    """
    from triton.runtime import interpreter

    names = (
        "_patch_lang",
        "_LangPatchScope",
        "interpreter_builder",
        "interpreter_semantic",
        "tl",
        "_get_np_dtype",
        "_patch_attr",
    )
    if not all(hasattr(interpreter, name) for name in names):
        return
    if [*inspect.signature(interpreter._patch_attr).parameters] != ["obj", "name", "member", "builder", "scope"]:
        return
    builder = interpreter.interpreter_builder
    if getattr(builder.options, "sanitize_overflow", False) and not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    rewire, language = interpreter._patch_lang, interpreter.tl
    rewired: set[tuple[bool, bool]] = set()

    @functools.cache
    def visible(function: Any) -> tuple[bool, bool]:
        """Whether a function sees the language, and its core: what is rewired depends on these."""
        modules = [value for value in function.__globals__.values() if inspect.ismodule(value)]
        return language in modules, language.core in modules

    def rewire_once(function: Any) -> Any:
        if visible(function) not in rewired:
            rewired.add(visible(function))
            rewire(function)
        return interpreter._LangPatchScope()  # without changes: nothing is set back

    def hand_over(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        plain = getattr(member, "__wrapped__", member)  # what it is wrapped in only looks for the semantic

        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return plain(*args, **kwargs)

        scope.set_attr(place, name, called)

    interpreter._patch_lang, interpreter._patch_attr = rewire_once, hand_over
    remember_types(interpreter)
    remember_operands(interpreter)


def remember_types(interpreter: Any) -> None:
    """Let the interpreter find NumPy's type of a Triton type, and the sizes of a shape, once instead of every time."""
    block, tensor, row = interpreter.tl.block_type, interpreter.tl.tensor, interpreter.tl.tuple
    take_apart, start_block, start_tensor = interpreter._get_np_dtype, block.__init__, tensor.__init__
    translate, compare, same = block.to_ir, row.__eq__, interpreter.tl.constexpr(True)
    if [*inspect.signature(start_block).parameters] != ["self", "element_ty", "shape"]:
        return
    if [*inspect.signature(start_tensor).parameters] != ["self", "handle", "type"]:
        return
    numbers: dict[str, Any] = {}
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[Any, tuple[Any, Any]] = {}
    others: dict[tuple[str, str], Any] = {}
    plain: dict[str, Any] = {}

    def number_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in numbers:
            numbers[name] = take_apart(kind)
        return numbers[name]

    def make_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *shape
        if key not in blocks:
            start_block(self, element_ty, shape)
            made = {name: value for name, value in vars(self).items() if name != "element_ty"}
            first = next((one for at, one in blocks.items() if at[1:] == key[1:]), made)
            blocks[key] = made | {"shape": first["shape"]}  # one object for a shape, so that most are found the same
        self.__dict__.update(blocks[key], element_ty=element_ty)

    def block_of(self: Any, scalar_ty: Any) -> Any:
        key = self.name, scalar_ty.name
        if key not in others:
            others[key] = block(scalar_ty, self.shape)
        return others[key]

    def to_ir(self: Any, builder: Any) -> Any:
        if self.name not in plain:
            plain[self.name] = translate(self, builder)
        return plain[self.name]

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        key = type.name if type.is_block() else None
        if key not in shapes:
            start_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def equal(self: Any, other: Any) -> Any:
        return same if self is other else compare(self, other)

    interpreter._get_np_dtype, block.__init__, tensor.__init__ = number_of, make_block, make_tensor
    block.with_element_ty, block.to_ir, row.__eq__ = block_of, to_ir, equal


def remember_operands(interpreter: Any) -> None:
    """Let the interpreter take two blocks of one type as they are, and make the block of a constant once.

    It comes to that after a dozen questions about their types, which are most of its work.
    """
    core, semantic = interpreter.tl.core, type(interpreter.interpreter_semantic)
    dtype, tensor = core.dtype, core.tensor
    needed = (
        (semantic, "binary_op_type_checking_impl"),
        (semantic, "broadcast_impl_value"),
        (core, "_unwrap_if_constexpr"),
    )
    if not all(hasattr(where, name) for where, name in needed):
        return
    match, fit, unwrap = (getattr(where, name) for where, name in needed)
    flags = {"allow_lhs_ptr": False, "allow_rhs_ptr": False, "arithmetic_check": True, "div_or_mod": False}
    asked = inspect.signature(match).parameters.values()
    if {p.name: p.default for p in asked if p.default is not p.empty} != flags:
        return
    constants: dict[Any, Any] = {}
    leaves, compare = {tensor, dtype, int, bool, type(None)}, dtype.__eq__

    def match_once(self: Any, lhs: Any, rhs: Any, *options: bool, **named: bool) -> tuple[Any, Any]:
        if type(lhs) is not tensor or named:
            return match(self, lhs, rhs, *options, **named)
        kind = lhs.type
        if type(rhs) is tensor:  # a quotient of 16 bits is computed in 32: the fourth of the options
            if kind.name == rhs.type.name and len(options) < 4 and not kind.scalar.is_ptr():
                return lhs, rhs
            return match(self, lhs, rhs, *options)
        key = kind.name, type(rhs), rhs, options
        if key not in constants:
            left, right = match(self, lhs, rhs, *options)
            if left is not lhs:
                return left, right
            constants[key] = right
        return lhs, constants[key]

    def fit_once(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if same else fit(self, lhs, rhs)

    def unwrap_at_once(value: Any) -> Any:
        return value if type(value) in leaves else unwrap(value)

    def equal(self: Any, other: Any) -> bool:
        return self.name == other.name if type(other) is dtype else compare(self, other)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = match_once, fit_once
    core._unwrap_if_constexpr, dtype.__eq__ = unwrap_at_once, equal


# What a shell starts in the background ignores Ctrl-C, and so do its children; Python then has no handler for it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    quicken_the_interpreter()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what only kernels can run where there are none; begin with the files that have slow tests.

    Two workers share them; what is short comes last, so that neither waits long for the other's end.
    """
    kernels_run = torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        marker = item.get_closest_marker("interpreter")
        if marker is not None and marker.kwargs.get("only") and not kernels_run:
            item.add_marker(pytest.mark.skip(reason="runs on a GPU or under the interpreter; see test_interpreter.py"))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: ("under_the_interpreter" not in item.name, item.path not in slow))


def pytest_collection_finish() -> None:
    """Spare the tests what takes a tenth of their time."""
    gc.collect()
    gc.freeze()  # what is imported stays; full collections would look through it each time
    gc.set_threshold(20_000, 50, 100)
    translate_operators_once()


def translate_operators_once() -> None:
    """Let torch's exporter translate and list the operators of ONNX Script once, not at each export."""
    if "onnxscript" not in sys.modules:
        return
    from torch.onnx._internal import _lazy_import
    from torch.onnx._internal.exporter import _registration

    scripts = getattr(_lazy_import, "onnxscript_apis", None)
    if hasattr(scripts, "get_torchlib_ops"):
        scripts.get_torchlib_ops = functools.cache(scripts.get_torchlib_ops)
    registry = getattr(_registration, "ONNXRegistry", None)
    if registry is not None and set(vars(registry())) == {"_opset_version", "functions"}:
        listed = functools.cache(registry.from_torchlib)

        def from_torchlib(opset_version: int = _registration._constants.TORCHLIB_OPSET) -> Any:
            fresh, once = registry(), listed(opset_version)
            fresh._opset_version = once._opset_version
            fresh.functions = {target: [*found] for target, found in once.functions.items()}
            return fresh

        registry.from_torchlib = staticmethod(from_torchlib)


@dataclasses.dataclass
class Calibrations:
    """What the recipe `calibrate` ran: how often it began, and the reports of those that ended.

    `stop` ends the next one after its first block, as Ctrl-C would.
    """

    started: int = 0
    reports: list[Any] = dataclasses.field(default_factory=list)
    stop: bool = False


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> Calibrations:
    """Watches calibrations for tests of what is around them."""
    from bitdial.calibrate import calibrate
    from bitdial.calibrate.checkpoint import Checkpoint

    found, write = Calibrations(), Checkpoint.write

    def watched(*args: Any, **kwargs: Any) -> Any:
        found.started += 1
        found.reports.append(calibrate(*args, **kwargs))
        return found.reports[-1]

    def stopping(self: Checkpoint, reports: list[Any]) -> None:
        write(self, reports)
        if found.stop:
            found.stop = False
            raise KeyboardInterrupt

    monkeypatch.setattr("bitdial.recipes.calibration.calibrate", watched)
    monkeypatch.setattr(Checkpoint, "write", stopping)
    return found


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bit for bit comparisons need one thread count; tiny tensors gain nothing from more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What asks for a GPU, processes of this one included, finds none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """torch.compile without what was compiled before, and nothing left behind."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # on a GPU this imports modules of torch that warn
        torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@dataclasses.dataclass
class TinyLanguage:
    """A folder with a Llama of two blocks, random weights and a tokenizer of its own; a text beside it."""

    model: Path
    text: Path


@pytest.fixture(scope="session")
def tiny_language(tmp_path_factory: pytest.TempPathFactory) -> TinyLanguage:
    """Made once for all tests of a process; none may write there."""
    transformers = pytest.importorskip("transformers", minversion="5")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    place = tmp_path_factory.mktemp("language")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        words = ["the", "cat", "sat", "on", "a", "mat", "and", "one", "dog", "ran", "to", "it"]
        drawn = torch.randint(len(words), (200, 12)).tolist()
        text = "".join(" ".join(words[i] for i in line) + ".\n" for line in drawn)
        (place / "text.txt").write_text(text)
        core = Tokenizer(models.BPE())
        core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer = trainers.BpeTrainer(vocab_size=64, special_tokens=["<end>"], show_progress=False)
        core.train_from_iterator([text], trainer)
        transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(place / "llama")
        config = transformers.LlamaConfig(
            hidden_size=32, num_hidden_layers=2, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=64, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
        )  # fmt: skip
        transformers.logging.disable_progress_bar()
        transformers.LlamaForCausalLM(config).save_pretrained(place / "llama")
    return TinyLanguage(place / "llama", place / "text.txt")
