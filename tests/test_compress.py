"""Compressed sums of gradients: what is lost is late, not gone, and the bytes are what the file says."""

from types import SimpleNamespace

import pytest
import torch

from common import comm
from common.comm import Mesh
from variants.compress import Chain, Compression

WORDS = {"bf16": 2, "int8": 260 / 256, "topk": 8 * 0.25}  # bytes that are sent of a number
KINDS = ["bf16", "int8", "topk"]


def sums_on_rank(kind: str, whole: bool) -> tuple[float, float, float]:
    """Five sums of random gradients, fp32 [3000], `whole` or cut.

    Returns how much of the true sum is missing, with and without what all ranks owe, and the bytes sent in one sum.
    """
    mesh, sent = Mesh(dp=torch.distributed.get_world_size()), []
    group, found, added, length = mesh["dp"], 0.0, 0.0, 3000
    compression = Compression(SimpleNamespace(compress=kind, topk_fraction=0.25))
    key = type("Part", (), dict(group=group))()  # a bucket, or a unit
    comm.observer = lambda _operation, _group, tensor, share: sent.append(share * tensor.nbytes)
    for step in range(5):
        everyone = [
            torch.randn(length, generator=torch.Generator().manual_seed(step * 10 + r)) for r in range(group.size)
        ]
        key.flat = key.gradient = everyone[group.rank].clone()
        Chain((compression.all_reduce if whole else compression.reduce_scatter)(key)).wait()
        part = length // group.size
        mine = slice(0, length) if whole else slice(group.rank * part, group.rank * part + part)
        found = found + (key.flat if whole else key.total)
        added = added + sum(everyone)[mine]
    comm.observer = None
    owed = compression.owed[key].clone().view(-1)
    torch.distributed.all_reduce(owed)
    return (found + owed[mine] - added).abs().max().item(), (found - added).abs().max().item(), sum(sent) / 5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("whole", [True, False])
def test_what_is_lost_is_owed(pools, kind, whole):
    """All that has arrived, and all that is owed, make up all that was to be summed; most has arrived."""
    for with_debt, without, n_bytes in pools(3).run(sums_on_rank, kind, whole):
        assert with_debt < 1e-4
        assert 1e-4 < without < {"bf16": 0.1, "int8": 0.3, "topk": 20.0}[kind]
        padded = 3072 if kind == "int8" else 3000  # three slices in whole blocks
        assert n_bytes == pytest.approx((1 + whole) * 2 / 3 * padded * WORDS[kind])
