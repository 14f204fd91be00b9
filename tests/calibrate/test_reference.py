import torch

from bitdial import set_bits
from bitdial.calibrate.reference import float_copy

from .conftest import images, mobile, prepared


def test_the_float_copy_computes_what_the_float_model_does() -> None:
    model, x = mobile(), images(4)
    quantised = prepared(model)
    plain = float_copy(quantised)
    assert torch.equal(plain(x), model(x))
    set_bits(quantised, 3)
    assert torch.equal(float_copy(quantised)(x), model(x))
    assert set(plain.state_dict()) == set(model.state_dict())
    assert not any(parameter.requires_grad for parameter in plain.parameters())
    # It has tensors of its own.
    with torch.no_grad():
        for parameter in quantised.parameters():
            parameter.zero_()
    assert torch.equal(plain(x), model(x))
