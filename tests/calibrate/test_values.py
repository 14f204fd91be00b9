import torch
from torch import Tensor, fx

from bitdial import set_bits
from bitdial.calibrate.steps import step_blocks
from bitdial.calibrate.values import SteppedValues, Values
from bitdial.calibrate.walk import Walk

from .conftest import images, mobile, prepared


def leave(name: str, inputs: list[Tensor]) -> None:
    pass


def test_blocks_one_after_the_other_give_the_model() -> None:
    x, model = images(12), prepared(mobile())
    walk = Walk(model, list(x.split(5)))
    set_bits(model, 4)
    values, seen = walk.start(), []
    for block in walk.blocks:
        before = values.copy()
        values.advance(model, block, lambda name, inputs: seen.append((name, len(inputs))))
        assert all(set(batch) == set(block.gives) for batch in values.batches)
        for node in block.reads:
            assert all(node in batch for batch in before.batches)
    out = torch.cat([batch[walk.blocks[-1].made[-1]] for batch in values.batches])
    torch.testing.assert_close(out, torch.cat([model(b) for b in x.split(5)]), rtol=0, atol=0)
    assert seen == [(name, 3) for block in walk.blocks for name in block.norms]


def test_weights_are_quantised_once_for_all_batches() -> None:
    x, model = images(12), prepared(mobile())
    walk = Walk(model, list(x.split(5)))
    block = walk.blocks[0]
    quantizers = [model.get_submodule(name).weight_quantizer for name in block.layers]
    calls: list[int] = []
    for quantizer in quantizers:
        quantizer.register_forward_hook(lambda module, args, out: calls.append(args[1]))
    values = walk.start()
    for bits in (8, 4):
        set_bits(model, bits)
        values.copy().advance(model, block, leave)
    assert sorted(calls) == [4] * len(quantizers) + [8] * len(quantizers)
    calls.clear()
    model(x)
    model(x)
    assert len(calls) == 2 * len(quantizers), "afterwards they are quantised as ever"


def test_samples_are_taken_over_all_batches() -> None:
    x, model = images(12), prepared(mobile())
    walk = Walk(model, list(x.split(5)))
    values = walk.start()
    (start,) = [node for node in walk.blocks[0].nodes if node.op == "placeholder"]
    assert values.is_mixable([start])
    chosen = torch.tensor([11, 0, 6])
    assert torch.equal(values.take([start], chosen)[start], x[chosen])
    taken = values.take([start], 2)[start]
    assert torch.equal(taken, x[10:])
    taken.zero_()  # a copy: what a block does in place does not come back
    assert torch.equal(values.batches[2][start], x[10:])
    values.batches[1][start] = torch.zeros(5, 3, 4, 4)
    assert not values.is_mixable([start])


def test_the_distance_is_relative() -> None:
    x, model = images(8), prepared(mobile())
    walk = Walk(model, [x])
    plain, other = walk.start(), walk.start()
    for block in walk.blocks[:1]:
        plain.advance(model, block, leave)
        other.advance(model, block, leave)
    (node,) = walk.blocks[0].made
    assert other.distance(plain, walk.blocks[0]) == 0
    other.batches[0][node] = plain.batches[0][node] * 1.1
    assert abs(other.distance(plain, walk.blocks[0]) - 0.01) < 1e-6
    plain.batches[0][node] = huge = torch.randn(8, 64, 4, 4, generator=torch.Generator().manual_seed(0))
    huge[0, :, 0, 0] *= 40
    other.batches[0][node] = huge.clamp(-5, 5)
    assert other.distance(plain, walk.blocks[0]) > 0.7
    plain.weigh(walk.blocks[0], 2)
    assert other.distance(plain, walk.blocks[0]) < 0.35, "one position of 128"
    plain.batches[0][node] = other.batches[0][node] = None
    assert other.distance(plain, walk.blocks[0]) == 0, "nothing that can be compared"


def test_without_a_graph_inputs_are_found_by_running_the_model() -> None:
    x, model = images(8), prepared(mobile())
    (block,) = step_blocks({"second.filter.0": model.get_submodule("second.filter.0")}, [], {}).blocks
    values = SteppedValues(list(x.split(4)))
    values.enter(model, block)
    wanted: list[Tensor] = []
    model.get_submodule(block.name).register_forward_pre_hook(lambda m, args: wanted.append(args[0]))
    model(x[:4])
    assert torch.equal(values.batches[0][block.reads[0]], wanted[0])
    values.advance(model, block, leave)
    assert list(values.batches[0]) == list(block.gives)


def test_what_is_the_same_for_all_samples_does_not_keep_batches_apart() -> None:
    graph = fx.Graph()
    hidden, mask, angles = (graph.placeholder(name) for name in ("hidden", "mask", "angles"))
    x, table = torch.randn(5, 3), torch.randn(1, 3)
    batches = [{hidden: part, mask: None, angles: (table.clone(), "left")} for part in x.split(3)]
    values = Values(batches)
    assert values.is_mixable([hidden, mask, angles])
    taken = values.take([hidden, mask, angles], torch.tensor([4, 1]))
    assert torch.equal(taken[hidden], x[[4, 1]])
    assert taken[mask] is None
    assert torch.equal(taken[angles][0], table)
    for other in ((table + 1, "left"), (table, "right"), (table,)):
        values = Values([batches[0], {**batches[1], angles: other}])
        assert not values.is_mixable([hidden, mask, angles])
    each = [{**batch, angles: (table.expand(len(batch[hidden]), 3),)} for batch in batches]
    assert not Values(each).is_mixable([hidden, angles]), "one for each sample, out of reach"
