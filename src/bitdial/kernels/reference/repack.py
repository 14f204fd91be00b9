"""Packed words of all layers brought to other widths, in plain PyTorch, layer by layer."""

from bitdial import functional as bf
from bitdial.kernels.repack import RepackRule, RepackTables
from bitdial.kernels.word_layout import pack_words, packed_fields, unpack_words, words_shape


def repack_(tables: RepackTables, rule: RepackRule) -> None:
    """Write the words of each layer's `bits` into `active` where `held` says that other ones are there, in place."""
    master, active, blocks, layers, bits, held = tables
    high, _, scheme, ties = rule
    for layer in {int(owner) for (owner, _), b in zip(blocks, held, strict=True) if b != bits[int(owner)]}:
        (begin, target, count, stride), low = layers[layer].tolist(), int(bits[layer])
        shape = words_shape(packed_fields(high), 16, count * 2)  # any shape of as many tiles does
        words = master[begin : begin + high * count].view(shape)
        codes = unpack_words(words, packed_fields(high), high, 16, count * 2)
        codes = bf.narrow(codes, high=high, low=low, scheme=scheme, ties=ties)
        planes = active.as_strided((low, count), (stride, 1), active.storage_offset() + target)
        planes.copy_(pack_words(codes, packed_fields(low)).view(low, count))
    held.copy_(bits[blocks[:, 0].long()])
