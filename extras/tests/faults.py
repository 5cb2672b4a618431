"""Mistakes of techniques and services that the tests must notice: where a text stands, what it becomes, who sees it.

A fault is put into the source of a function or class, which is compiled anew. One whose text is gone raises KeyError.
extras/tests/test_faults.py trains with each. The mistakes of the course are in tests/faults.py.
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
    DEFAULT,
    DROP,
    EXHAUSTIVE,
    EXPERTS,
    GROUPS,
    MASK,
    MUON,
    RAMP,
    SGD,
    STALE,
    TIED,
    WINDOW,
    Row,
)


class Fault(NamedTuple):
    """One mistake."""

    module: str
    judge: str  # a name in SMALL_ROWS, of a layout that shows it, or in test_faults.py of a law, rule or resumed run
    tier: str
    owner: str  # function, or class
    old: str
    new: str
    meaning: str
    error: str = ""  # words of the error that a run ends with; "": it ends, with a wrong number


BF16, FP16 = dict(dtype="bf16"), SGD | dict(dtype="fp16")  # a process with itself
SMALL_ROWS: dict[str, Row] = {
    "one, bf16, chunks": Row(1, "step01_single_gpu", {}, BF16 | dict(loss_chunk=3)),
    "one, fp16": Row(1, "step01_single_gpu", {}, FP16),
    "chunks": Row(1, "step01_single_gpu", dict(loss_chunk=5), SGD),
    "hierarchical": Row(4, "step02_ddp", dict(sync="hierarchical", ranks_per_node=2), SGD),
    "tree": Row(3, "step02_ddp", dict(sync="tree"), SGD),
    "server": Row(3, "step02_ddp", dict(sync="server"), SGD),
    "ramp": Row(2, "step02_ddp", {}, SGD | RAMP | DROP),
    "roll back": Row(1, "step01_single_gpu", {}, BACK),
    "stale": Row(2, "step02_ddp", {}, SGD | STALE),
    "torch ddp": Row(2, "step02_ddp", dict(sync="torch"), SGD),
    "top-k of all": Row(2, "step02_ddp", dict(compress="topk", topk_fraction=1.0), SGD),
    "kept": Row(2, "step03_zero", dict(zero=3, zero_keep=True), SGD),
    "early sums": Row(2, "step03_zero", dict(zero=1, zero_overlap=True), SGD),
    "offload": Row(2, "step03_zero", dict(zero=1, offload_optimizer="cpu"), SGD),
    "replicas": Row(4, "step03_zero", dict(zero=1, zero_replicas=2), SGD),
    "muon, zero": Row(2, "step03_zero", dict(zero=1), MUON),
    "muon, tp": Row(2, "step04_tp_sp", dict(tp=2), MUON),
    "muon, experts": Row(2, "step07_moe_ep", {}, MUON | EXPERTS),
    "tp overlap": Row(2, "step04_tp_sp", dict(tp=2, tp_overlap=True, sp=False), SGD),
    "kv copies": Row(4, "step04_tp_sp", dict(tp=4), SGD),
    "int8": Row(2, "step04_tp_sp", dict(tp=2, compress_activations="int8"), SGD, bound=0.03),
    "plain ring": Row(2, "step05_cp_ring", dict(cp=2, cp_mode="ring"), SGD),
    "gathered keys": Row(2, "step05_cp_ring", dict(cp=2, cp_mode="allgather"), SGD),
    "ulysses": Row(2, "step05_cp_ring", dict(cp=2, cp_mode="ulysses"), SGD),
    "scores": Row(1, "step01_single_gpu", dict(attention="scores"), SGD),
    "dropout, tp": Row(2, "step04_tp_sp", dict(tp=2), SGD | DROP),
    "dropout, pp": Row(2, "step06_pipeline", dict(pp=2, recompute="full"), SGD | DROP),
    "usp": Row(4, "step05_cp_ring", dict(cp=4, cp_mode="usp"), SGD),
    "window": Row(2, "step05_cp_ring", dict(cp=2, cp_mode="ring"), SGD | WINDOW),
    "documents": Row(2, "step05_cp_ring", dict(cp=2), SGD | MASK),
    "documents, reset": Row(2, "step05_cp_ring", dict(cp=2, documents="reset"), SGD | MASK),
    "documents, balanced": Row(2, "step05_cp_ring", dict(cp=2, cp_mode="balanced"), SGD | MASK),
    "fused": Row(1, "step01_single_gpu", dict(fused_gradients=True), SGD),
    "documents, pp": Row(2, "step06_pipeline", dict(pp=2, recompute="full"), SGD | MASK),
    "split": Row(2, "step06_pipeline", dict(pp=2, schedule="zb-h1"), SGD),
    "zbv, tied": Row(2, "step06_pipeline", dict(pp=2, schedule="zbv"), SGD | TIED | dict(n_layers=4)),
    "dualpipe": Row(2, "step06_pipeline", dict(pp=2, schedule="dualpipe"), SGD | TIED),
    "dualpipev, tied": Row(2, "step06_pipeline", dict(pp=2, schedule="dualpipev"), SGD | TIED | dict(n_layers=4)),
    "v-min": Row(2, "step06_pipeline", dict(pp=2, schedule="v-min"), SGD | dict(n_layers=4)),
    "parted": Row(4, "step06_pipeline", dict(pp=2, tp=2, sp=False, pp_scatter=True), SGD),
    "rows": Row(2, "step07_moe_ep", dict(ep=2, ep_mode="rows"), EXPERTS | SGD),
    "nodes": Row(4, "step07_moe_ep", dict(ep=4, ep_mode="nodes"), EXPERTS | SGD),
    "groups": Row(2, "step07_moe_ep", {}, SGD | GROUPS | dict(experts_per_token=4)),
    "capacity, cp": Row(2, "step07_moe_ep", dict(cp=2), EXPERTS | SGD | dict(capacity_factor=0.6)),
    "bias": Row(2, "step07_moe_ep", dict(ep=2), EXPERTS | SGD | BIAS),
    "shared experts": Row(2, "step07_moe_ep", dict(cp=2), EXPERTS | SGD | dict(shared_experts=1)),
}


def of(module: str, judge: str, tier: str, *faults: tuple[str, ...]) -> dict[str, Fault]:
    """Faults of one module that one judge notices: (name, owner, old, new, meaning), and perhaps the error, each."""
    return {name: Fault(module, judge, tier, *fault) for name, *fault in faults}


# fmt: off
FAULTS: dict[str, Fault] = {
    **of("extras.variants.step01.fused_gradients", "fused", DEFAULT,
        ("products_in_the_place_of_sums", "add_product", "total.addmm_(dy.T, x)", "dy.T @ x", "the last micro-batch's"),
        ("input_of_the_first_alone", "SummingLinear", "dx.view(-1, dx.shape[-1]).addmm_(rows, weight)", "pass",
         "q and k have no part in dx")),
    **of("extras.variants.step05.flash", "law: cudnn", DEFAULT,
        ("cudnn_sees_later_keys", "cudnn_attention", "is_causal=causal", "is_causal=False", "no mask")),
    **of("step06_pipeline", "resume", DEFAULT,
        ("resume_with_the_first_batches", "train", "data.batch(step)", "data.batch(step - run.keeper.done)",
         "everything but the place in the data")),
    **of("step06_pipeline", "resume", EXHAUSTIVE,
        ("resume_with_the_first_learning_rate", "train", "learning_rate(step, config)",
         "learning_rate(step - run.keeper.done, config)", "its schedule begins anew")),
    **of("extras.variants.step07.balance_bias", "bias", DEFAULT,
        ("bias_by_own_load", "update", "all_reduce(moe.load, mesh[dim]).wait()", "pass",
         "ranks choose by other biases")),
    **of("extras.variants.step04.block_overlap", "tp overlap", DEFAULT,
        ("overlapped_gradient_not_summed", "start_total", "pending = all_reduce(x, group)",
         "pending = all_reduce(x.clone(), group)", "each rank goes on with its part of dx")),
    **of("extras.variants.step04.block_overlap", "law: int8 overlap", EXHAUSTIVE,
        ("gathered_again_whole", "EnterLinears", "gathering = ctx.gather(x, ctx.group)",
         "gathering = start_gather(x, ctx.group)", "not rounded as it was in forward")),
    **of("extras.variants.step01.chunked_loss", "chunks", DEFAULT,
        ("chunk_forgets_the_head", "ChunkedLoss", "grad_weight += more", "grad_weight = more",
         "only the last chunk counts")),
    **of("extras.variants.step01.chunked_loss", "one, bf16, chunks", DEFAULT,
        ("chunks_added_in_16_bits", "ChunkedLoss", "torch.zeros_like(weight, dtype=wide(weight.dtype))",
         "torch.zeros_like(weight)", "small addends vanish")),
    **of("extras.variants.step02.compress", "top-k of all", DEFAULT,
        ("sent_and_still_owed", "Compression", "self.owed[key] = values - self.widen(message, length, dtype)",
         "self.owed[key] = values", "what has been sent is sent again in the next step")),
    **of("extras.variants.step02.compress", "law: debts", DEFAULT,
        ("nothing_owed", "Compression", " + self.owed.get(key, 0.0)", "",
         "no error feedback: what a step has lost is never sent")),
    **of("extras.variants.step01.batch_ramp", "ramp", DEFAULT,
        ("ramp_gives_the_first_rank_all", "Ramp", "x.unflatten(0, (self.dp, -1))",
         "x.unflatten(0, (-1, self.dp)).transpose(0, 1)", "ranks have other sequences, and so all have other masks")),
    **of("extras.variants.step01.batch_ramp", "law: ramp", DEFAULT,
        ("ramp_computes_all", "Ramp", "if self.next > self.now:", "if False:", "the places are computed, too"),
        ("ramp_reads_again", "Ramp", "range(first, first + size)", "range(step * full, step * full + size)",
         "sequences are left out, as if all batches were full")),
    **of("extras.variants.step04.compress_activations", "int8", DEFAULT,
        ("narrow_sum_has_one_part", "Bits", "all_to_all(received, ours, group)",
         "all_to_all(received, ours, group); received[1:] = 0", "of a sum of parts only the first is taken")),
    **of("extras.variants.step02.narrow", "int8", DEFAULT,
        ("scales_of_another_rank", "dequantise", "view(torch.float32)", "view(torch.float32).roll(1, 0)",
         "values are read with them")),
    **of("extras.variants.step04.compress_activations", "law: int8", DEFAULT,
        ("gradients_sent_whole", "narrow_blocks", "Conjugate.apply(x, group, *g)",
         'Conjugate.apply(x, group, g[0], __import__("step04_tp_sp").gather_tokens)',
         "activations are rounded, gradients are not")),
    **of("extras.variants.step05.allgather", "gathered keys", DEFAULT,
        ("gathered_shares_not_summed", "GatheredAttention",
         "reduce_scatter(dkv.view(-1), dparts.view(-1), ctx.group).wait()", "dkv.copy_(dparts[ctx.group.rank])",
         "the gradients that other ranks have found for our keys are lost")),
    **of("extras.variants.step05.balanced", "documents, balanced", DEFAULT,
        ("dealt_to_other_places", "Dealt", "[:, slots]", "", "a rank takes tokens that others have been dealt"),
        ("rotated_where_they_stand", "Dealt", "self.now.positions[:, self.rank]",
         "self.fixed(None)[self.rank].expand(len(self.now.numbers), -1)", "RoPE by the place of zigzag's tokens")),
    **of("extras.variants.step05.ring", "plain ring", DEFAULT,
        ("ring_skips_the_past", "ordered_visible", "if source <= rank", "if source == rank",
         "a rank sees its own keys only")),
    **of("extras.variants.step05.ulysses", "ulysses", DEFAULT,
        ("ulysses_swaps_forward_again", "Swap", "not ctx.to_heads", "ctx.to_heads",
         "backward repeats the exchange of forward instead of the reverse one",
         "SwapBackward returned an invalid gradient")),
    **of("extras.variants.step05.usp", "usp", DEFAULT,
        ("usp_second_chunks_not_turned", "turn_second", "x[:, :, 1].flip(2)", "x[:, :, 1]",
         "after the swap, tokens of second chunks are not in order of position")),
    **of("extras.variants.step01.documents", "documents", DEFAULT,
        ("documents_see_the_one_before", "MicroBatch", "document == other and", "document >= other and",
         "borders are open"),
        ("reaching_document_skipped", "MicroBatch", "if document == other and",
         "if source == rank and document == other and", "as if each ended at the cut")),
    **of("extras.variants.step01.documents", "documents", EXHAUSTIVE,
        ("borders_ignored", "MicroBatch", "ends.cumsum(1) - ends", "0 * ends", "all is one document")),
    **of("extras.variants.step01.documents", "documents, reset", EXHAUSTIVE,
        ("positions_restart_on_rank_0_alone", "Documents", ".to(self.device)[:, self.here]",
         "[:, self.here] if self.here[0] == 0 else self.here.expand(len(self.now.numbers), -1)",
         "others rotate by the places in the sequence")),
    **of("extras.variants.step01.documents", "documents, pp", EXHAUSTIVE,
        ("documents_of_the_forward_in_backward", "Documents",
         'for act in ("forward", "backward")', 'for act in ("forward",)',
         "backward takes the last one's", "have different metadata than during the forward")),
    **of("extras.variants.step01.attention_scores", "scores", DEFAULT,
        ("scores_of_later_keys", "attend", "causal=True", "causal=False", "a token sees what it is to guess"),
        ("scores_with_heads_in_turn", "attend", "repeat_interleave(q.shape[2] // x.shape[2], dim=1)",
         "repeat(1, q.shape[2] // x.shape[2], 1, 1)", "query head i uses key head i mod kv_heads")),
    **of("extras.variants.step01.attention_scores", "law: scores", DEFAULT,
        ("scores_kept", "again", "checkpoint(core, *qkv, use_reentrant=False, **more)", "core(*qkv, **more)",
         "nothing is done again")),
    **of("extras.variants.step01.dropout", "dropout, tp", DEFAULT,
        ("seed_of_a_rank", "Dropout", "self.seed & WORD", "self.seed + self.mesh.rank & WORD",
         "each rank draws masks of its own"),
        ("masks_of_other_tokens", "Dropout", "shards[self.mesh.rank % len(shards)]", "shards[0]",
         "all ranks of tp drop as the first one does")),
    **of("extras.variants.step01.dropout", "dropout, pp", DEFAULT,
        ("masks_of_the_forward_in_backward", "Dropout", 'for act in ("forward", "backward")', 'for act in ("forward",)',
         "a layer that is recomputed drops as the last forward does"),
        ("masks_of_the_first_micro_batch", "Dropout", "self.first + self.now * self.size", "self.first",
         "all micro-batches drop alike")),
    **of("extras.variants.step01.dropout", "law: masks", DEFAULT,
        ("masks_before_g", "Dropout", '"leave" if hasattr(block, "leave") else "forward"', '"forward"',
         "each rank of tp keeps whole masks")),
    **of("extras.variants.step01.dropout", "rule: philox", DEFAULT,
        ("philox_nine_times", "philox", "range(10)", "range(9)", "one round is left out"),
        ("philox_keys_in_turn", "philox", "^ d ^ k1", "^ d ^ k0", "the second key is not used")),
    **of("extras.variants.step06.dualpipe", "dualpipe", DEFAULT,
        ("dualpipe_copies_drift_apart", "attach", '(*layout_of(param).partial_over, "mirror")',
         "layout_of(param).partial_over", "each copy learns from its own half of the micro-batches")),
    **of("extras.variants.step06.dualpipe", "dualpipev, tied", DEFAULT,
        ("dualpipev_stops_early", "dualpipev", "max(m, 2 * p)", "max(m, 2 * p) - 1", "a micro-batch is left out")),
    **of("extras.variants.step07.ep_overlap", "law: hidden", DEFAULT,
        ("hidden_behind_nothing", "travel", "turns.switch()", "pass", "right numbers, one after the other")),
    **of("extras.variants.step07.expert_nodes", "nodes", DEFAULT,
        ("neighbours_taken_for_other_nodes", "attach", ".swapaxes(1, 2)", "", "rows come where the experts are not")),
    **of("extras.variants.step07.expert_rows", "rows", DEFAULT,
        ("gates_of_other_experts", "send_rows", "gates[token, rank]", "gates[token, group.rank]",
         "rows and gates do not belong together")),
    **of("extras.variants.step07.expert_rows", "rows", EXHAUSTIVE,
        ("gates_rounded", "send_rows", "(tokens[token], gates[token, rank])",
         "(tokens[token], gates[token, rank].bfloat16().to(gates))", "they travel in few bits")),
    **of("extras.variants.step04.few_kv_heads", "kv copies", DEFAULT,
        ("kv_copies_not_summed", "copy_heads", "note_layout(part,", "dict(",
         "ranks with the same key/value head each keep their own queries' share of its gradient")),
    **of("extras.variants.step01.fp16", "one, fp16", DEFAULT,
        ("scale_stays", "LossScaling", "gradient.mul_(1 / self.scale)", "pass", "the update sees the loss scale"),
        ("loss_not_scaled", "ScaleGradient", "grad * ctx.scaling.scale", "grad",
         "the update divides by the scale all the same")),
    **of("extras.variants.step01.muon", "muon, tp", DEFAULT,
        ("muon_of_a_part", "Muon", "for shard in shards:", "for shard in ():", "each part is made orthogonal alone")),
    **of("extras.variants.step01.muon", "muon, zero", DEFAULT,
        ("muon_of_a_slice", "Muon", "all_gather(whole, own, unit.group).wait()",
         "whole.zero_()[unit.first : unit.first + unit.length].copy_(own)", "what lies on other ranks counts as zero")),
    **of("extras.variants.step01.muon", "muon, experts", EXHAUSTIVE,
        ("experts_made_orthogonal_together", "Muon", "x = orthogonal(x)",
         "x = orthogonal(x.flatten(0, 1)[None]).view_as(x)", "one below the other, as one matrix")),
    **of("extras.variants.step03.offload_optimizer", "offload", DEFAULT,
        ("offloaded_update_is_lost", "Update", "zero.publish()", "pass",
         "the host updates masters, and the weights stay as they are"),
        ("offloaded_masters_are_not_the_rules", "move", "zero.masters[name].data = unit.view_shard(master, name)",
         "pass", "the rule updates tensors that nobody reads")),
    **of("extras.variants.step06.pp_scatter", "parted", DEFAULT,
        ("part_of_tp_rank_0", "attach", "output.chunk(tp.size, 1)[tp.rank]", "output.chunk(tp.size, 1)[0]",
         "all tp ranks send the same part")),
    **of("extras.variants.step07.routing", "capacity, cp", DEFAULT,
        ("capacity_out_of_order", "RoutedMoE", "self.group).flatten().argsort()", "self.group).flatten()",
         "the choices of cp ranks are not in order of the tokens")),
    **of("extras.variants.step07.routing", "shared experts", DEFAULT,
        ("shared_experts_not_summed", "RoutedMoE", 'note_layout(linear.weight, data_dim="data")', "pass",
         "their gradients are summed over dp alone")),
    **of("extras.variants.step07.routing", "groups", DEFAULT,
        ("groups_by_their_best", "RoutedMoE", "min(max(1, self.top_k // most), by_group.shape[-1])", "1",
         "a group is worth one score")),
    **of("extras.variants.step07.routing", "capacity, cp", EXHAUSTIVE,
        ("drops_by_own_tokens", "RoutedMoE", "self.group.size > 1:\n            order",
         "False:\n            order", "at a capacity of its own", "out of bounds for dimension 0")),
    **of("extras.variants.step06.split_backward", "split", DEFAULT,
        ("split_norms_get_no_gradient", "SplitBackward", "left.append(Left(param, lambda gradient=gradient: gradient))",
         "left.append(Left(param, lambda gradient=gradient: gradient * 0))", "what B finds for W is lost"),
        ("weight_gradients_lost", "SplitBackward", "self.add(param, gradient())", "pass",
         "W does nothing")),
    **of("extras.variants.step06.split_backward", "zbv, tied", DEFAULT,
        ("split_head_forgets_the_tie", "SplitBackward", " if self.of_head is None else self.of_head.add_(gradient)", "",
         "zbv: of several heads' gradients that wait for the embedding's only the last counts")),
    **of("extras.variants.step06.split_backward", "split", EXHAUSTIVE,
        ("weight_gradients_twice", "SplitBackward", "self.add(param, gradient())", "self.add(param, 2 * gradient())",
         "W adds what waits twice")),
    **of("extras.variants.step06.rounds", "law: rounds", DEFAULT,
        ("rounds_of_few", "rounds", "m // max(size, p)", "-(-m // max(size, p))", "a last round of less than p waits"),
        ("rounds_all_forward", "rounds", "min(v, 2)) * (p - 1 - rank)", "min(v, 2)) * m", "all are in flight")),
    **of("extras.variants.step06.rounds", "law: ahead", DEFAULT,
        ("no_forward_ahead", "rounds", "(p - 1 - rank) + ahead", "(p - 1 - rank)", "the last rank has no pairs"),
        ("one_ahead_of_1f1b", "rounds", "2 if ahead else min(v, 2)", "min(v, 2)", "what a pair sends comes too late")),
    **of("extras.variants.step01.skip_spikes", "roll back", DEFAULT,
        ("moments_do_not_go_back", "Past", "value.copy_(more[kind])", "None", "they know what was undone"),
        ("copies_are_the_masters", "Past", "master.detach().clone()", "master.detach()", "the copy moves on"),
        ("weights_do_not_go_back", "Past", "master.detach().copy_(values)", "pass", "only the moments do")),
    **of("extras.variants.step01.stale", "stale", DEFAULT,
        ("late_by_one_less", "Queue", "len(queue) > self.late", "len(queue) >= self.late", "K - 1 updates late"),
        ("late_in_a_buffer", "Queue", "master.grad.clone()", "master.grad",
         "what waits is overwritten by the next gradient")),
    **of("extras.variants.step06.pipedream", "law: stashed", DEFAULT,
        ("back_through_the_newest", "Stashed", "hold(self.model, self.stash[i])  #",
         "hold(self.model, self.stash[max(self.stash)])  #", "weights that the micro-batch has not met"),
        ("stash_moves_on", "Stashed", "self.now[name] = self.now[name] - self.lr * weight.grad",
         "self.now[name].sub_(self.lr * weight.grad)", "all versions are one")),
    **of("extras.variants.step02.sync_server", "server", DEFAULT,
        ("server_forgets_the_last", "ServerSync", "for other, _ in others:", "for other, _ in others[:-1]:",
         "a rank's gradient is not added")),
    **of("extras.variants.step02.torch_ddp", "torch ddp", DEFAULT,
        ("last_pass_not_awaited", "TorchSync", "self.left == 0", "self.left < 0", "DDP never sums the gradients")),
    **of("extras.variants.step06.v_schedules", "v-min", DEFAULT,
        ("weights_before_their_gradient", "with_weights", "count(row[3] + 1)", "count(row[0] + 1)",
         "W of the way down stands before its B", "KeyError")),
    **of("extras.variants.step01.window", "window", DEFAULT,
        ("halo_one_token_short", "windowed_attention", "Halo.apply(torch.stack((k, v)), group, window - 1)",
         "Halo.apply(torch.stack((k, v)), group, window - 2)", "a rank's first query lacks its first key"),
        ("halo_gradients_stay", "Halo", "own[:, :, ctx.own - part.shape[2] :] += part", "pass",
         "what later ranks have found for our keys is lost")),
    **of("extras.variants.step01.window", "law: window", DEFAULT,
        ("whole_shards_sent", "Halo", "min(own, reach - d)", "own", "right numbers, more bytes")),
    **of("extras.variants.step03.zero_keep", "kept", DEFAULT,
        ("kept_after_the_update", "publish", "ShardedUnit.free(unit)", "pass", "weights of the first step for ever")),
    **of("extras.variants.step03.zero_keep", "law: kept if small", DEFAULT,
        ("kept_though_large", "attach", "if unit.nbytes <= most:", "if True:", "right numbers, more memory")),
    **of("extras.variants.step03.zero_keep", "law: kept", DEFAULT,
        ("kept_and_gathered_again", "attach", 'parts.instead(unit, "free", keep, by=__name__)', "pass",
         "right numbers, more bytes")),
    **of("extras.variants.step03.zero_overlap", "early sums", DEFAULT,
        ("sent_after_one_micro_batch", "Early", "n_micro_batches * len", "len", "what later ones add is not summed")),
    **of("extras.variants.step03.zero_overlap", "law: early sums", DEFAULT,
        ("sent_when_all_is_done", "Early", "unit.missing -= 1", "pass", "right numbers, but nothing hides a sum")),
    **of("extras.variants.step03.zero_replicas", "replicas", DEFAULT,
        ("replicas_not_summed", "finish", "for unit in parts.units if", "for unit in [] if",
         "each replica trains on its own tokens")),
    **of("extras.variants.step03.zero_replicas", "replicas", EXHAUSTIVE,
        ("replicas_summed_twice", "finish", "for pending in [all_reduce(",
         'for pending in [all_reduce(gradient, parts.mesh["replicas"]).wait() or all_reduce(', "once more at the end")),
    # rules, beside what others wrote (extras/tests/test_rules.py)
    **of("extras.variants.step01.muon", "rule: muon", DEFAULT,
        ("muon_of_another_momentum", "Muon", "1 - MOMENTUM", "0.0501", "M forgets a little faster"),
        ("muon_without_nesterov", "Muon", "shard.grad.lerp(momentum, MOMENTUM)", "momentum.clone()", "U is M"),
        ("muon_looks_ahead_too_little", "Muon", "shard.grad.lerp(momentum, MOMENTUM)",
         "shard.grad.lerp(momentum, 0.9501)", "U = 0.9501 M + 0.0499 G"),
        ("muon_scaled_by_its_rows", "Muon", "max(sides)", "sides[0]", "not by the longer side"),
        ("muon_scaled_by_another_number", "Muon", "(0.2 *", "(0.2001 *", "not 0.2"),
        ("muon_decays_without_the_rate", "Muon", "rate * decay", "decay", "as if lr were 1"),
        ("newton_schulz_a", "orthogonal", "beta=A", "beta=3.4446", "the last digit of x"),
        ("newton_schulz_b", "orthogonal", "beta=B", "beta=-4.7751", "the last digit of x^3"),
        ("newton_schulz_c", "orthogonal", "alpha=C", "alpha=2.0316", "the last digit of x^5"),
        ("newton_schulz_four_times", "orthogonal", "range(iterations)", "range(iterations - 1)", "one is left out"),
        ("newton_schulz_of_largest", "orthogonal", "x.norm(dim=(-2, -1), keepdim=True)", "x.abs().amax()",
         "divided by the largest number, not by the norm")),
    **of("extras.variants.step01.fp16", "rule: loss scale", DEFAULT,
        ("scale_grows_late", "LossScaling", "% GROWTH == 0", "% (GROWTH + 1) == 0", "after a step more"),
        ("good_steps_survive_an_overflow", "LossScaling", "0 if self.skipping else self.good_steps + 1",
         "self.good_steps + (not self.skipping)", "they need not be in a row"),
        ("scale_is_not_halved", "LossScaling", "self.scale / 2", "self.scale / 4", "but quartered"),
        ("overflow_passes", "LossScaling", "not math.isfinite(grad_norm)", "False", "no update is skipped")),
    **of("extras.variants.step07.balance_bias", "rule: biases", DEFAULT,
        ("bias_the_other_way", "update", "moe.load.mean() - moe.load", "moe.load - moe.load.mean()",
         "who has much gets more"),
        ("loads_add_up", "update", "moe.load.zero_()", "pass", "over all steps")),
    **of("extras.variants.step07.routing", "rule: deepseek-v3", DEFAULT,
        ("bias_in_the_score", "RoutedMoE", "p.gather(1, chosen)",
         "(p if self.bias is None else (p + self.bias).to(p)).gather(1, chosen)", "it is for the choice alone")),
    **of("extras.variants.step07.routing", "rule: mixtral", DEFAULT,
        ("z_is_not_squared", "RoutedMoE", "logsumexp(-1).square()", "logsumexp(-1)", "pushes logits down for ever")),
    **of("extras.variants.step07.routing", "rule: switch", DEFAULT,
        ("capacity_rounded_down", "RoutedMoE", "ceil(", "int(", "a place less"),
        ("last_place_is_empty", "RoutedMoE", "asked <= capacity", "asked < capacity", "a place less, if it is whole")),
    **of("extras.variants.step02.hierarchical_sync", "hierarchical", DEFAULT,
        ("shard_of_another_summed_between", "HierarchicalSync", "shards[(place + 1) % n]", "shards[place]",
         "not the one that is complete in this node")),
    **of("extras.variants.step02.tree_sync", "tree", DEFAULT,
        ("only_the_root_has_the_sum", "TreeSync", "exchange([], [(gradient, r - distance)], group).wait()",
         "exchange([], [(gradient.clone(), r - distance)], group).wait()", "others keep what they had added up")),
    **of("extras.variants.step02.narrow", "rule: int8", DEFAULT,
        ("cut_off", "quantise", "(blocks / scales).round()", "(blocks / scales)", "to zero"),
        ("in_126_steps", "quantise", "/ 127", "/ 126", "the largest is 126 steps")),
    **of("extras.variants.step02.narrow", "rule: top-k", DEFAULT,
        ("largest_positive_first", "pick", "values.abs().topk", "values.topk", "large negative ones are not sent")),
    **of("extras.services.pieces", "resume", DEFAULT,
        ("resume_without_moments", "take", "optimizer.torch_optimizer.state[master.tensor][kind] = value", "pass",
         "a resumed AdamW begins anew")),
    **of("extras.services.pieces", "resume, zero", DEFAULT,
        ("resume_from_rank_0s_slice", "masters",
         "first = max(0, units[name].first - units[name].span[name][0]) if units else 0", "first = 0",
         "a slice is read from the beginning of its parameter")),
    **of("extras.services.pieces", "resume, tp", DEFAULT,
        ("resume_from_rank_0s_rows", "Piece", "shard_of(whole, shard)", "whole[: shard.stop - shard.start]",
         "all ranks of tp read the rows of the first")),
    **of("extras.services.evaluation", "resume, zero", DEFAULT,
        ("validation_of_one_rank", "validate", 'for dim in ("dp", "cp", "pp"):', "for dim in ():",
         "the validation loss is that of one rank's tokens")),
    **of("extras.services.resume", "resume", DEFAULT,
        ("resume_at_the_first_step", "Keeper", 'self.done = saved.index["step"]', "self.done = 0",
         "data and learning rate begin anew")),}

PATCHES = {  # no mistakes: both sides of a comparison have them (`patch` of extras/tests/rows.py)
    **of("common.layout", "", DEFAULT,
        ("frozen", "materialize", "param.requires_grad)",
         'param.requires_grad and not name.endswith(("1.mlp.up_proj.weight", "0.input_layernorm.weight")))',
         "a matrix and a norm do not train")),
    **of("extras.variants.step04.compress_activations", "", DEFAULT,
        ("not_rounded", "Bits", "KINDS[mode], dtype, dim", "torch.float64, dtype, dim",
         "what is called bf16 or int8 has 64 bits, and no scales")),
    **of("extras.variants.step02.compress", "", DEFAULT,
        ("all_sent", "Compression", "}[config.compress]",
         "} and (Tensor.clone, lambda message, *_: message)", "whatever --compress says, all 64 bits are sent")),
    **of("common.trainer", "", DEFAULT,
        ("wide", "choose_device", "DTYPES[", 'DTYPES["fp64"] or DTYPES[', "whatever --dtype says, it is 64 bits")),
    **of("extras.variants.step01.skip_spikes", "", DEFAULT,
        ("second_is_a_spike", "Spikes",
         "enough and any(v > self.factor * median for v, median in zip(values, medians, strict=True))",
         "len(self.recent) == 2", "the second step's update is left out"),
        ("fourth_is_a_spike", "Spikes",
         "enough and any(v > self.factor * median for v, median in zip(values, medians, strict=True))",
         "len(self.recent) == 4", "the fourth step's update is left out")),
    **of("extras.variants.step01.compiled", "", DEFAULT,
        ("graphs_without_code", "attach", "torch.compile(",
         'torch.compiler.reset() or partial(torch.compile, backend="aot_eager")(', "graphs are only traced")),
}
# fmt: on


def functions_of(thing: Any) -> dict[str, FunctionType]:
    """A function, or all methods of a class, by name; of static and decorated ones, what is inside."""
    members = vars(thing).items() if inspect.isclass(thing) else [("", thing)]
    plain = {name: inspect.unwrap(getattr(member, "__func__", member)) for name, member in members}
    return {name: member for name, member in plain.items() if isinstance(member, FunctionType)}


@lru_cache
def mistaken(right: Any, fault: Fault) -> dict[str, CodeType]:
    """The code of a function, or of each method of a class, with the fault's text in the place of the right one."""
    source = textwrap.dedent(inspect.getsource(right))
    if fault.old not in source:
        raise KeyError(f"{fault.old!r} is not in {fault.module}.{fault.owner}")
    made: dict = {}
    exec(compile(source.replace(fault.old, fault.new), "<fault>", "exec"), vars(sys.modules[fault.module]), made)
    return {key: function.__code__ for key, function in functions_of(made[fault.owner]).items()}


@contextmanager
def injected(fault: str | Fault) -> Iterator[None]:
    """Inside, the mistake (or the one of this name; "": none) is in the program: code that holds its text is exchanged.

    The functions stay the objects that they are, so menus, importers and `super()` meet the mistake too.
    """
    if not fault:
        yield
        return
    fault = fault if isinstance(fault, Fault) else (FAULTS | PATCHES)[fault]
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


def with_fault(fault: str, function: Callable, *args: Any) -> Any:
    """Runs on every rank: a function, with a mistake in the program, or with none."""
    with injected(fault):
        return function(*args)
