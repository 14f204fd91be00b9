"""What GGUF calls the tensors and sizes of a language model, for the architectures that are known here.

llama.cpp turns coordinates of a Llama's head in neighbouring pairs, transformers those that lie half a head apart: rows
of queries and keys go in another order. Gemma's norms multiply by 1 + weight in transformers, and by the weight in
llama.cpp.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from bitdial.errors import ExportError

HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture that llama.cpp computes as transformers does.

    name            GGUF's
    activation      that it computes between the products of a block's MLP
    turns_pairs     whether rows of queries and keys go in another order
    adds_to_norms   what the weights of norms lack
    always_tied     whether the head is the embedding, in any file
    any_head_size   whether heads times their size may be other than the hidden size
    """

    name: str
    activation: str
    turns_pairs: bool = False
    adds_to_norms: float = 0.0
    always_tied: bool = False
    any_head_size: bool = True


# By transformers' model_type.
ARCHITECTURES = {
    "llama": Architecture(name="llama", activation="silu", turns_pairs=True),
    "qwen2": Architecture(name="qwen2", activation="silu", any_head_size=False),
    "gemma": Architecture(name="gemma", activation="gelu_pytorch_tanh", adds_to_norms=1.0, always_tied=True),
}


def check_type(model_type: object) -> None:
    """Raise ExportError unless it is one of ARCHITECTURES."""
    if model_type not in ARCHITECTURES:
        raise ExportError(
            f"model_type {model_type!r}: how GGUF names its tensors and orders their rows is not known here; "
            f"{', '.join(ARCHITECTURES)} are, and export --hf takes any model"
        )


class NamedModel:
    """A live model of a known architecture: the names of its tensors in GGUF, and the order of their rows."""

    def __init__(self, live: nn.Module):
        from gguf import MODEL_ARCH, get_tensor_name_map

        self.live = live
        self.config: Any = cast(Any, live).config
        check_type(self.config.model_type)
        self.architecture = ARCHITECTURES[self.config.model_type]
        self._names = get_tensor_name_map(MODEL_ARCH[self.architecture.name.upper()], self.config.num_hidden_layers)
        self._check()

    @property
    def head_size(self) -> int:
        """Coordinates of a head."""
        return int(getattr(self.config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads)

    def name(self, name: str) -> str:
        """GGUF's name of the tensor that transformers calls `name`."""
        found = self._names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ExportError(f"the tensor {name!r} has no name in GGUF's {self.architecture.name}; export --hf has it")
        return str(found)

    def order(self, name: str, rows: int) -> Tensor | slice:
        """Which of ours each row of a tensor is in GGUF."""
        heads = HEADS.get(name.split(".")[-2])
        if heads is None or not self.architecture.turns_pairs:
            return slice(None)
        return torch.arange(rows).view(getattr(self.config, heads), 2, -1).transpose(1, 2).reshape(-1)

    def adjusted(self, name: str, tensor: Tensor) -> Tensor:
        """A float tensor as GGUF has it."""
        if name.endswith("norm.weight"):
            return tensor.float() + self.architecture.adds_to_norms
        return tensor[self.order(name, len(tensor))]

    def rope_factors(self) -> Tensor | None:
        """By how much each frequency of the positions is divided, where the file has to say so for each."""
        if self.config.rope_parameters["rope_type"] != "llama3":
            return None
        exponents = torch.arange(0, self.head_size, 2, dtype=torch.int64).float() / self.head_size
        plain = 1.0 / self.config.rope_parameters["rope_theta"] ** exponents
        return plain / self.live.get_submodule("model.rotary_emb").get_buffer("inv_freq").float()

    def describe(self, writer: Any) -> None:
        """Put sizes and settings into GGUF's `writer`."""
        from gguf import RopeScalingType

        config = self.config
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(config.max_position_embeddings)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(self.head_size)
        writer.add_value_length(self.head_size)
        writer.add_rope_dimension_count(self.head_size)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_vocab_size(config.vocab_size)
        if config.rope_parameters["rope_type"] == "linear":
            writer.add_rope_scaling_type(RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(config.rope_parameters["factor"])

    def _check(self) -> None:
        """Refuse settings under which llama.cpp would compute something else."""
        config, known = self.config, self.architecture
        rope = config.rope_parameters
        wrong = {
            f"hidden_act={config.hidden_act!r}": config.hidden_act != known.activation,
            f"rope_type={rope['rope_type']!r}": rope["rope_type"] not in ("default", "linear", "llama3"),
            f"partial_rotary_factor={rope.get('partial_rotary_factor')}": rope.get("partial_rotary_factor", 1) != 1,
            "use_sliding_window=True": getattr(config, "use_sliding_window", False),
            "use_bidirectional_attention": getattr(config, "use_bidirectional_attention", False),
            "tie_word_embeddings=False": known.always_tied and not config.tie_word_embeddings,
            f"head_dim={self.head_size}": not known.any_head_size
            and self.head_size * config.num_attention_heads != config.hidden_size,
        }
        for setting, found in wrong.items():
            if found:
                raise ExportError(f"config.json: llama.cpp's {known.name} has no {setting}; export --hf keeps it")
