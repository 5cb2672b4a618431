"""ZeRO in groups of dp / R ranks (`--zero 3+replicas --replicas R`): hybrid sharding, HSDP.

If weights are sharded over all ranks of dp, each all-gather waits for the slowest link. With R
replicas, dp / R neighbours (the GPUs of one machine, say) shard and gather the weights among
themselves, and R ranks hold the same shard:

                                 "shard" ->
    dp = 4, R = 2    "replicas"  rank 0: shard 0    rank 1: shard 1
                        |        rank 2: shard 0    rank 3: shard 1

    all-gather, reduce-scatter   over "shard"       as in step 3, on dp / R ranks
    all-reduce, once a step      over "replicas"    of the shards of the gradient sums

THE LAW. A shard takes R times the memory of step 3's; with R = dp nothing is sharded. With n = dp
and P parameters, a rank sends over "replicas" 2 (R-1)/R P R/n elements a step. For tiny on 4 ranks
with R = 2: P R/n = 402,112 elements in fp32, so 1,608,448 bytes; over "shard" what step 3 sends on
2 ranks. In stage 1 these are the messages of a two-level all-reduce, with the update before its
last all-gather.

Source: Zhang et al. 2022, "MiCS"; Zhao et al. 2023, "PyTorch FSDP" (hybrid sharding); Cho et al.
2019, "BlueConnect" (two levels). In PyTorch, fully_shard on a mesh of two dimensions.

Run it:    torchrun --nproc_per_node=4 -m extras step03_zero.py --zero 2+replicas
"""

from dataclasses import dataclass
from typing import Any

import step03_zero as step03
from common import UserError
from common.comm import Mesh, all_reduce
from common.flags import flag
from common.layout import note_record, record_of
from common.model import Decoder
from common.resume import FREE
from step03_zero import ZERO, Zero1, Zero2, Zero3


class Zero1Replicas(Zero1):
    """ZeRO 1 over the group "shard"; gradients are then summed over "replicas"."""

    def __init__(self, model: Decoder, config: "Flags", mesh: Mesh, *args: Any):
        """Make the groups, and note them in the records. Raises UserError."""
        dims = [dim for dim in ("dp", "cp") if dim in mesh.sizes]
        rows = mesh.rows(*dims)  # int [groups, dp x cp]
        n = rows.shape[1]
        if n % config.replicas:
            raise UserError(f"--replicas {config.replicas} must divide the {n} ranks of dp x cp")
        ranks = rows.reshape(len(rows), config.replicas, -1)
        mesh.add_groups("shard", ranks.reshape(-1, n // config.replicas), queue="gradients")
        mesh.add_groups(
            "replicas", ranks.swapaxes(1, 2).reshape(-1, config.replicas), queue="gradients"
        )
        for param in model.parameters():
            if record_of(param).data_group in ("dp", "data"):  # not experts, whose group is smaller
                note_record(param, data_group="shard")
        self.replicas = mesh["replicas"]
        super().__init__(model, config, mesh, *args)

    def finish(self):
        """Complete every `summed_grad`: sum over the group "shard", then over replicas."""
        super().finish()
        pendings = []
        for unit in self.units:
            if unit.group.name == "shard":
                pendings.append(all_reduce(unit.summed_grad, self.replicas))
        for pending in pendings:
            pending.wait()


class Zero2Replicas(Zero1Replicas, Zero2):
    """ZeRO 2 over the group "shard"."""


class Zero3Replicas(Zero1Replicas, Zero3):
    """ZeRO 3 over the group "shard"."""


ZERO["1+replicas"] = Zero1Replicas
ZERO["2+replicas"] = Zero2Replicas
ZERO["3+replicas"] = Zero3Replicas
FREE.add("replicas")  # it may change when a run resumes


@dataclass
class Flags(step03.Config):
    """Replicas of ZeRO's shards."""

    replicas: int = flag(
        2,
        "ranks of dp x cp that hold the same shard",
        least=1,
        needs={"zero": ["1+replicas", "2+replicas", "3+replicas"]},
    )
