"""Where commands write: looked at before any work, and kept to one process meanwhile."""

import argparse
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from bitdial.errors import ConfigError
from bitdial.files.atomic import check_folder, check_target
from bitdial.files.lock import sole_writer

ARTIFACT = "the artifact"
FOLDERS = ("--hf", "--compressed-tensors")
EXAMPLES = {"--onnx": "model.onnx", "--gguf": "model.gguf"}


@contextmanager
def writing(options: argparse.Namespace, places: Mapping[str, Path | None]) -> Iterator[None]:
    """Keep what a command is to write, by option (or ARTIFACT) and not None, to this process; FOLDERS are folders.

    ConfigError if one of them cannot be written, if two are one file, or if another process writes one of them.
    """
    wanted = {name: path for name, path in places.items() if path is not None}
    known = {ARTIFACT: options.file} if "file" in options else {}
    for name, path in wanted.items():
        if name in FOLDERS:
            check_folder(name, path)
        else:
            check_target(name, path, EXAMPLES.get(name, "file.json"))
        for other, there in (known | wanted).items():
            if other != name and path.resolve() == there.resolve():
                raise ConfigError(f"{name} {path}: this is {other} too; choose another place")
    with ExitStack() as stack:
        for path in wanted.values():
            stack.enter_context(sole_writer(path, work=options.command))
        yield
