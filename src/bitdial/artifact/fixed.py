"""Layers with a width of their own, in a file: the key `fixed_bits` of a layer's entry."""

from bitdial.artifact.format import Artifact
from bitdial.errors import ArtifactError


def check_fixed_bits(artifact: Artifact) -> None:
    """Raise ArtifactError unless each such width is one of the file's, and that of all layers on the same weight."""
    for name, entry in artifact.layers.items():
        bits, owner = entry.get("fixed_bits"), artifact.owner(name)
        if "fixed_bits" in entry and bits not in artifact.bit_choices:
            raise ArtifactError(
                f"layer {name!r}: fixed_bits={bits!r} is not one of the file's widths {artifact.bit_choices}"
            )
        if (other := artifact.layers[owner].get("fixed_bits")) != bits:
            raise ArtifactError(
                f"layer {name!r}: fixed_bits is {bits!r}, and {other!r} for {owner!r}, which it is tied to; layers on "
                "one weight have the same"
            )
