"""Documents: the blocks that are computed are those of a mask, and all ranks' pairs together those within documents."""

import pytest
import torch

from common.model import attend
from services.run import plugins
from step05_cp_ring import CONTEXT
from variants.documents import MicroBatch, segments

END = 0
plugins()  # fills CONTEXT


@pytest.mark.parametrize("mode", ["zigzag", "ring", "allgather"])
def test_visits_each_pair_within_a_document_once(mode):
    """sum L (L+1) / 2 pairs, no matter how the sequence is cut; and they are the right ones."""
    n, seq = 3, 36
    tokens = torch.randint(0, 5, (2, seq), generator=torch.Generator().manual_seed(0))
    batch = MicroBatch(tokens, END, lambda rank: CONTEXT[mode].positions(seq, rank, n))
    seen = torch.zeros(2, seq, seq)
    for rank in range(n):
        batch.found.clear()
        for source in range(n):
            mine, theirs = (CONTEXT[mode].positions(seq, r, n) for r in (rank, source))
            for (rows, _, q), (_, _, k), causal in batch.visible(rank, source, seq // n):
                block = torch.ones(q.stop - q.start, k.stop - k.start)
                pairs = torch.zeros(seq, seq)
                pairs[mine[q][:, None], theirs[k]] = block.tril() if causal else block
                seen[rows] += pairs
    numbers = batch.numbers
    within = (numbers[:, :, None] == numbers[:, None, :]) & torch.ones(seq, seq, dtype=torch.bool).tril()
    assert torch.equal(seen, within.float())
    assert seen.sum() == sum(length * (length + 1) // 2 for length in batch.lengths)


def test_whole_sequences_equal_a_mask():
    """Document by document is attention with the mask that nobody makes."""
    tokens = torch.tensor([[1, 2, END, 3, 4, 5, END, 6], [END, 1, END, END, 2, 3, 4, 5]])
    batch = MicroBatch(tokens, END, lambda rank: torch.arange(8))
    q, k, v = torch.randn(3, 2, 8, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    parts = (x.flatten(0, 1)[None].split(batch.lengths, 1) for x in (q, k, v))
    ours = torch.cat([attend(*document) for document in zip(*parts, strict=True)], 1).view(q.shape)
    same = batch.numbers[:, :, None] == batch.numbers[:, None, :]
    mask = (same & torch.ones(8, 8, dtype=torch.bool).tril())[:, None]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    assert (ours - right).abs().max() < 1e-14
    assert [run[3] for run in segments(batch.numbers[0], torch.arange(8))] == [0, 1, 2]
