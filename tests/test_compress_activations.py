"""Messages of activations are off by a known part. With nothing rounded, rows of the table equal one process."""

import pytest
import torch

from variants.compress_activations import BLOCK, Bits


@pytest.mark.parametrize("dim", [8, BLOCK, BLOCK + 44])
def test_rounds_to_a_part_of_the_largest(dim):
    """int8: at most 1/254 of the largest of a block; zero stays zero."""
    bits, x = Bits("int8", torch.float32, dim), torch.randn(3, 5, dim, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 0
    message = bits.pack(x)
    assert message.dtype == torch.int8 and message.shape == (3, 5, bits.width)
    off = (bits.unpack(message, torch.float32) - x).abs()
    for some, largest in zip(off.split(BLOCK, -1), x.abs().split(BLOCK, -1), strict=True):
        assert (some.amax(-1) <= largest.amax(-1) / 253).all()
