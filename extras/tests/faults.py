"""Mistakes in techniques and services, each with the test that must notice it. tests/faults.py has those of the course.

`injected` replaces a text in the source of a function or class, and compiles it again. It raises KeyError if the text
is not there. extras/tests/test_faults.py tries each mistake.
"""

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from extras.tests.rows import (
    BACK,
    BIAS,
    DROP,
    EXPERTS,
    GROUPS,
    MASK,
    MEETS,
    MUON,
    RAMP,
    SGD,
    STALE,
    TIED,
    UNCLIPPED,
    WINDOW,
    Row,
)


class Fault(NamedTuple):
    """One mistake: in the source of `owner`, the text `old` becomes `new`."""

    module: str
    owner: str  # function, or class
    old: str
    new: str
    meaning: str
    error: str = ""  # a part of the error that ends the run; "": the run ends with a wrong number


def noticed_by(judge: Row | tuple, module: str, *faults: tuple[str, ...]) -> list[tuple[Row | tuple, Fault]]:
    """Faults of a module that one judge notices; "/" stands for extras.variants.

    A judge is a Row, which no longer equals one process; or (file, test, parameters), a test that fails; or
    ("resumed", ranks, layout), a layout that resumes a checkpoint of one process and ends with other numbers.
    """
    return [(judge, Fault(module.replace("/", "extras.variants."), *fault)) for fault in faults]


RUNS_AHEAD = "test_the_host_runs_ahead_and_nothing_is_read_early"
BF16, FP16 = dict(dtype="bf16"), SGD | dict(dtype="fp16")  # one process, compared with itself

SPIKE = "enough and any(v > self.factor * median for v, median in zip(values, medians, strict=True))"

