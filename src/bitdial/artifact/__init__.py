"""The artifact: one file that holds a trained model at its highest width, and all that is needed to narrow it.

docs/artifact-format.md is the specification. Reading never runs code from the file and trusts nothing in it.
"""

from bitdial.artifact.amend import amend
from bitdial.artifact.description import describe
from bitdial.artifact.fit import fit
from bitdial.artifact.format import FLOAT, Artifact, float_state, layer_table_entry, norm_table_entry
from bitdial.artifact.graph import check_same_graph
from bitdial.artifact.parts import file_parts
from bitdial.artifact.read import read_artifact
from bitdial.artifact.repacking import repack
from bitdial.artifact.sizes import sizes
from bitdial.artifact.write import save

__all__ = [
    "FLOAT",
    "Artifact",
    "amend",
    "check_same_graph",
    "describe",
    "file_parts",
    "fit",
    "float_state",
    "layer_table_entry",
    "norm_table_entry",
    "read_artifact",
    "repack",
    "save",
    "sizes",
]
