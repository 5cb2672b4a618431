"""What flags ask of a trainer: its learning rate, variants of a mechanism, plans, records, comparisons."""

import math
from typing import Any

from torch import Tensor

from common.data import Batch
from common.model import Decoder
from common.moe import Balance
from common.schedules import Plan
from services.checks import plan_pipeline
from services.documents import Documents
from services.evaluation import generate
from services.fused_gradients import fuse_gradients, make_room
from services.health import expert_metrics
from services.muon import take_over
from services.offload import Homes, homes, require_disk, travel_beside
from services.replicas import require_same_parameters, require_same_replicas
from services.state import held
from services.torch_ddp import TorchSync
from services.zero_toy import print_toy


class Variants:
    """A part of `Trainer` (common/trainer.py), whose attributes it uses."""

    config: Any
    more: dict[str, Any]
    documents: Documents | None = None
    n_targets = 1  # of this step's global batch

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth of the peak. `step` counts from 0."""
        config = self.config
        if step < config.warmup_steps:
            return config.lr * (step + 1) / config.warmup_steps
        progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
        return config.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def dims_to_sum(self) -> list[str]:
        """The mesh dimensions whose ranks have other tokens (dp, or dp x cp as "data") or other layers (pp)."""
        return [dim for dim in (self.mesh.data.name, "pp") if dim in self.mesh.groups] if self.mesh.sizes else []

    def accepts(self, loss: float, norm: float) -> bool:
        """False if loss or gradient norm is a spike (--skip-spikes): the step is then left out."""
        spike = math.isfinite(norm) and self.spikes.is_spike(loss, norm)
        self.more |= dict(skipped=True) if spike else {}
        return not spike

    def plan_pipeline(self) -> Plan:
        """Who has which layers, and does what in which order (step 6)."""
        return plan_pipeline(self.config, self.shape, self.mesh.sizes)

    def torch_ddp(self, model: Decoder) -> TorchSync:
        """--sync torch: PyTorch's DistributedDataParallel around the model."""
        return TorchSync(model, self.mesh.data, self.config.bucket_mb)

    def zero_toy(self, zero_optimizer: type) -> Any:
        """--toy: print step 3's example; nothing is trained."""
        print_toy(self.mesh, zero_optimizer)
        return self.trained()

    def homes(self, model: Decoder) -> Homes:
        """Where ZeRO's slices live: of the weights, and of masters and moments (--offload-...)."""
        if self.config.offload_optimizer == "disk":
            require_disk(self.config, model, self.dtype, self.mesh)
        return homes(self.config, self.stack, self.device)

    def vary(self, model: Decoder, optimizer: Any):
        """Change from outside what the step has built, before a state is loaded: --fuse-gradients, --offload, muon."""
        if self.config.fuse_gradients:
            fuse_gradients(model, lambda: optimizer.loss_scale / self.n_targets)
        travel_beside(optimizer, self.stack)
        take_over(optimizer, self.config, self.mesh)

    def print_text(self, positions: Tensor):
        """--generate: go on with the given text. `positions` int64 [seq]: the tokens of a sequence that are here."""
        config = self.config
        text = generate(self.look, self.model, positions, self.mesh, config.generate, seed=config.seed)
        if self.mesh.rank == 0:
            print(text)

    def note_experts(self, counted: Tensor):
        """Add to this step's record how busy the experts were (step 7's `Balance.counted`)."""
        self.more |= expert_metrics(self.shape, counted)

    def follow_documents(self):
        """--documents: from here on, the attention of every layer stops at their borders."""
        if self.config.documents != "off":
            self.documents = Documents(self)

    def note_batch(self, batch: Batch):
        """Note the targets of a step and, if --documents asks, where documents end in its whole sequences."""
        self.n_targets, config = batch.n_targets, self.config
        if config.fuse_gradients and not getattr(config, "zero", 0) and getattr(config, "sync", "naive") == "naive":
            make_room(self.model)  # else it lies in a buffer
        if self.documents is not None:
            self.documents.begin(batch.tokens)
            self.more["attention_pairs"] = self.documents.share_of_pairs()

    def measure(self):
        """Note the bytes that this rank holds now, by kind, for the memory table."""
        if self.log.measuring:
            self.log.measure(held(self.optimizer, getattr(self.config, "offload_optimizer", "none") == "disk"))

    def require_same_parameters(self):
        """Compare the weights of replicas, if they are whole (without ZeRO). Raises RuntimeError."""
        if self.mesh.sizes and not getattr(self.config, "zero", 0):
            require_same_parameters(self.model, self.mesh)

    def check_replicas(self, step: int):
        """--check-replicas N: compare what several ranks hold alike, if it is due. Raises RuntimeError."""
        every = getattr(self.config, "check_replicas", 0)
        if every and self.log.due(every, step):
            require_same_replicas(self.optimizer, self.mesh)

    def make_balance(self) -> Balance:
        """How the flags want the experts to be kept busy (step 7)."""
        config = self.config
        micro_batches = config.global_batch_size // config.micro_batch_size
        numbers = config.balance_weight, config.bias_speed, config.z_loss, config.capacity_factor
        return Balance(self.shape, micro_batches, self.device, config.balance, *numbers)
