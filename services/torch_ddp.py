"""A variant for step 2: PyTorch's DistributedDataParallel (--sync torch), for comparison."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.comm import Group
from common.model import Decoder


class Inside(nn.Module):
    """What DistributedDataParallel wraps: the model's parameters, and its forward as it was."""

    def __init__(self, model: Decoder):
        super().__init__()
        self.model, self.original = model, model.forward

    def forward(self, *inputs: Tensor) -> Tensor:
        """As the model's."""
        return self.original(*inputs)


class TorchSync:
    """PyTorch's DistributedDataParallel, told to add instead of average, and to leave the initial weights alone."""

    def __init__(self, model: Decoder, group: Group, bucket_mb: float):
        """Replaces `model.forward`, so that whoever calls the model calls DistributedDataParallel."""
        self.ddp = DistributedDataParallel(
            Inside(model),
            device_ids=[group.device] if group.device.type == "cuda" else None,
            process_group=group.handle,
            bucket_cap_mb=bucket_mb,
            gradient_as_bucket_view=True,
            init_sync=False,
        )
        self.ddp.register_comm_hook(group, self.add)
        object.__setattr__(model, "forward", self.ddp)  # not a submodule of what is inside it

    @staticmethod
    def add(group: Group, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Communication hook: the sum of one of DDP's buckets, entered in the ledger."""
        group.ledger.book(group, "all_reduce", 2 * (group.size - 1) / group.size * bucket.buffer().nbytes)
        work = dist.all_reduce(bucket.buffer(), group=group.handle, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def begin(self):
        """DDP's `no_sync`, until the last micro-batch."""
        self.ddp.require_backward_grad_sync = False

    def last_micro_batch(self):
        """DDP decides at the forward pass whether the backward pass will communicate."""
        self.ddp.require_backward_grad_sync = True

    def finish(self):
        """DDP has waited at the end of backward."""
