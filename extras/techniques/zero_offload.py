"""ZeRO's tensors in host memory (`--zero 1+offload`, `2+offload`, `3+offload`, `3+offload-all`).

The CPU's memory is larger than the GPU's, and an update has few FLOPs. So masters and moments are
kept and updated on the host:

    GPU     backward -> shard of the gradient -.                     .-> shard of the weights
    host                                       '-> master, moments --'

    +offload        masters and moments are on the host
    +offload-all    in stage 3, the shards of the weights, too. Each use copies a unit's shard to
                    the GPU, which holds a few units of weights, gradients' shards, activations

THE LAW. With n ranks of dp, a GPU holds 12/n bytes a parameter less (bf16 weights, AdamW), with
-all 14/n less; the host holds them, and 4/n for the gradient. A step copies 4/n bytes a parameter
to the host and 2/n back; with -all 2/n in each use. For llama3-8b on 8 GPUs: 12 GB less; 4 GB to
the host, which takes 0.16 s at 25 GB/s, and 2 GB back.

The GPU waits while the host updates. (DeepSpeed's delayed update hides this, and is no longer
exact.)

Source: Ren et al. 2021, "ZeRO-Offload"; Rajbhandari et al. 2021, "ZeRO-Infinity", which also uses
disks. In PyTorch, CPUOffloadPolicy of fully_shard.

Run it:    torchrun --nproc_per_node=4 -m extras step03_zero.py --zero 2+offload
"""

import torch
from torch import Tensor, nn

from common.comm import Group, all_gather
from step03_zero import ZERO, ShardedUnit, Unit, Zero1, Zero2, Zero3


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, which is pinned if there is a GPU."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor)


class MasterOnHost(Unit):
    """A unit whose master is on the host."""

    def __init__(self, named: dict[str, nn.Parameter], group: Group):
        super().__init__(named, group)
        self.master = to_host(self.master)


class ShardedMasterOnHost(MasterOnHost, ShardedUnit):
    """As MasterOnHost, for ZeRO 3."""


class Zero1Offload(Zero1):
    """ZeRO 1 with masters on the host. So torch.optim creates their moments there, too."""

    unit_type = MasterOnHost

    def step(self, lr: float):
        """Copy this rank's shards of the gradient to the host, and update there.

        `publish`, as it is, copies the masters into this rank's shards of the weights.
        """
        for unit in self.units:
            unit.summed_grad = to_host(unit.summed_grad)
        super().step(lr)


class Zero2Offload(Zero1Offload, Zero2):
    """ZeRO 2 with masters on the host."""


class Zero3Offload(Zero1Offload, Zero3):
    """ZeRO 3 with masters on the host."""

    unit_type = ShardedMasterOnHost


class AllOnHost(ShardedMasterOnHost):
    """A unit whose master, and shard of the weights, are on the host between uses."""

    def __init__(self, named: dict[str, nn.Parameter], group: Group):
        super().__init__(named, group)
        self.shard = to_host(self.shard)

    def gather(self):
        """If `flat` has no memory, allocate it, copy our shard to the GPU, and start to gather.

        The host does not wait for the copy. The shard may be overwritten after the norm's `item`,
        for which the host has waited until all copies of this step were done.
        """
        if self.gathering is None:
            self.flat.untyped_storage().resize_(self.flat.nbytes)
            shard = self.shard.to(self.flat.device, non_blocking=True)
            self.gathering = all_gather(self.flat, shard, self.group)


class Zero3OffloadAll(Zero3Offload):
    """ZeRO 3 with masters and weights on the host."""

    unit_type = AllOnHost


ZERO["1+offload"] = Zero1Offload
ZERO["2+offload"] = Zero2Offload
ZERO["3+offload"] = Zero3Offload
ZERO["3+offload-all"] = Zero3OffloadAll
