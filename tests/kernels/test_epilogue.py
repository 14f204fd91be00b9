"""The record of an epilogue: memory for what is asked for, residuals in the layout of outputs."""

import pytest
import torch

from bitdial.kernels.epilogue import Epilogue, filled


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (6, 3), (2, 6, 3)])
def test_outputs_are_what_is_asked_for(shape: tuple[int, ...]) -> None:
    numbers, device = torch.zeros(5), torch.device("cpu")
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    for a in (None, numbers):
        for b in (None, numbers):
            for keep in (False, True):
                epilogue = Epilogue(quantizer_a=a, quantizer_b=b, keep_value=keep)
                outputs = epilogue.outputs(shape, device)
                assert [out is not None for out in outputs] == [keep, a is not None, b is not None]
                for out, dtype in zip(filled(outputs, device), (torch.float32, torch.int8, torch.int8), strict=True):
                    assert out.dtype == dtype
                    assert out.shape in (shape, (0,))
                    assert not out.numel() or out.is_contiguous(memory_format=layout)


def test_a_residual_is_arranged_as_outputs_are() -> None:
    residual = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    arranged = Epilogue(residual=residual, relu_max=6.0).arranged((2, 3, 4, 5))
    assert arranged.residual is not None
    assert torch.equal(arranged.residual, residual)
    assert arranged.residual.is_contiguous(memory_format=torch.channels_last)
    assert arranged.relu_max == 6.0
    nothing = Epilogue()
    assert nothing.arranged((9, 9)) is nothing
    with pytest.raises(AssertionError, match="of other shapes"):
        Epilogue(residual=residual).arranged((2, 3, 4, 6))