# fmt: off
FAULTS: list[tuple[Row | tuple, Fault]] = [
    *noticed_by(Row(1, "step01_single_gpu", dict(fused_gradients=True), SGD), "/step01.fused_gradients",
        ("add_product", "total.addmm_(dy.T, x)", "dy.T @ x", "only the last micro-batch counts"),
        ("SummingLinears", "dx.addmm_(dy, weight)", "dx", "dx lacks the terms of q and k")),
    *noticed_by(("test_laws", "test_formulas_are_the_kernels", "cudnn", "float64"), "/step05.flash",
        ("cudnn_attention", "is_causal=causal", "is_causal=False", "no mask")),
    *noticed_by(("resumed", 1, {}), "extras.services.pieces",
        ("take", "optimizer.torch_optimizer.state[master.tensor][kind] = value", "pass",
         "a resumed AdamW begins anew")),
    *noticed_by(("resumed", 1, {}), "extras.services.resume",
        ("Keeper", 'self.done = saved.index["step"]', "self.done = 0", "data and learning rate begin anew")),
    *noticed_by(("resumed", 1, {}), "step06_pipeline",
        ("train", "data.batch(step)", "data.batch(step - run.keeper.done)", "everything but the place in the data")),
    *noticed_by(Row(2, "step07_moe_ep", dict(ep=2), EXPERTS | SGD | BIAS), "/step07.routing",
        ("update", "all_reduce(moe.load, mesh[dim]).wait()", "pass", "ranks choose by other biases")),
    *noticed_by(Row(2, "step04_tp_sp", dict(tp=2, tp_overlap=True, sp=False), SGD), "/step04.block_overlap",
        ("start_total", "pending = all_reduce(x, group)", "pending = all_reduce(x.clone(), group)",
         "each rank continues with its own term of dx")),
    *noticed_by(("test_laws", "test_law", "int8, overlap"), "/step04.block_overlap",
        ("EnterLinears", "gathering = ctx.gather(x, ctx.group)", "gathering = start_gather(x, ctx.group)",
         "not rounded as it was in forward")),
    *noticed_by(Row(1, "step01_single_gpu", dict(loss_chunk=5), SGD), "/step01.chunked_loss",
        ("ChunkedLoss", "grad_weight += more", "grad_weight = more", "only the last chunk counts")),
    *noticed_by(Row(1, "step01_single_gpu", {}, BF16 | dict(loss_chunk=3)), "/step01.chunked_loss",
        ("ChunkedLoss", "torch.zeros_like(weight, dtype=wide(weight.dtype))", "torch.zeros_like(weight)",
         "small addends vanish")),
    *noticed_by(Row(2, "step02_ddp", dict(compress="topk", topk_fraction=1.0), SGD), "/step02.compress",
        ("Compression", "self.owed[key] = values - self.widen(message, length, dtype)", "self.owed[key] = values",
         "what has been sent is sent again in the next step")),
    *noticed_by(("test_variants", "test_what_is_lost_is_owed", "topk", True), "/step02.compress",
        ("Compression", " + self.owed.get(key, 0.0)", "", "no error feedback: what a step has lost is never sent")),
    *noticed_by(Row(2, "step02_ddp", {}, SGD | RAMP | DROP), "/step01.batch_ramp",
        ("Ramp", "x.unflatten(0, (self.dp, -1))", "x.unflatten(0, (-1, self.dp)).transpose(0, 1)",
         "ranks have other sequences, and so all have other masks")),
    *noticed_by(("test_variants", "test_a_ramp_trains_each_sequence_once"), "/step01.batch_ramp",
        ("Ramp", " and self.progress.now >= self.real", " and False", "the places are computed, too"),
        ("Ramp", "sum(map(self.size, range(step)))", "step * self.config.global_batch_size",
         "sequences are left out, as if all batches were full")),
    *noticed_by(Row(2, "step04_tp_sp", dict(tp=2, compress_activations="int8"), SGD, bound=0.03), "/step02.narrow",
        ("dequantise", "view(torch.float32)", "view(torch.float32).roll(1, 0)", "values get the scales of other rows")),
    *noticed_by(Row(2, "step04_tp_sp", dict(tp=2, compress_activations="int8"), SGD, bound=0.03),
        "/step04.compress_activations",
        ("Bits", "all_to_all(received, ours, group)", "all_to_all(received, ours, group); received[1:] = 0",
         "of a sum of parts only the first is taken")),
    *noticed_by(("test_laws", "test_law", "int8"), "/step04.compress_activations",
        ("narrow_blocks", "Conjugate.apply(x, group, leave, enter)",
         'Conjugate.apply(x, group, leave, __import__("step04_tp_sp").gather_tokens)',
         "activations are rounded, gradients are not")),
    *noticed_by(Row(2, "step05_cp_ring", dict(cp=2, cp_mode="allgather"), SGD), "/step05.allgather",
        ("GatheredAttention", "reduce_scatter(dkv.view(-1), dparts.view(-1), ctx.group).wait()",
         "dkv.copy_(dparts[ctx.group.rank])", "the gradients that other ranks have found for our keys are lost")),
    *noticed_by(Row(2, "step05_cp_ring", dict(cp=2, cp_mode="balanced"), SGD | MASK), "/step05.balanced",
        ("Dealt", "[:, slots]", "", "a rank takes tokens that others have been dealt"),
        ("Dealt", "self.now.positions[:, self.rank]", "self.fixed(None)[self.rank].expand(len(self.now.numbers), -1)",
         "RoPE by the place of zigzag's tokens")),
    *noticed_by(Row(2, "step05_cp_ring", dict(cp=2, cp_mode="ring"), SGD), "/step05.ring",
        ("ordered_visible", "if source <= rank", "if source == rank", "a rank sees its own keys only")),
    *noticed_by(Row(2, "step05_cp_ring", dict(cp=2, cp_mode="ulysses"), SGD), "/step05.ulysses",
        ("Swap", "not ctx.to_heads", "ctx.to_heads",
         "backward repeats the exchange of forward instead of the reverse one",
         "SwapBackward returned an invalid gradient")),
    *noticed_by(Row(4, "step05_cp_ring", dict(cp=4, cp_mode="usp"), SGD), "/step05.ulysses",
        ("turn_second", "x[:, :, 1].flip(2)", "x[:, :, 1]",
         "after the swap, tokens of second chunks are not in order of position")),
    *noticed_by(Row(2, "step05_cp_ring", dict(cp=2), SGD | MASK), "/step01.documents",
        ("MicroBatch", "document == other and", "document >= other and", "a token attends to earlier documents"),
        ("MicroBatch", "if document == other and", "if source == rank and document == other and",
         "documents end at the border of a rank")),
    *noticed_by(Row(2, "step05_cp_ring", dict(cp=2, documents="reset"), SGD | MASK), "/step01.documents",
        ("Documents", ".to(self.device)[:, self.here]",
         "[:, self.here] if self.here[0] == 0 else self.here.expand(len(self.now.numbers), -1)",
         "other ranks rotate by positions in the sequence")),
    *noticed_by(Row(1, "step01_single_gpu", dict(attention="scores"), SGD), "/step01.attention_scores",
        ("attend", "repeat_interleave(q.shape[2] // x.shape[2], dim=1)", "repeat(1, q.shape[2] // x.shape[2], 1, 1)",
         "query head i uses key head i mod kv_heads")),
    *noticed_by(("test_laws", "test_law", "selective recomputation"), "/step01.attention_scores",
        ("again", "checkpoint(core, *qkv, use_reentrant=False)", "core(*qkv)",
         "nothing is recomputed")),
    *noticed_by(Row(2, "step04_tp_sp", dict(tp=2), SGD | DROP), "/step01.dropout",
        ("Dropout", "shards[self.mesh.rank % len(shards)]", "shards[0]", "all ranks of tp drop as the first one does")),
    *noticed_by(Row(2, "step06_pipeline", dict(pp=2, recompute="full"), SGD | DROP), "extras.variants",
        ("Progress", 'for act in ("forward", "backward")', 'for act in ("forward",)',
         "a layer that is recomputed drops as the last forward does")),
    *noticed_by(Row(2, "step06_pipeline", dict(pp=2, recompute="full"), SGD | DROP), "/step01.dropout",
        ("Dropout", " + self.progress.now * config.micro_batch_size", "", "all micro-batches drop alike")),
    *noticed_by(("test_laws", "test_law", "dropout, sp"), "/step01.dropout",
        ("Dropout", '"leave" if hasattr(block, "leave") else "forward"', '"forward"',
         "each rank of tp keeps whole masks")),
    *noticed_by(("test_rules", "test_a_rule_is_what_others_wrote", "philox"), "/step01.dropout",
        ("philox", "range(10)", "range(9)", "one round is left out")),
    *noticed_by(Row(2, "step06_pipeline", dict(pp=2, schedule="dualpipe"), SGD | TIED), "/step06.dualpipe",
        ("attach", '(*layout_of(param).partial_over, "mirror")', "layout_of(param).partial_over",
         "each copy learns from its own half of the micro-batches")),
    *noticed_by(Row(2, "step06_pipeline", dict(pp=2, schedule="dualpipev"), SGD | TIED | dict(n_layers=4)),
        "/step06.dualpipe",
        ("dualpipev", "max(m, 2 * p)", "max(m, 2 * p) - 1", "a micro-batch is left out")),
    *noticed_by(("test_laws", "test_a_message_of_experts_is_hidden", "ahead", 8), "/step07.ep_overlap",
        ("travel", "turns.switch()", "pass", "right numbers, but nothing overlaps")),
    *noticed_by(Row(4, "step07_moe_ep", dict(ep=4, ep_mode="nodes"), EXPERTS | SGD), "/step07.expert_rows",
        ("over_nodes", ".swapaxes(1, 2)", "", "rows arrive at ranks without their experts")),
    *noticed_by(Row(2, "step07_moe_ep", dict(ep=2, ep_mode="rows"), EXPERTS | SGD), "/step07.expert_rows",
        ("send_rows", "gates[token, rank]", "gates[token, group.rank]", "rows and gates do not belong together")),
    *noticed_by(Row(4, "step04_tp_sp", dict(tp=4), SGD), "/step04.few_kv_heads",
        ("copy_heads", "note_layout(part,", "dict(",
         "ranks with the same key/value head each keep their own queries' share of its gradient")),
    *noticed_by(Row(1, "step01_single_gpu", {}, FP16), "/step01.fp16",
        ("LossScaling", "gradient.mul_(1 / self.scale)", "pass", "the update sees the loss scale")),
    *noticed_by(Row(2, "step04_tp_sp", dict(tp=2), MUON), "/step01.muon",
        ("Muon", "for shard in shards:", "for shard in ():", "each shard is made orthogonal by itself")),
    *noticed_by(Row(2, "step03_zero", dict(zero=1), MUON), "/step01.muon",
        ("Muon", "all_gather(whole, own, unit.group).wait()",
         "whole.zero_()[unit.first : unit.first + unit.length].copy_(own)", "shards on other ranks count as zero")),
    *noticed_by(Row(2, "step03_zero", dict(zero=1, offload_optimizer="cpu"), SGD), "/step03.offload",
        ("Update", "zero.publish()", "pass", "the host updates masters, and the weights stay as they are"),
        ("move", "zero.masters[name].data = unit.view_shard(master, name)", "pass",
         "the rule updates tensors that nobody reads")),
    *noticed_by(Row(4, "step06_pipeline", dict(pp=2, tp=2, sp=False, pp_scatter=True), SGD), "/step06.pp_scatter",
        ("attach", "output.chunk(tp.size, 1)[tp.rank]", "output.chunk(tp.size, 1)[0]",
         "all tp ranks send the same part")),
    *noticed_by(Row(2, "step07_moe_ep", dict(cp=2), EXPERTS | SGD | dict(capacity_factor=0.6)), "/step07.routing",
        ("RoutedMoE", "self.group).flatten().argsort()", "self.group).flatten()",
         "the choices of cp ranks are not in order of the tokens")),
    *noticed_by(Row(2, "step07_moe_ep", dict(cp=2), EXPERTS | SGD | dict(shared_experts=1)), "/step07.routing",
        ("RoutedMoE", 'note_layout(linear.weight, data_dim="data")', "pass",
         "their gradients are summed over dp alone")),
    *noticed_by(Row(2, "step07_moe_ep", {}, SGD | GROUPS | dict(experts_per_token=4)), "/step07.routing",
        ("RoutedMoE", "min(max(1, self.top_k // most), by_group.shape[-1])", "1", "a group is worth one score")),
    *noticed_by(Row(2, "step06_pipeline", dict(pp=2, schedule="zb-h1"), SGD), "/step06.split_backward",
        ("SplitBackward", "self.add(param, gradient())", "pass", "W does nothing")),
    *noticed_by(Row(2, "step06_pipeline", dict(pp=2, schedule="zbv"), SGD | TIED | dict(n_layers=4)),
        "/step06.split_backward",
        ("SplitBackward", " if self.of_head is None else self.of_head.add_(gradient)", "",
         "zbv: of several heads' gradients that wait for the embedding's only the last counts")),
    *noticed_by(("test_schedules", "test_law", "rounds"), "/step06.rounds",
        ("rounds", "m // max(size, p)", "-(-m // max(size, p))", "a last round of few waits")),
    *noticed_by(("test_schedules", "test_law", "ahead"), "/step06.rounds",
        ("rounds", "(p - 1 - rank) + ahead", "(p - 1 - rank)", "the last rank has no pairs"),
        ("rounds", "2 if ahead else min(v, 2)", "min(v, 2)", "what a pair sends comes too late")),
    *noticed_by(Row(1, "step01_single_gpu", {}, BACK), "/step01.skip_spikes",
        ("Past", "value.copy_(self.copies[key])", "None", "they know what was undone"),
        ("Past", "torch.empty_like(value)", "value", "the copy is an alias of the live state")),
    *noticed_by(Row(2, "step02_ddp", {}, SGD | STALE), "/step01.stale",
        ("update", "len(waiting[name]) > late", "len(waiting[name]) >= late", "K - 1 updates late"),
        ("update", "master.grad.clone()", "master.grad", "what waits is overwritten by the next gradient")),
    *noticed_by(("test_variants", "test_never_flushed_is_a_descent_by_weights_of_several_ages", 3, "full"),
        "/step06.pipedream",
        ("Stashed", "hold(self.model, self.stash[i])  #", "hold(self.model, self.stash[max(self.stash)])  #",
         "backward uses other weights than forward"),
        ("Stashed", "self.now[name] = self.now[name] - self.lr * weight.grad",
         "self.now[name].sub_(self.lr * weight.grad)", "all versions are one")),
    *noticed_by(("test_diloco", "test_ranks_that_meet_are_two_models"), "/step02.diloco",
        ("DilocoSync", 'state[master].setdefault("outer_momentum", torch.zeros_like(master))',
         "torch.zeros_like(master)", "each meeting forgets the momentum"),
        ("DilocoSync", "masters.items()]) / dp.size", "masters.items()])", "changes are summed, not averaged")),
    *noticed_by(Row(4, "step05_cp_ring", MEETS | dict(cp=2), UNCLIPPED, does=("meets",)), "/step02.diloco",
        ("DilocoSync", 'param.grad.mul_(self.mesh["dp"].size)', "pass", "a mean over all ranks' targets"),
        ("DilocoSync", "if share and", "if False and", "ranks of cp train on their own tokens")),
    *noticed_by(Row(3, "step02_ddp", dict(sync="server"), SGD), "/step02.tree_sync",
        ("TreeSync", "for part, _ in received:", "for part, _ in received[:-1]:", "a rank's gradient is not added")),
    *noticed_by(Row(2, "step02_ddp", dict(sync="torch"), SGD), "/step02.torch_ddp",
        ("TorchSync", "self.left == 0", "self.left < 0", "DDP never sums the gradients")),
    *noticed_by(Row(2, "step06_pipeline", dict(pp=2, schedule="v-min"), SGD | dict(n_layers=4)), "/step06.zero_bubble",
        ("with_weights", "count(row[3] + 1)", "count(row[0] + 1)", "W of the way down stands before its B",
         "KeyError")),
    *noticed_by(Row(2, "step05_cp_ring", dict(cp=2, cp_mode="ring"), SGD | WINDOW), "/step01.window",
        ("windowed_attention", "reach=window - 1", "reach=window - 2", "a rank's first query lacks its first key"),
        ("return_halo", "ours[:, :, own - part.shape[2] :] += part", "pass",
         "what later ranks have found for our keys is lost")),
    *noticed_by(("test_laws", "test_law", "window"), "/step01.window",
        ("neighbours", "min(own, reach - d)", "own", "right numbers, more bytes")),
    *noticed_by(Row(2, "step03_zero", dict(zero=3, zero_keep=True), SGD), "/step03.zero_keep",
        ("publish", "ShardedUnit.free(unit)", "pass", "weights of the first step for ever")),
    *noticed_by(("test_laws", "test_law", "kept if small"), "/step03.zero_keep",
        ("attach", "if unit.nbytes <= most:", "if True:", "right numbers, more memory")),
    *noticed_by(("test_laws", "test_law", "kept"), "/step03.zero_keep",
        ("attach", 'parts.instead(unit, "free", keep, by=__name__)', "pass", "right numbers, more bytes")),
    *noticed_by(Row(2, "step03_zero", dict(zero=1, zero_overlap=True), SGD), "/step03.zero_overlap",
        ("Early", "n_micro_batches * len", "len", "what later ones add is not summed")),
    *noticed_by(("test_laws", "test_sums_start_in_backward", {}), "/step03.zero_overlap",
        ("Early", "partial(self.mark_ready, unit)", "lambda _: None", "right numbers, but nothing hides a sum")),
    *noticed_by(Row(4, "step03_zero", dict(zero=1, zero_replicas=2), SGD), "/step03.zero_replicas",
        ("finish", "for unit in parts.units if", "for unit in [] if", "each replica trains on its own tokens")),
    *noticed_by(("test_rules", "test_a_rule_is_what_others_wrote", "muon"), "/step01.muon",
        ("Muon", "shard.grad.lerp(momentum, MOMENTUM)", "momentum.clone()", "without Nesterov's gradient"),
        ("Muon", "max(sides)", "sides[0]", "not scaled by the longer side"),
        ("Muon", "rate * decay", "decay", "as if lr were 1"),
        ("orthogonal", "range(iterations)", "range(iterations - 1)", "one iteration is left out")),
    *noticed_by(("test_rules", "test_a_rule_is_what_others_wrote", "loss scale"), "/step01.fp16",
        ("LossScaling", "% GROWTH == 0", "% (GROWTH + 1) == 0", "the scale grows one step too late"),
        ("LossScaling", "0 if self.skipping else self.good_steps + 1", "self.good_steps + (not self.skipping)",
         "good steps need not be consecutive"),
        ("LossScaling", "not math.isfinite(grad_norm)", "False", "no update is skipped")),
    *noticed_by(("test_rules", "test_a_rule_is_what_others_wrote", "biases"), "/step07.routing",
        ("update", "moe.load.mean() - moe.load", "moe.load - moe.load.mean()", "overloaded experts get more tokens")),
    *noticed_by(("test_rules", "test_a_rule_is_what_others_wrote", "deepseek-v3"), "/step07.routing",
        ("RoutedMoE", "p.gather(1, chosen)", "(p if self.bias is None else (p + self.bias).to(p)).gather(1, chosen)",
         "the gates contain the bias, which is for the choice alone")),
    *noticed_by(("test_rules", "test_a_rule_is_what_others_wrote", "switch"), "/step07.routing",
        ("RoutedMoE", "ceil(", "int(", "the capacity is rounded down")),
    *noticed_by(Row(4, "step02_ddp", dict(sync="hierarchical", ranks_per_node=2), SGD), "/step02.hierarchical_sync",
        ("HierarchicalSync", "shards[(place + 1) % n]", "shards[place]", "not the one that is complete in this node")),
    *noticed_by(Row(3, "step02_ddp", dict(sync="tree"), SGD), "/step02.tree_sync",
        ("TreeSync", "whole = [(gradient,", "whole = [(gradient.clone(),", "others keep what they had added up")),
    *noticed_by(("test_rules", "test_a_rule_is_what_others_wrote", "int8"), "/step02.narrow",
        ("quantise", "(blocks / scales).round()", "(blocks / scales)", "values are cut off, not rounded")),
    *noticed_by(("test_rules", "test_a_rule_is_what_others_wrote", "top-k"), "/step02.narrow",
        ("pick", "values.abs().topk", "values.topk", "large negative ones are not sent")),
    *noticed_by(("resumed", 3, dict(zero=1)), "extras.services.pieces",
        ("masters", "first = max(0, units[name].first - units[name].span[name][0]) if units else 0", "first = 0",
         "a slice is read from the beginning of its parameter")),
    *noticed_by(("resumed", 3, dict(zero=1)), "extras.services.evaluation",
        ("validate", 'for dim in ("dp", "cp", "pp"):', "for dim in ():",
         "the validation loss is that of one rank's tokens")),
    *noticed_by(("resumed", 2, dict(tp=2)), "extras.services.pieces",
        ("Piece", "shard_of(whole, shard)", "whole[: shard.stop - shard.start]",
         "all ranks of tp read the rows of the first")),
    *noticed_by(("test_gpu", RUNS_AHEAD, "plain"), "common.model",
        ("summed_cross_entropy", "return F", "logits.sum().item(); return F", "the host reads a sum"),
        ("apply_rope", "x * cos", "x * cos.cpu()", "a table is on the host", "device")),
    *noticed_by(("test_gpu", RUNS_AHEAD, "ring"), "common.layout",
        ("global_norm", "(square, mesh", "(square.cpu(), mesh", "NCCL gets a tensor of the host", "tensor on cpu")),
    *noticed_by(("test_gpu", "test_all_ranks_launch_in_an_order_that_ends"), "common.layout",
        ("global_norm", "for dim in mesh.sizes:", "for dim in list(mesh.sizes)[:: -1 if mesh.rank in (0, 3) else 1]:",
         "ranks 0 and 3 sum the norm over tp before pp: all four wait")),
    *noticed_by(("test_gpu", RUNS_AHEAD, "offloaded"), "/step03.offload",
        ("Update", "            wait()", "            0", "the update does not wait for its gradient")),
    *noticed_by(("test_gpu", RUNS_AHEAD, "offloaded, alone"), "/step03.offload",
        ("gather_beside", "*pending.works, arrived", "*pending.works", "the copy of the weights is never waited for")),
    *noticed_by(("test_gpu", RUNS_AHEAD, "experts"), "step07_moe_ep",
        ("visit_experts", "torch.stack((leaving_Ge, arriving_Ge)).cpu()", "leaving_Ge, arriving_Ge",
         "the host asks twice for counts"),
        ("MoE", "F.one_hot(ids_TK.flatten(), p_TE.shape[-1])", "torch.bincount(ids_TK.view(-1))",
         "its result has the size of the largest number, so the host waits", "bincount")),
    *noticed_by(("test_gpu", RUNS_AHEAD, "experts"), "/step07.grouped_matmul",
        ("ends", ", non_blocking=True", "", "the host waits for a copy")),
    *noticed_by(("test_gpu", RUNS_AHEAD, "nodes"), "/step07.expert_rows",
        ("send_rows", "torch.stack((leaving, coming)).tolist()", "leaving.tolist(), coming.tolist()",
         "the host asks twice for counts")),
    *noticed_by(("test_gpu", RUNS_AHEAD, "in turns"), "/step07.ep_overlap",
        ("Turns", 'device.type == "cuda"', "False", "a thread does not set its device", "not compiled with CUDA")),
    *noticed_by(("test_gpu", "test_a_router_chooses_once", "elementwise"), "/step01.elementwise",
        ("attach", "CHOICE", "[]", "recomputation chooses again")),
]

