import torch
from torch import nn

from bitdial.calibrate import input_rows as module
from bitdial.calibrate.input_rows import ROWS, held_back, input_rows
from bitdial.nn.layer_kinds import kind_of

LAYERS = (
    (nn.Linear(5, 4), (2, 7, 5)),
    (nn.Conv1d(4, 8, 5, groups=4), (2, 4, 11)),
    (nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (3, 4, 9, 8)),
    (nn.Conv2d(4, 6, (3, 2), padding="same", dilation=2, padding_mode="reflect"), (3, 4, 9, 8)),
    (nn.Conv2d(4, 4, (1, 3), stride=(1, 2), dilation=(1, 2), padding=(0, 1), groups=4), (2, 4, 5, 9)),
    (nn.Conv3d(2, 3, 2, padding=(1, 0, 1)), (2, 2, 4, 5, 6)),
)


def test_rows_times_weights_are_the_outputs() -> None:
    for layer, shape in LAYERS:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        kind = kind_of(layer)
        assert kind is not None
        rows = input_rows(kind, layer, [x], seed=0)
        weight = layer.weight.reshape(len(rows), -1, rows.shape[2])
        found = (rows @ weight.transpose(1, 2)).transpose(0, 1).flatten(1) + layer.bias
        wanted = layer(x) if kind.image_dims == 0 else layer(x).movedim(1, -1)
        torch.testing.assert_close(found, wanted.reshape(-1, wanted.shape[-1]), rtol=1e-4, atol=1e-5)


def test_some_outputs_are_drawn_the_same_for_each_setting(monkeypatch) -> None:
    monkeypatch.setattr(module, "LEAST_ROWS", 20)
    monkeypatch.setattr(module, "ROWS_PER_INPUT", 1)
    layer = nn.Conv2d(2, 3, 3)
    kind = kind_of(layer)
    assert kind is not None
    batches = [torch.randn(4, 2, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(2)]
    rows = input_rows(kind, layer, batches, seed=3)
    assert rows.shape == (1, 20, 18)
    assert torch.equal(2 * rows, input_rows(kind, layer, [2 * x for x in batches], seed=3))
    assert not torch.equal(rows, input_rows(kind, layer, batches, seed=4))


def test_kinds_without_rows_are_left_out() -> None:
    assert {kind.name for kind in ROWS} == {"Linear", "Conv1d", "Conv2d", "Conv3d"}


def test_a_window_of_huge_values_counts_as_others_do() -> None:
    rows = torch.randn(2, 400, 9, generator=torch.Generator().manual_seed(0))
    rows[:, 7] *= 40
    held = held_back(rows, rows, images=True)
    own = (held.square() / rows.square().mean(dim=1, keepdim=True)).mean(dim=(0, 2))
    assert abs(float(own[7]) - module.MOST_ENERGY) < 1e-3
    others = torch.arange(400) != 7
    assert torch.equal(held[:, others], rows[:, others])
    assert torch.equal(held_back(rows[:, :, :1] * 2, rows, images=True), held[:, :, :1] * 2), "as in float"


def test_a_token_of_huge_values_in_one_channel_counts_as_others_do() -> None:
    rows = torch.randn(1, 400, 64, generator=torch.Generator().manual_seed(0))
    rows[:, 7, 3] = 500
    held = held_back(rows, rows, images=False)
    energy = held.square().sum(dim=2)[0]
    assert abs(float(energy[7] / energy.median()) - module.MOST_TOKEN_ENERGY) < 0.1
    others = torch.arange(400) != 7
    assert torch.equal(held[:, others], rows[:, others])
    assert torch.equal(held_back(rows * 2, rows, images=False), held * 2), "as in float"
    assert not held_back(torch.zeros(1, 4, 3), torch.zeros(1, 4, 3), images=False).any()
    sparse = torch.zeros(1, 9, 3)
    sparse[0, 0] = 1
    assert torch.isfinite(held_back(sparse, sparse, images=False)).all()
