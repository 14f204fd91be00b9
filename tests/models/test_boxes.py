"""Boxes against their definitions."""

import torch

from bitdial.models.boxes import crop, overlaps, paste, suppress


def test_overlaps_are_shared_areas() -> None:
    boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0], [2.0, 2.0, 6.0, 6.0], [5.0, 0.0, 6.0, 1.0]])
    found = overlaps(boxes, boxes)
    expected = torch.tensor([[1.0, 4 / 28, 0.0], [4 / 28, 1.0, 0.0], [0.0, 0.0, 1.0]])
    torch.testing.assert_close(found, expected)
    assert overlaps(boxes[:0], boxes).shape == (0, 3)


def test_the_better_of_two_of_one_label_stays() -> None:
    boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0], [0.0, 0.0, 4.0, 5.0], [0.0, 0.0, 4.0, 4.0], [9.0, 9.0, 10.0, 10.0]])
    scores, labels = torch.tensor([0.5, 0.9, 0.7, 0.1]), torch.tensor([1, 1, 2, 1])
    assert suppress(boxes, scores, labels, 0.5).tolist() == [1, 2, 3]
    assert suppress(boxes, scores, labels, 0.99).tolist() == [1, 2, 0, 3]
    assert suppress(boxes[:0], scores[:0], labels[:0], 0.5).tolist() == []


def test_a_crop_of_whole_pixels_is_those_pixels() -> None:
    features = torch.randn(2, 3, 6, 8)
    boxes, of = torch.tensor([[2.0, 1.0, 6.0, 5.0], [0.0, 0.0, 4.0, 4.0], [4.0, 2.0, 8.0, 6.0]]), torch.tensor([1, 0, 1])
    found = crop(features, boxes, of, 4)
    expected = torch.stack([features[1, :, 1:5, 2:6], features[0, :, :4, :4], features[1, :, 2:6, 4:8]])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert crop(features, boxes[:0], of[:0], 4).shape == (0, 3, 4, 4)


def test_a_mask_goes_back_into_its_box() -> None:
    mask = torch.rand(1, 1, 4, 4)
    found = paste(mask, torch.tensor([[2.0, 1.0, 6.0, 5.0]]), (7, 9))
    expected = torch.zeros(1, 1, 7, 9)
    expected[:, :, 1:5, 2:6] = mask
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert paste(mask[:0], torch.zeros(0, 4), (7, 9)).shape == (0, 1, 7, 9)
