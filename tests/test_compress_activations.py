"""Messages of activations: with nothing rounded they equal one process; rounded, a value is off by a known part."""

import pytest
import torch

from tests import equal
from variants.compress_activations import BLOCK, KINDS, Bits

SGD = dict(optimizer="sgd", lr=0.5)
LAYOUTS = {
    "sp": ("step04_tp_sp", dict(tp=2, tp_overlap=True)),
    "no-sp": ("step04_tp_sp", dict(tp=2, sp=False)),
    "pp": ("step06_pipeline", dict(pp=2, schedule="afab")),
}


def exactly(step: str, options: dict, file: str) -> float:
    """Runs on every rank: what is called bf16 has 64 bits."""
    KINDS["bf16"] = torch.float64
    try:
        return equal.on_rank(step, options | dict(compress_activations="bf16"), file)
    finally:
        KINDS["bf16"] = torch.bfloat16


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_one_process_if_nothing_is_lost(pools, tmp_path, name):
    """So the messages go where they should."""
    step, layout = LAYOUTS[name]
    pools(1).run(equal.save_record, "step01_single_gpu", SGD, str(tmp_path / "one.pt"))
    pools(2).run(exactly, step, SGD | layout, str(tmp_path / "one.pt"))


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
