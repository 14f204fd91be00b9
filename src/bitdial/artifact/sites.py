"""Quantizers that belong to no layer, in a file: those in front of the products of an attention."""

from torch import nn

from bitdial.artifact.format import Artifact
from bitdial.errors import ArtifactError
from bitdial.nn.attention import SITES
from bitdial.nn.decompose import MULTIHEAD_ATTENTION

FIELDS = ("follows", "kind")


def check_sites(artifact: Artifact) -> None:
    """Raise ArtifactError unless the table of sites is right: all four of an attention, each with a layer to follow."""
    sites, decomposed = artifact.sites, artifact.manifest.get("decomposed", {})
    for name, entry in sites.items():
        attention, _, part = name.rpartition(".")
        if part not in SITES or decomposed.get(attention) != MULTIHEAD_ATTENTION.name:
            raise ArtifactError(
                f"site {name!r}: it is not one of {', '.join(SITES)} of an attention that is taken apart"
            )
        if not isinstance(entry, dict) or set(entry) != {*FIELDS}:
            raise ArtifactError(f"site {name!r}: it is no JSON object of {', '.join(FIELDS)}")
        if entry["kind"] != SITES[part]:
            raise ArtifactError(f"site {name!r}: its kind is {entry['kind']!r}, expected {SITES[part]!r}")
        follows = entry["follows"]
        if not isinstance(follows, str) or artifact.layers.get(follows, {}).get("activations", "float") == "float":
            raise ArtifactError(f"site {name!r}: it follows {follows!r}, which is no layer with quantised activations")
        if missing := [other for other in SITES if f"{attention}.{other}" not in sites]:
            raise ArtifactError(f"site {name!r}: the attention has no {missing[0]}; it needs {', '.join(SITES)}")


def sites_there(artifact: Artifact, model: nn.Module) -> list[nn.Module]:
    """The sites that the file speaks of and `model` has already: all of a prepared model, none of a float one."""
    places = (name.rpartition(".") for name in artifact.sites)
    found = (model.get_submodule(attention)._modules[part] for attention, _, part in places)
    return [site for site in found if site is not None]
