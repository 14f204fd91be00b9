"""One kind of file made of the other: with all widths in one, or in parts. No model is needed."""

import os
from pathlib import Path

from bitdial.artifact.parts import Layout, write_tensors
from bitdial.artifact.read import read_artifact
from bitdial.errors import ArtifactError, BitdialError


def repack(path: str | os.PathLike[str], out: str | os.PathLike[str], *, progressive: bool = True) -> str:
    """Write the artifact at `path` to `out` as a progressive file, or as a whole one; returns the new digest.

    Both hold the same: codes, scales, norms and manifest stay bit for bit, and there and back gives the same file. A
    progressive file is for schemes whose low codes are prefixes, such as 'nested'. What was written is read back and
    compared before it takes its name.
    """
    artifact = read_artifact(path)
    manifest = artifact.manifest

    def check(written: Path) -> None:
        found = read_artifact(written)
        same = found.manifest == manifest and found.tensors.keys() == artifact.tensors.keys()
        if not same or not all(tensor.equal(found.tensors[name]) for name, tensor in artifact.tensors.items()):
            raise ArtifactError(f"{out} was not written, since it would not hold what {path} does")

    try:
        return write_tensors(out, artifact.tensors, manifest, Layout(manifest) if progressive else None, check)
    except BitdialError as problem:
        raise ArtifactError(f"{path}: {problem}") from problem
