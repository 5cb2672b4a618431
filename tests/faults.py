"""Mistakes that a chapter's own tests notice. A line each: where it is put in, what it becomes, who must notice, why.

pytest tests/test_faults.py                   every text below stands in the program, once
pytest tests/test_faults.py -m exhaustive     each is put into a copy of the course, and its test must fail there
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """One mistake."""

    module: str  # "step02_ddp" or "common.comm"
    old: str  # text that occurs once in the file
    new: str  # what it becomes
    test: str  # "file::test", in tests/: this one fails
    meaning: str  # what is wrong then; a link, if others had it


# fmt: off
FAULTS = [
    # --- chapter 1, and common/{model,data,layout,trainer}.py
    # --- chapter 2, and common/comm.py
    Fault("step02_ddp", 'missing = n_micro_batches * len(', 'missing = (n_micro_batches - 1) * len(', "test_step02::test_bucket_sync_sums", "the last micro-batch is added after its sum: https://github.com/deepspeedai/DeepSpeed/pull/7985"),  # noqa: E501
    # --- chapter 3
    Fault("step03_zero", "-(-ends[-1] // group.size)", "ends[-1] // group.size", "test_step03::test_unit", "the last elements are lost"),  # noqa: E501
    Fault("step03_zero", "self.first, 0), self.length)", "self.first, 0), self.length - 1)", "test_step03::test_unit", "an element is left out"),  # noqa: E501
    Fault("step03_zero", "at - self.first", "at", "test_step03::test_unit", "a part is looked up where it lies in the unit"),  # noqa: E501
    Fault("step03_zero", "return shard[start:stop]", "return shard[start:stop].clone()", "test_step03::test_unit", "a part is a copy: clipping and updates are lost"),  # noqa: E501
    Fault("step03_zero", "self.master = self.shard.to(wide(reference_param.dtype))", "self.master = self.shard", "test_step03::test_unit", "masters in 16 bits: https://github.com/pytorch/pytorch/issues/106395"),  # noqa: E501
    Fault("step03_zero", "param.grad_dtype = wide(param.dtype)", "param.grad_dtype = param.dtype", "test_step03::test_unit", "gradients add up in 16 bits: https://github.com/pytorch/pytorch/issues/106395"),  # noqa: E501
    Fault("step03_zero", "dtype=wide(self.flat.dtype))", "dtype=self.flat.dtype)", "test_step03::test_gradients", "ranks add up in 16 bits: https://github.com/pytorch/pytorch/issues/106395"),  # noqa: E501
    Fault("step03_zero", "layers\\.\\d+", "layers\\.\\d", "test_step03::test_unit_names", "layers 1 and 10 are one unit"),  # noqa: E501
    Fault("step03_zero", "(module, layout_of(param).data_dim)", '(module, "")', "test_step03::test_unit_names", "a unit has parameters of two groups"),  # noqa: E501
    Fault("step03_zero", "        return reduce_scatter(unit.reduced_shard, unit.gradient, unit.group)", "        all_reduce(unit.gradient, unit.group).wait()\n        unit.reduced_shard.copy_(unit.gradient[unit.first : unit.first + unit.length])\n        return Pending()", "test_step03::test_table", "right numbers, twice the bytes"),  # noqa: E501
    Fault("step03_zero", "        return reduce_scatter(unit.reduced_shard, unit.gradient, unit.group)", "        unit.reduced_shard.copy_(unit.gradient[unit.first : unit.first + unit.length])\n        return Pending()", "test_step03::test_gradients", "a rank's own gradient is not summed"),  # noqa: E501
    Fault("step03_zero", "unit.gradient = unit.reduced_shard = unit.grad_shard = None", "pass", "test_step03::test_gradients", "gradients stay after the update"),  # noqa: E501
    Fault("step03_zero", "            for param in unit.trained.values():\n                param.grad = None", "", "test_step03::test_gradients", "a parameter's .grad stays after the update"),  # noqa: E501
    Fault("step03_zero", 'group["lr"] = lr', 'group.setdefault("lr", lr)', "test_step03::test_update", "the rule keeps its own learning rate"),  # noqa: E501
    Fault("step03_zero", "self.torch_optimizer.step()", "self.torch_optimizer.step(), self.torch_optimizer.state.clear()", "test_step03::test_update", "moments are not kept"),  # noqa: E501
    Fault("step03_zero", "unit.shard.copy_(unit.master)", "pass", "test_step03::test_update", "bf16 weights never change"),  # noqa: E501
    Fault("step03_zero", "self.publish()", "pass", "test_step03::test_update", "other ranks' shards stay as they were"),
    Fault("step03_zero", "        for pending in [all_gather(unit.flat, unit.shard, unit.group) for unit in self.units]:\n            pending.wait()", "        self.arriving = [all_gather(unit.flat, unit.shard, unit.group) for unit in self.units]", "test_step03::test_update", "weights are used before they are there: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step03_zero", "            unit.missing = len(unit.trained)\n            unit.grad_shard", "            unit.missing = len(unit.named)\n            unit.grad_shard", "test_step03::test_gradients", "waits for a gradient of what does not train"),  # noqa: E501
    Fault("step03_zero", "torch.zeros_like(unit.master", "torch.ones_like(unit.master", "test_step03::test_gradients", "sums start at one"),  # noqa: E501
    Fault("step03_zero", "if self.in_flight is not None and self.in_flight[0] is unit:", "if False:", "test_step03::test_gradients", "a buffer is written to while its sum is under way"),  # noqa: E501
    Fault("step03_zero", "        param.grad = None\n        unit.missing -= 1", "        unit.missing -= 1", "test_step03::test_gradients", "what was summed is in the next sum, too"),  # noqa: E501
    Fault("step03_zero", "        self.in_flight = unit, self.reduce(unit)", "        self.in_flight = unit, self.reduce(unit)\n        self.land()", "test_step03::test_when", "nothing hides a sum"),  # noqa: E501
    Fault("step03_zero", "            pending.wait()\n            unit.grad_shard +=", "            unit.grad_shard +=", "test_step03::test_gradients", "a sum is used before it is there: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step03_zero", "unit.grad_shard += unit.reduced_shard", "unit.grad_shard = unit.reduced_shard", "test_step03::test_gradients", "the last micro-batch alone counts"),  # noqa: E501
    Fault("step03_zero", "unit.grad_shard += unit.reduced_shard", "unit.grad_shard = unit.reduced_shard + (unit.grad_shard if unit.group.size > 1 else 0)", "test_step03::test_gradients", "a group of one copies where it should add: https://github.com/ServiceNow/Fast-LLM/pull/551"),  # noqa: E501
    Fault("step03_zero", 'finish the last unit."""\n        self.land()', 'finish the last unit."""', "test_step03::test_gradients", "the embedding's last sum is left out"),  # noqa: E501
    Fault("step03_zero", "self.shard, self.group), True", "self.shard * 0, self.group), True", "test_step03::test_gather_and_free", "weights are zero"),  # noqa: E501
    Fault("step03_zero", "if not self.gathered:", "if self.gathering.wait() is None:", "test_step03::test_gather_and_free", "what is there is gathered again"),  # noqa: E501
    Fault("step03_zero", "self.flat.untyped_storage().resize_(0)", "pass", "test_step03::test_gather_and_free", "memory is never given back"),  # noqa: E501
    Fault("step03_zero", "            self.gathering.wait()\n            self.flat", "            self.flat", "test_step03::test_gather_and_free", "memory is given back while weights arrive"),  # noqa: E501
    Fault("step03_zero", "[trunk.norm, head]]", "[trunk.norm], [head]]", "test_step03::test_when", "the last layer is gathered only when the head's backward is done"),  # noqa: E501
    Fault("step03_zero", "modules[-1].register_forward_hook", "modules[0].register_forward_hook", "test_step03::test_when", "an entry counts as done after its first module"),  # noqa: E501
    Fault("step03_zero", "[*self.uses[i], *self.uses[ahead]]", "self.uses[i]", "test_step03::test_when", "nothing hides a gather"),  # noqa: E501
    Fault("step03_zero", "        for unit in self.uses[i]:\n            unit.gathering.wait()", "        for unit in [*self.uses[i], *self.uses[ahead]]:\n            unit.gathering.wait()", "test_step03::test_when", "nothing hides a gather: both are awaited"),  # noqa: E501
    Fault("step03_zero", "        for unit in self.uses[i]:\n            unit.gathering.wait()", "", "test_step03::test_when", "weights are used before they are there: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step03_zero", "unit.free()\n        if output", "pass\n        if output", "test_step03::test_when", "weights stay after forward"),  # noqa: E501
    Fault("step03_zero", "if unit not in self.uses[min(i + 1, len(self.uses) - 1)]:", "if True:", "test_step03::test_when", "norm and head go before their backward"),  # noqa: E501
    Fault("step03_zero", "output.requires_grad and ", "", "test_step03::test_stage_3_is_never_whole", "evaluation fails"),  # noqa: E501
    Fault("step03_zero", " and i >= self.lowest", "", "test_step03::test_when", "the embedding is gathered for its backward, which needs no weights"),  # noqa: E501
    Fault("step03_zero", "output.register_hook(lambda _gradient: self.fetch(i, max(i - 1, self.lowest)))", "pass", "test_step03::test_gradients", "weights are not there for backward"),  # noqa: E501
    Fault("step03_zero", "output.register_hook(lambda _gradient: self.fetch(i, max(i - 1, self.lowest)))", "[unit.flat.zero_() for unit in self.uses[i] if self.fetch(i, i) is None] and None", "test_step03::test_gradients", "weights are zero in backward"),  # noqa: E501
    Fault("step03_zero", "if len(unit.trained) == len(unit.named):", "if True:", "test_step03::test_gradients", "weights that do not train go before their backward"),  # noqa: E501
    Fault("step03_zero", "micro_loss = model(x, y) / n_targets", "micro_loss = model(x, y) / ((y != IGNORE).sum().clamp(min=1) * len(xs) * mesh.world)", "test_step03::test_zero_trains_to_step_1s_numbers", "a mean of means: https://github.com/huggingface/transformers/issues/24725"),  # noqa: E501
    Fault("step03_zero", "global_norm(model, optimizer.gradients(), mesh, sharded=config.zero > 0)", "torch.nn.utils.get_total_norm(optimizer.gradients().values()).item()", "test_step03::test_zero_trains_to_step_1s_numbers", "the norm of this rank's shards: https://github.com/karpathy/llm.c/pull/524"),  # noqa: E501
    Fault("step03_zero", "sharded=config.zero > 0", "sharded=False", "test_step03::test_zero_trains_to_step_1s_numbers", "shards are taken for copies"),  # noqa: E501
    Fault("step03_zero", "scale(optimizer.gradients(), clip_coef)", "pass", "test_step03::test_zero_trains_to_step_1s_numbers", "nothing is clipped"),  # noqa: E501
    Fault("step03_zero", "learning_rate(step, config)", "learning_rate(step * mesh.world, config)", "test_step03::test_zero_trains_to_step_1s_numbers", "the schedule runs faster with more ranks: https://github.com/huggingface/accelerate/issues/662"),  # noqa: E501
    Fault("common.layout", "return mesh[layout_of(param).data_dim]", 'return mesh["dp"]', "test_step03::test_global_norm_and_group", "the record's group is ignored"),  # noqa: E501
    Fault("common.layout", ".double().square() / copies", ".double().square()", "test_step03::test_global_norm_and_group", "copies count: https://github.com/NVIDIA-NeMo/RL/pull/3788"),  # noqa: E501
    Fault("common.layout", ".double().square() / copies", ".double() / copies", "test_step03::test_global_norm_and_group", "norms are added, where their squares should be"),  # noqa: E501
    Fault("common.layout", "for dim in mesh.sizes:", 'for dim in {*mesh.sizes} - {"pp"}:', "test_step03::test_global_norm_and_group", "each stage clips by its own norm: https://github.com/pytorch/torchtitan/issues/596"),  # noqa: E501
    Fault("common.layout", '{"pp", *', "{*", "test_step03::test_global_norm_and_group", "stages are taken for copies"),
    Fault("common.layout", "record.stage_copies * mesh.world", "mesh.world", "test_step03::test_global_norm_and_group", "a tied matrix counts twice"),  # noqa: E501
    Fault("common.layout", "shard.over for shard in record.shards", 'shard.over for shard in record.shards if shard.over != "ep"', "test_step03::test_global_norm_and_group", "experts are taken for copies"),  # noqa: E501
    Fault("common.layout", "(record.data_dim,)", '("data",)', "test_step03::test_global_norm_and_group", "a shard counts once for each rank that holds it"),  # noqa: E501
    # --- chapter 4
    # --- chapter 5
    # --- chapter 6, and common/schedules.py
    # --- chapter 7
]
