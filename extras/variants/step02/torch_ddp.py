"""Uses PyTorch's DistributedDataParallel (`--sync torch`; Li et al. 2020), for comparison with step 2.

DDP wraps the model's forward, and decides there whether the next backward will communicate. By default it averages
gradients; a communication hook sums them instead, as step 2 does. In step 2's `train`, the model would be wrapped, and
all micro-batches but the last would run under its `no_sync`.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common import UserError
from common.comm import Group, Mesh, note
from common.layout import layout_of
from common.model import Decoder
from extras.variants import Parts
from extras.variants.record import HAS, SET, Refusal
from step02_ddp import SYNCS

NARROW = "it sums gradients in 16 bits; use --dtype fp32, or another --sync"


class Inside(nn.Module):
    """The module that DDP wraps: the model's parameters, and its forward before `attach` replaces it."""

    def __init__(self, model: Decoder):
        super().__init__()
        self.model, self.forward = model, model.forward


class TorchSync:
    """DistributedDataParallel that sums instead of averaging, and does not broadcast the initial weights."""

    def __init__(self, model: Decoder, config: Any, mesh: Mesh):
        """Raises UserError if --dtype auto has chosen 16 bits. In a group of one there is nothing to wrap."""
        param, self.left, self.ddp = next(model.parameters()), 0, None
        if param.dtype.itemsize == 2:
            raise UserError(f"--sync torch with --dtype {config.dtype}, which is bf16 here: {NARROW}")
        group = mesh[layout_of(param).data_dim]
        if group.size == 1:
            return
        options = dict(bucket_cap_mb=config.bucket_mb, gradient_as_bucket_view=True, init_sync=False)
        self.ddp = DistributedDataParallel(Inside(model), process_group=group.handle, **options)
        self.ddp.register_comm_hook(group, self.add)

    @staticmethod
    def add(group: Group, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Communication hook: start to sum one of DDP's buckets."""
        note("all_reduce", group, bucket.buffer(), 2 * (group.size - 1) / group.size)
        work = dist.all_reduce(bucket.buffer(), group=group.handle, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def begin(self, n_micro_batches: int):
        """Expect this many forward passes; only the backward of the last one communicates."""
        self.left = n_micro_batches

    def forward(self, *inputs: Tensor) -> Tensor:
        """Replaces the model's forward by DDP's."""
        self.left -= 1
        self.ddp.require_backward_grad_sync = self.left == 0
        return self.ddp(*inputs)

    def finish(self):
        """Do nothing: DDP has waited at the end of backward."""


SYNCS["torch"] = TorchSync
PIPELINE = "it wraps a whole model, and a pipeline runs parts of it; use another --sync"
REFUSES = [
    Refusal(dict(sync=("torch",), dry_run=SET), "it needs real ranks; use another --sync"),
    Refusal(dict(sync=("torch",), dtype=("bf16", "fp16")), NARROW, None),
    Refusal(dict(sync=("torch",), pp=HAS), PIPELINE),
]


def attach(config: Any, parts: Parts):
    """Let calls of the model go through DistributedDataParallel."""
    if isinstance(parts.sync, TorchSync) and parts.sync.ddp is not None:
        parts.instead(parts.model, "forward", parts.sync.forward, by=__name__)
