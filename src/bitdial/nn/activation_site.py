"""A place between layers where a tensor is quantised: it has scales of its own, and goes by the bits of a layer."""

from torch import Tensor, nn

from bitdial.nn.quantizers import ActivationQuantizer


class ActivationSite(nn.Module):
    """Fake-quantises what passes, at the activation bits of the layer named `follows`.

    Only `set_bits` changes `act_bits`. Plans do not name it: it has the bits of its layer.
    """

    follows_activations = True  # `set_bits` gives it the activation bits of its layer, where norms take the weight bits

    def __init__(self, quantizer: ActivationQuantizer, *, bit_choices: tuple[int, ...], follows: str):
        super().__init__()
        self.quantizer, self.bit_choices, self.follows = quantizer, bit_choices, follows
        self.select_set(bit_choices[0])

    def select_set(self, bits: int, fed_bits: int | None = None) -> None:
        """Change the width in use."""
        self.act_bits = bits

    def active_scale(self) -> Tensor:
        """The learned scale (1,) of the width in use."""
        return self.quantizer.scales[str(self.act_bits)]

    def forward(self, x: Tensor) -> Tensor:
        """Quantise `x` at the width in use, then dequantise it."""
        values: Tensor = self.quantizer(x, self.act_bits)
        return values

    def extra_repr(self) -> str:
        return f"follows={self.follows!r}"
