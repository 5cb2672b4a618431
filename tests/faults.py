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
    # --- chapter 4
    # --- chapter 5
    # --- chapter 6, and common/schedules.py
    Fault("common.schedules", 'rank, warm_up=p - 1 - rank)', 'rank, warm_up=p - 2 - rank)', "test_step06::test_the_picture_is_the_schedule", '1F1B: one forward too few, so that the pipe never fills'),  # noqa: E501
    Fault("common.schedules", 'rank, warm_up=p - 1 - rank)', 'rank, warm_up=m)', "test_step06::test_laws_of_an_order", '1F1B is AFAB: right numbers, more memory'),  # noqa: E501
    Fault("common.schedules", 'for stage in reversed(stages) for i', 'for stage in stages for i', "test_step06::test_interleaved_order", 'interleaved: backwards in the order of forwards: ranks wait for ever'),  # noqa: E501
    Fault("common.schedules", 'warm_up=(v - 1) * p + min(v, 2) * (p - 1 - rank))', 'warm_up=v * m)', "test_step06::test_laws_of_an_order", 'interleaved is AFAB: right numbers, more memory'),  # noqa: E501
    Fault("common.schedules", 'min(v, 2) * (p - 1 - rank))', 'p - 1 - rank)', "test_step06::test_laws_of_an_order", 'once the distance to the last rank: messages are not hidden'),  # noqa: E501
    Fault("common.schedules", 'warm_up=(v - 1) * p + min(v, 2) * (p - 1 - rank))', 'warm_up=v * m if m == p else (v - 1) * p + min(v, 2) * (p - 1 - rank))', "test_step06::test_laws_of_an_order", 'all forward first if m = p'),  # noqa: E501
    Fault("common.schedules", 'if v > 1 and m % p:', 'if False:', "test_step06::test_interleaved_order", 'rounds that are not full are taken'),  # noqa: E501
    Fault("common.schedules", 'min(start + p, m)', 'start + p', "test_step06::test_laws_of_an_order", 'micro-batches that do not exist'),  # noqa: E501
    Fault("common.schedules", 'consumer(a, places) or a._replace(kind="B" * (a.kind == "F"))', 'consumer(a, places) or a._replace(kind="")', "test_step06::test_simulate", 'a loss need not be computed before its backward'),  # noqa: E501
    Fault("common.schedules", 'if places[there.stage].rank != rank else 0', '', "test_step06::test_simulate", 'messages inside a rank take time'),  # noqa: E501
    Fault("common.schedules", 'n_layers * stage // n for', 'n_layers // n * stage for', "test_step06::test_places_and_consumers", 'layers that do not divide are left out'),  # noqa: E501
    Fault("step06_pipeline", 'rope_tables(positions, model', 'rope_tables(torch.arange(len(positions)), model', "test_step06::test_forward_stage", 'a stage numbers its tokens itself: wrong under context parallelism'),  # noqa: E501
    Fault("step06_pipeline", 'model.config, wide(x.dtype))', 'model.config, x.dtype)', "test_step06::test_forward_stage", "RoPE's angles in 16 bits: https://github.com/huggingface/transformers/pull/29285"),  # noqa: E501
    Fault("step06_pipeline", 'in place.layers:\n        x', 'in place.layers[1:]:\n        x', "test_step06::test_forward_stage", 'a layer less in each stage'),  # noqa: E501
    Fault("step06_pipeline", '= x, get_gradient_edge(y)', '= x, y', "test_step06::test_a_step_of_all_ranks", 'the output is kept after it is sent'),  # noqa: E501
    Fault("step06_pipeline", 'return y.detach()', 'return y', "test_step06::test_a_step_of_all_ranks", 'what is sent has a graph'),  # noqa: E501
    Fault("step06_pipeline", 'self.loss += y', 'self.loss = y', "test_step06::test_a_step_of_all_ranks", "the last micro-batch's loss is shown"),  # noqa: E501
    Fault("step06_pipeline", 'self.graphs.pop((i, stage))', 'self.graphs[i, stage]', "test_step06::test_a_step_of_all_ranks", 'graphs stay after their backward'),  # noqa: E501
    Fault("step06_pipeline", 'self.graphs.pop((i, stage))', 'self.graphs.pop((max(j for j, s in self.graphs if s == stage), stage))', "test_step06::test_a_step_of_all_ranks", "micro-batches get each other's gradients: shapes and counts are right"),  # noqa: E501
    Fault("step06_pipeline", 'y / self.n_targets', 'y / (self.n_targets / len(self.xs))', "test_step06::test_a_step_of_all_ranks", 'as many times too large as there are micro-batches'),  # noqa: E501
    Fault("step06_pipeline", 'y / self.n_targets', 'y / ((self.ys[i] != IGNORE).sum().clamp(min=1) * len(self.xs))', "test_step06::test_a_step_of_all_ranks", 'a mean of means: https://github.com/huggingface/transformers/issues/24725'),  # noqa: E501
    Fault("step06_pipeline", 'x, self.ys[i], self', 'x, self.ys[i - 1], self', "test_step06::test_a_step_of_all_ranks", 'targets of the micro-batch before'),  # noqa: E501
    Fault("step06_pipeline", '.pop((i, stage))\n', '.pop((i, stage))\n        [p.grad.zero_() for p in self.model.parameters() if i and p.grad is not None]\n', "test_step06::test_a_step_of_all_ranks", 'gradients are cleared between micro-batches, the loss is fine: https://github.com/NVIDIA-NeMo/Automodel/pull/3530'),  # noqa: E501
    Fault("step06_pipeline", 'exchange(sends, receives, self.group).wait()', 'exchange(sends, [], self.group).wait(); exchange([], receives, self.group).wait()', "test_step06::test_law_of_loops", 'a send waits before its receive is posted: a deadlock'),  # noqa: E501
    Fault("step06_pipeline", 'min(m, self.group.size - 1 - stage)', 'm', "test_step06::test_law_of_loops", '1F1B: all forwards first'),  # noqa: E501
    Fault("step06_pipeline", 'min(m, self.group.size - 1 - stage)', 'self.group.size - 1 - stage', "test_step06::test_law_of_loops", '1F1B: fewer micro-batches than ranks are forgotten'),  # noqa: E501
    Fault("step06_pipeline", 'self.backward(i - warm_up, stage, dy)', 'self.backward(i, stage, dy)', "test_step06::test_law_of_loops", 'dy of another micro-batch'),  # noqa: E501
    Fault("step06_pipeline", '            dy = self.recv_backward(i)\n            dx = self.backward(i, stage, dy)\n            self.send_backward(dx)\n\n\nclass', '            dy = self.recv_backward(i)\n            dx = self.backward(m - 1 - i, stage, dy)\n            self.send_backward(dx)\n\n\nclass', "test_step06::test_law_of_loops", 'AFAB: gradients in the order of a stack'),  # noqa: E501
    Fault("step06_pipeline", '        exchange(sends, receives, self.group).wait()', '        import torch.distributed as dist\n        works = [dist.isend(x, to, group=self.group.handle) for x, to in sends]\n        for work in works + [dist.irecv(x, of, group=self.group.handle) for x, of in receives]:\n            work.wait()', "test_step06::test_a_step_of_all_ranks", 'peers by their ranks in the world'),  # noqa: E501
    Fault("step06_pipeline", 'dy = self.send_forward(y, recv_backward=i - warm_up)', 'self.send_forward(y); dy = self.recv_backward(i - warm_up)', "test_step06::test_law_of_loops", 'two exchanges where y and dy pass at once'),  # noqa: E501
    Fault("step06_pipeline", 'exchange(sends, receives, self.group).wait()', 'exchange(sends, receives, self.group)', "test_step06::test_a_step_of_all_ranks", 'a message is not awaited: https://github.com/deepspeedai/DeepSpeed/issues/8061'),  # noqa: E501
    Fault("step06_pipeline", '        all_reduce(torch.zeros(1, device=self.reference_param.device), group).wait()\n', '', "test_step06::test_a_step_of_all_ranks", "NCCL's first call of a group is a message of two, and hangs"),  # noqa: E501
    Fault("step06_pipeline", 'programs[peer].append(Instruction("receive", needs_it, rank))', 'programs[peer].insert(0, Instruction("receive", needs_it, rank))', "test_step06::test_law_of_programs", 'receives in another order than sends'),  # noqa: E501
    Fault("step06_pipeline", ' and (peer := places[needs_it.stage].rank) != rank', ' and ((peer := places[needs_it.stage].rank) or True)', "test_step06::test_law_of_programs", 'a rank sends to itself'),  # noqa: E501
    Fault("step06_pipeline", 'COSTS | dict(B=1) if split', 'COSTS if split', "test_step06::test_add_messages", "messages in the order of costs that are not the picture's"),  # noqa: E501
    Fault("step06_pipeline", 'exchange([], [(buffer, peer)], self.group)\n', 'exchange([], [(buffer, peer)], self.group)\n                box[action][1].wait()\n', "test_step06::test_a_step_of_all_ranks", 'receives are awaited where they are posted'),  # noqa: E501
    Fault("step06_pipeline", '[(box.pop(action)[0], peer)], [], self.group)\n', '[(box.pop(action)[0], peer)], [], self.group)\n                sent[peer].wait()\n', "test_step06::test_a_step_of_all_ranks", 'sends are awaited at once: right numbers, nothing hidden'),  # noqa: E501
    Fault("step06_pipeline", '                pending.wait()\n                output', '                output', "test_step06::test_a_step_of_all_ranks", 'inputs are not awaited: https://github.com/deepspeedai/DeepSpeed/issues/8061'),  # noqa: E501
    Fault("step06_pipeline", '                sent[peer].wait()\n                sent[peer] = exchange(', '                sent[peer, action] = exchange(', "test_step06::test_a_step_of_all_ranks", 'sends are held to the end: all outputs stay'),  # noqa: E501
    Fault("step06_pipeline", '        for pending in sent.values():\n            pending.wait()\n', '', "test_step06::test_a_step_of_all_ranks", 'the last sends are not awaited: their memory may be written to'),  # noqa: E501
    Fault("step06_pipeline", '[(box.pop(action)[0], peer)]', "[(box.pop(action)[0], (self.group.rank + (1 if action.kind == 'F' else -1)) % self.group.size)]", "test_step06::test_a_step_of_all_ranks", 'peers by direction: wrong for some places'),  # noqa: E501
    Fault("step06_pipeline", 'box[needs_it] = output, Pending()', 'box[needs_it] = output * 0, Pending()', "test_step06::test_a_step_of_all_ranks", 'what stays inside a rank'),  # noqa: E501
    Fault("step06_pipeline", 'elif model.config.tied and places[0].rank != places[-1].rank:', 'elif model.config.tied:', "test_step06::test_keep_stage", 'one rank with both ends counts its matrix half'),  # noqa: E501
    Fault("step06_pipeline", 'note_layout(trunk.embed_tokens.weight, stage_copies=2)', 'pass', "test_step06::test_keep_stage", 'a tied matrix counts twice in the norm'),  # noqa: E501
    Fault("step06_pipeline", 'for place in mine for n', 'for place in mine[:1] for n', "test_step06::test_keep_stage", "layers of a rank's first stage only"),  # noqa: E501
    Fault("step06_pipeline", 'trunk.norm = model.lm_head = None', 'del trunk.norm, model.lm_head', "test_step06::test_keep_stage", 'absent modules are deleted: other chapters look for None'),  # noqa: E501
    Fault("step06_pipeline", ' and not (has_last and model.config.tied)', '', "test_step06::test_keep_stage", 'the last stage drops its tied head'),  # noqa: E501
    Fault("step06_pipeline", 'gradients[TIED] += theirs', 'gradients[TIED] = gradients[TIED] + theirs', "test_step06::test_sum_tied", 'a new tensor: the optimizer has the old one'),  # noqa: E501
    Fault("step06_pipeline", 'gradients[TIED] += theirs', 'pass', "test_step06::test_sum_tied", 'each end learns for itself'),  # noqa: E501
    Fault("step06_pipeline", 'if model.config.tied and first != last', 'if model.config.tied and first != last and gradients.get(TIED, torch.empty(0)).dim() > 1', "test_step06::test_pp_trains_to_step_1s_numbers", 'not summed where ZeRO has cut it: https://github.com/uw-syfi/piper/issues/13'),  # noqa: E501
    Fault("step06_pipeline", 'if theirs.numel():', 'if True:', "test_step06::test_sum_tied", 'empty messages'),
    Fault("step06_pipeline", 'all_reduce(loss, mesh["pp"]).wait()', 'pass', "test_step06::test_pp_trains_to_step_1s_numbers", 'all but the last rank show a loss of 0'),  # noqa: E501
    Fault("step06_pipeline", 'all_reduce(loss, mesh["data"]).wait()', 'all_reduce(loss, mesh["dp"]).wait()', "test_step06::test_pp_trains_to_step_1s_numbers", 'the loss of a shard of the tokens'),  # noqa: E501
    Fault("step06_pipeline", '(targets != IGNORE).sum()', '((targets[mine] != IGNORE).sum() * mesh["dp"].size)', "test_step06::test_pp_trains_to_step_1s_numbers", 'each rank divides by its own targets: https://github.com/pytorch/torchtitan/pull/2206'),  # noqa: E501
    Fault("step06_pipeline", '(targets != IGNORE).sum()', 'torch.tensor(targets.numel())', "test_step06::test_pp_trains_to_step_1s_numbers", 'targets that do not count are counted'),  # noqa: E501
    Fault("step06_pipeline", 'norm = global_norm(model, optimizer.gradients(), mesh, sharded=config.zero > 0)', 'norm = global_norm(model, optimizer.gradients(), mesh, sharded=config.zero > 0) if 0 else sum(g.double().square().sum() for g in optimizer.gradients().values()).sqrt().item()', "test_step06::test_pp_trains_to_step_1s_numbers", 'each stage clips by its own norm: https://github.com/pytorch/torchtitan/issues/596'),  # noqa: E501
    Fault("step06_pipeline", 'lr = learning_rate(step, config)', 'lr = learning_rate(step * mesh["dp"].size, config)', "test_step06::test_pp_trains_to_step_1s_numbers", 'the schedule runs faster with ranks: https://github.com/huggingface/accelerate/issues/662'),  # noqa: E501
    Fault("step06_pipeline", 'optimizer.zero_grad()', 'pass', "test_step06::test_pp_trains_to_step_1s_numbers", 'gradients stay for the next step'),  # noqa: E501
    Fault("step06_pipeline", 'config.tp if config.sp else 1', '1', "test_step06::test_pp_trains_to_step_1s_numbers", 'buffers of whole sequences: gloo does not check, and hangs or writes too little'),  # noqa: E501
    Fault("step06_pipeline", 'v = schedule.v if config.pp > 1 else 1', 'v = schedule.v', "test_step06::test_plan", 'one rank is cut in stages'),  # noqa: E501
    Fault("step03_zero", 'is not None and self.in_flight[0] is unit:', 'is not None and False:', "test_step06::test_pp_trains_to_step_1s_numbers", 'a stage of one unit overwrites the sum that is under way'),  # noqa: E501
    # --- chapter 7
]