PATCHES = {  # not mistakes: both sides of a comparison have them (`patch` of extras/tests/rows.py)
    "frozen": Fault("common.layout", "materialize", "param.requires_grad)",
        'param.requires_grad and not name.endswith(("1.mlp.up_proj.weight", "0.input_layernorm.weight")))',
        "a matrix and a norm do not train"),
    "not_rounded": Fault("extras.variants.step04.compress_activations", "Bits", "KINDS[mode], dtype, dim",
        "torch.float64, dtype, dim", "what is called bf16 or int8 has 64 bits, and no scales"),
    "all_sent": Fault("extras.variants.step02.compress", "Compression", "}[config.compress]",
        "} and (Tensor.clone, lambda message, *_: message)", "whatever --compress says, all 64 bits are sent"),
    "wide": Fault("common.trainer", "choose_device", "DTYPES[", 'DTYPES["fp64"] or DTYPES[',
        "whatever --dtype says, it is 64 bits"),
    "second_is_a_spike": Fault("extras.variants.step01.skip_spikes", "Spikes", SPIKE, "len(self.recent) == 2",
        "the second step's update is left out"),
    "fourth_is_a_spike": Fault("extras.variants.step01.skip_spikes", "Spikes", SPIKE, "len(self.recent) == 4",
        "the fourth step's update is left out"),
    "graphs_without_code": Fault("extras.variants.step01.compiled", "attach", "torch.compile(",
        'torch.compiler.reset() or partial(torch.compile, backend="aot_eager")(', "graphs are only traced"),
}
# fmt: on


