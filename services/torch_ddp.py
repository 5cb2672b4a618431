"""A second helping of step 2: PyTorch's DistributedDataParallel, for comparison."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from common.comm import Group
from common.model import Decoder


class TorchSync:
    """PyTorch's DistributedDataParallel, told to add instead of average, and to leave the initial weights alone."""

    def __init__(self, model: Decoder, group: Group, config: Any):
        self.params, self.group = [p for p in model.parameters() if p.requires_grad], group
        self.groups = {param: group for param in self.params}
        self.forward = DistributedDataParallel(
            model,
            device_ids=[group.device] if group.device.type == "cuda" else None,
            process_group=group.handle,
            bucket_cap_mb=config.bucket_mb,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self.forward.register_comm_hook(group, self.add)

    @staticmethod
    def add(group: Group, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Communication hook: the sum of one of DDP's buckets, entered in the ledger."""
        group.ledger.book(group, "all_reduce", 2 * (group.size - 1) / group.size * bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer(), group=group.handle, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def begin(self):
        """DDP's `no_sync`, until the last micro-batch."""
        self.forward.require_backward_grad_sync = False

    def last_micro_batch(self):
        """DDP decides at the forward pass whether the backward pass will communicate."""
        self.forward.require_backward_grad_sync = True

    def finish(self):
        """DDP has waited at the end of backward."""
