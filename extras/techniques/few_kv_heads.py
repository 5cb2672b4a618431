"""More --tp ranks than key/value heads: neighbours hold the same head.

With grouped-query attention (GQA) several query heads share one key/value head, so a model may have
fewer key/value heads than --tp has ranks. If tp is a multiple of their number, each of them is on
several neighbouring ranks, which have different query heads of its group:

    tp = 4, 2 key/value heads    rank 0   rank 1   rank 2   rank 3     groups of ranks
    query heads                  0 1      2 3      4 5      6 7
    key/value head               0        0        1        1          "kv parts"     0 2, 1 3
                                                                       "kv copies"    0 1, 2 3

k_proj and v_proj are sharded over "kv parts", so that a rank holds one head of each. A rank
computes only those terms of their gradients that come from its own queries. So the gradients are
partial, and step 4 sums them over "kv copies". The two groups replace tp in the records of k_proj
and v_proj, so that sums, global norm and checkpoints need no special case.

THE LAW. With c = tp / kv heads copies, k_proj and v_proj take c times the memory of equal shards,
and their gradients are all-reduced once a step: 2 (c-1)/c S, S the bytes of a rank's part. For tiny
with tp 8 (4 key/value heads of 16 channels, 4 layers): S = 4 x 2 x 16 x 128 x 4 bytes = 65,536, c =
2.

There is no flag: step 4's PLAN has a rule for each matrix, and here k_proj and v_proj get another.

Source: Ainslie et al. 2023, "GQA" (the heads); the rule is Megatron-LM's.

Run it:    torchrun --nproc_per_node=4 -m extras step04_tp_sp.py --tp 4 --model debug
"""

from torch import nn

from common.comm import Mesh
from common.layout import note_record
from common.model import ModelConfig
from step04_tp_sp import PLAN, by_heads, shard_param


def copied_heads(weight: nn.Parameter, mesh: Mesh, config: ModelConfig) -> nn.Parameter:
    """Shard k_proj or v_proj [kv_heads x head_dim, dim] to one head, if tp is a multiple of the
    key/value heads, and divides the query heads; else as step 4 does.
    """
    tp = mesh["tp"].size
    n_heads = config.n_kv_heads
    if tp % n_heads or config.n_heads % tp:
        return by_heads(weight, mesh, config)
    ranks = mesh.rows("tp").reshape(-1, n_heads, tp // n_heads)
    mesh.add_groups("kv copies", ranks.reshape(-1, tp // n_heads), queue="gradients")
    mesh.add_groups("kv parts", ranks.swapaxes(1, 2).reshape(-1, n_heads), queue="gradients")
    part = shard_param(weight, 0, mesh["kv parts"])
    note_record(part, partial_over="kv copies")
    return part


PLAN["k_proj"] = copied_heads
PLAN["v_proj"] = copied_heads