def functions_of(thing: Any) -> dict[str, FunctionType]:
    """By name, a function or all methods of a class. Static and decorated ones are unwrapped."""
    members = vars(thing).items() if inspect.isclass(thing) else [("", thing)]
    plain = {name: inspect.unwrap(getattr(member, "__func__", member)) for name, member in members}
    return {name: member for name, member in plain.items() if isinstance(member, FunctionType)}


@lru_cache
def mistaken(right: Any, fault: Fault) -> dict[str, CodeType]:
    """The code of a function, or of each method of a class, with the fault's text in place of the correct one."""
    source = textwrap.dedent(inspect.getsource(right))
    if fault.old not in source:
        raise KeyError(f"{fault.old!r} is not in {fault.module}.{fault.owner}")
    made: dict = {}
    exec(compile(source.replace(fault.old, fault.new), "<fault>", "exec"), vars(sys.modules[fault.module]), made)
    return {key: function.__code__ for key, function in functions_of(made[fault.owner]).items()}


@contextmanager
def injected(fault: str | Fault) -> Iterator[None]:
    """Inside this context, the program has a mistake, or the patch of this name ("": none).

    Only the code objects of functions are replaced, so menus, importers and `super()` also run the mistake.
    """
    if not fault:
        yield
        return
    fault = fault if isinstance(fault, Fault) else PATCHES[fault]
    right = getattr(importlib.import_module(fault.module), fault.owner)
    wrong, kept = mistaken(right, fault), functions_of(right)
    codes = {key: function.__code__ for key, function in kept.items()}
    try:
        for key, function in kept.items():
            function.__code__ = wrong[key]
        yield
    finally:
        for key, function in kept.items():
            function.__code__ = codes[key]


def with_fault(fault: str | Fault, function: Callable, *args: Any) -> Any:
    """Runs on every rank: call a function, with a mistake in the program or without."""
    with injected(fault):
        return function(*args)
