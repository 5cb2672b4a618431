"""Mistakes that the tests must notice: a name, where the text stands, what it becomes, what that means, and a layout.

A fault is put into the source of a function or class, which is compiled anew. One whose text is gone raises KeyError.
Many are what others have got wrong: see their issue trackers. tests/test_faults.py trains with each.
"""

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple


class Fault(NamedTuple):
    """One mistake."""

    module: str
    owner: str  # function, or class
    old: str
    new: str
    meaning: str
    row: str = ""  # a name in SMALL_ROWS, of a layout that shows it; "": some row of the table does


SGD, TIED, MHA, EXPERTS = dict(optimizer="sgd", lr=0.5), dict(tied=True), dict(n_kv_heads=4), dict(experts=4)
UNEVEN = dict(dataset=__file__)  # read by `read_uneven` of tests/equal.py: many targets do not count
BF16 = dict(dtype="bf16")
SMALL_ROWS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {  # (ranks, step, layout, base), as in rows.py
    "one": (1, "step01_single_gpu", {}, SGD),
    "one, uneven": (1, "step01_single_gpu", {}, SGD | UNEVEN),
    "one, bf16": (1, "step01_single_gpu", {}, BF16),
    "naive": (2, "step02_ddp", dict(sync="naive"), SGD),
    "naive, uneven": (2, "step02_ddp", dict(sync="naive"), SGD | UNEVEN),
    "ring": (3, "step02_ddp", dict(sync="ring"), SGD),
    "bucket": (2, "step02_ddp", dict(sync="bucket", bucket_mb=0.01), SGD),
    "zero 1": (2, "step03_zero", dict(zero=1), SGD),
    "zero 1 of 3": (3, "step03_zero", dict(zero=1), SGD),
    "zero 2": (2, "step03_zero", dict(zero=2), SGD),
    "zero 3": (2, "step03_zero", dict(zero=3), SGD),
    "tp, no sp": (2, "step04_tp_sp", dict(tp=2, sp=False), SGD),
    "tp": (2, "step04_tp_sp", dict(tp=2), SGD),
    "tp, tied": (2, "step04_tp_sp", dict(tp=2), SGD | TIED),
    "cp": (2, "step05_cp_ring", dict(cp=2), SGD),
    "cp 3": (3, "step05_cp_ring", dict(cp=3), SGD | dict(seq_len=24)),
    "pp": (3, "step06_pipeline", dict(pp=3), SGD),
    "pp, tied": (2, "step06_pipeline", dict(pp=2), SGD | TIED),
    "lists": (2, "step06_pipeline", dict(pp=2, schedule="interleaved"), SGD | dict(n_layers=4)),
    "moe": (2, "step07_moe_ep", {}, EXPERTS | SGD),
    "moe, cp": (2, "step07_moe_ep", dict(cp=2), EXPERTS | SGD),
    "moe, tp": (2, "step07_moe_ep", dict(tp=2), EXPERTS | SGD),
    "ep": (2, "step07_moe_ep", dict(ep=2), EXPERTS | SGD),
    "ep of 4": (4, "step07_moe_ep", dict(ep=2, zero=1), EXPERTS | SGD),
}


def of(module: str, row: str, *faults: tuple[str, str, str, str, str]) -> dict[str, Fault]:
    """Faults of one module that one row shows: (name, owner, old, new, meaning) each."""
    return {name: Fault(module, owner, old, new, meaning, row) for name, owner, old, new, meaning in faults}


FAULTS: dict[str, Fault] = {
    "sent_and_still_owed": Fault(
        "variants.compress",
        "Compression",
        "self.owed[key] = values - self.widen(message, length, dtype)",
        "self.owed[key] = values",
        "what has been sent is sent again in the next step",
    ),
    "last_pass_not_awaited": Fault(
        "variants.torch_ddp", "TorchSync", "self.left == 0", "self.left < 0", "DDP never sums the gradients"
    ),
    "chunk_forgets_the_head": Fault(
        "variants.chunked_loss",
        "ChunkedLoss",
        "grad_weight += more",
        "grad_weight = more",
        "only the last chunk counts",
    ),
    "muon_of_a_part": Fault(
        "variants.muon", "Muon", "for split in splits:", "for split in ():", "each part is made orthogonal alone"
    ),
    "muon_of_a_slice": Fault(
        "variants.muon",
        "Muon",
        "all_gather(whole, own, unit.group).wait()",
        "whole.zero_()[unit.first : unit.first + unit.length].copy_(own)",
        "what lies on other ranks counts as zero",
    ),
    "scale_stays": Fault(
        "variants.fp16", "LossScaling", "gradient.mul_(1 / self.scale)", "pass", "the update sees the loss scale"
    ),
    "ring_skips_the_past": Fault(
        "variants.cp_ring", "ordered_visible", "if source <= rank", "if source == rank", "a rank sees its own keys only"
    ),
    "gathered_shares_not_summed": Fault(
        "variants.cp_allgather",
        "GatheredAttention",
        "reduce_scatter(dkv.view(-1), dparts.view(-1), ctx.group).wait()",
        "dkv.copy_(dparts[ctx.group.rank])",
        "the gradients that other ranks have found for our keys are lost",
    ),
    "kv_copies_not_summed": Fault(
        "variants.few_kv_heads",
        "cut_heads",
        "note_layout(part,",
        "dict(",
        "ranks with the same key/value head each keep their own queries' share of its gradient",
    ),
    "overlapped_gradient_not_summed": Fault(
        "variants.block_overlap",
        "start_total",
        "pending = all_reduce(x, group)",
        "pending = all_reduce(x.clone(), group)",
        "each rank goes on with its part of dx",
    ),
    "replicas_not_summed": Fault(
        "variants.zero_replicas",
        "with_replicas",
        "for unit in zero.units if",
        "for unit in [] if",
        "each replica trains on its own tokens",
    ),
    "documents_see_the_one_before": Fault(
        "variants.documents", "MicroBatch", "document == other and", "document >= other and", "borders are open"
    ),
    "offloaded_update_is_lost": Fault(
        "variants.offload_optimizer",
        "Update",
        "unit.slice.copy_(unit.master, non_blocking=True)",
        "pass",
        "the host updates masters, and the weights stay as they are",
    ),
    "offloaded_masters_are_not_the_rules": Fault(
        "variants.offload_optimizer",
        "move",
        "zero.pieces[name].data = unit.part(master, name)",
        "pass",
        "the rule updates tensors that nobody reads",
    ),
    "narrow_sum_has_one_part": Fault(
        "variants.compress_activations",
        "Bits",
        "all_to_all(received, ours, group)",
        "all_to_all(received, ours, group); received[1:] = 0",
        "of a sum of parts only the first is taken",
    ),
    "ulysses_swaps_forward_again": Fault(
        "variants.cp_ulysses",
        "Swap",
        "not ctx.to_heads",
        "ctx.to_heads",
        "backward repeats the exchange of forward instead of the reverse one",
    ),
    "pipeline: the norm counts a tied matrix twice": Fault(
        "step06_pipeline",
        "keep_stage",
        "note_layout(trunk.embed_tokens.weight, stages=2)",
        "pass",
        "each of its two stages takes it for its own",
    ),
    "split: norms get no gradient": Fault(
        "variants.split_backward",
        "SplitBackward",
        "found.append((param, lambda gradient=gradient: gradient))",
        "found.append((param, lambda gradient=gradient: gradient * 0))",
        "what B finds for W is lost",
    ),
    "split: the head's part of a tied matrix is lost": Fault(
        "variants.split_backward",
        "SplitBackward",
        "(0 if self.held is None else self.held)",
        "0",
        "zbv: of several heads' gradients that wait for the embedding's only the last counts",
    ),
    "dualpipe: copies drift apart": Fault(
        "variants.dualpipe",
        "attach",
        '(*layout_of(param).partial_over, "mirror")',
        "layout_of(param).partial_over",
        "each copy learns from its own half of the micro-batches",
    ),
    "zero 3: the head's weights have gone": Fault(
        "step03_zero",
        "Zero3",
        "trunk.norm, head)",
        "trunk.norm, trunk.norm and nn.Sequential(trunk.norm, head))",
        "afab: the first micro-batch's backward has freed them",
    ),
    "rows: gates of another rank's experts": Fault(
        "variants.expert_rows",
        "send_rows",
        "gates[token, rank]",
        "gates[token, group.rank]",
        "rows and gates do not belong together",
    ),
    "capacity: who comes first": Fault(
        "variants.routing",
        "RoutedMoE",
        "order.flatten().argsort()",
        "order.flatten()",
        "the choices of cp ranks are not in order of the tokens",
    ),
    "bias: by a rank's own load": Fault(
        "variants.balance_bias", "update", "all_reduce(moe.load, group).wait()", "pass", "ranks choose by other biases"
    ),
    "shared experts: no sum over cp": Fault(
        "variants.routing",
        "RoutedMoE",
        'note_layout(param, data_group="data")',
        "pass",
        "their gradients are summed over dp alone",
    ),
    **of(
        "step01_single_gpu",
        "one",
        ("gradient_times_micro_batches", "train", "/ n_targets", "/ (n_targets / len(xs))", "Adam alone would hide it"),
        (
            "last_micro_batch_logged",
            "train",
            "loss = loss + micro_loss",
            "loss = micro_loss",
            "the others are not shown",
        ),
        ("first_norm_for_ever", "train", "norm = torch.nn", "norm = 1.0 if step else torch.nn", "clips by an old norm"),
        ("not_clipped", "Optimizer", "param.grad.mul_(factor)", "param.grad", "the factor is forgotten"),
        (
            "gradients_kept",
            "Optimizer",
            "param.grad = self.masters[name].grad = None",
            "pass",
            "they add up over steps",
        ),
        ("norms_decay", "decay_groups", "weight_decay=0.0", "weight_decay=config.weight_decay", "norms shrink too"),
        ("warm_up_from_zero", "learning_rate", "(step + 1)", "step", "the first step does nothing"),
    ),
    **of(
        "step01_single_gpu",
        "one, uneven",
        (
            "mean_of_means",
            "train",
            "/ n_targets",
            "/ (y != IGNORE).sum().clamp(min=1) / len(xs)",
            "each micro-batch by its own number of targets",
        ),
        (
            "all_tokens_counted",
            "train",
            "(targets != IGNORE).sum()",
            "torch.tensor(targets.numel())",
            "targets that do not count are counted",
        ),
    ),
    **of(
        "step01_single_gpu",
        "one, bf16",
        (
            "sums_in_16_bits",
            "Optimizer",
            "param.grad_dtype = wide(param.dtype)",
            "param.main_grad = None",
            "they round",
        ),
        (
            "gradients_cast_back",
            "Optimizer",
            "param.grad.mul_(factor)",
            "param.grad.bfloat16().float().mul_(factor)",
            "fp32 sums are rounded to bf16 before the update",
        ),
        (
            "masters_rounded",
            "Optimizer",
            "param.detach().copy_(self.masters[name])",
            "self.masters[name].copy_(param.detach().copy_(self.masters[name]))",
            "small updates vanish",
        ),
    ),
    **of(
        "common.model",
        "one",
        (
            "rope_tables_in_bf16",
            "rope_tables",
            "return angle.cos()",
            "return angle.cos().bfloat16().to(dtype)",
            "rounded",
        ),
        ("turned_back", "apply_rope", "(-second, first)", "(second, -first)", "the other direction"),
        ("later_keys_seen", "attend", "is_causal=True", "is_causal=False", "a token sees what it is to guess"),
        ("mean_in_a_micro_batch", "summed_cross_entropy", '"sum"', '"mean"', "divided twice"),
    ),
    **of(
        "common.data",
        "one",
        ("targets_not_shifted", "Data", "rows[:, 1:]", "rows[:, :-1]", "each token is its own target"),
        (
            "same_batch_for_ever",
            "Data",
            "range(step * self.batch_size, (step + 1) * self.batch_size)",
            "range(self.batch_size)",
            "the position in the data does not move",
        ),
    ),
    **of(
        "common.layout",
        "tp",
        ("part_of_rank_0", "take", "split.start : split.stop", ": split.stop - split.start", "all hold the same heads"),
        (
            "scaled_by_local_fan_in",
            "materialize",
            "model.config.n_layers, seed)",
            "model.config.n_layers, seed) * (1 + len(layout_of(param).splits)) ** 0.5",
            "initial values depend on tp",
        ),
        ("copies_counted_in_the_norm", "global_norm", "square() / copies", "square()", "norms count tp times"),
    ),
    **of(
        "common.layout",
        "pp",
        (
            "drawn_by_stage",
            "materialize",
            "draw(name,",
            'draw(name if "0" in model.model.layers else name.replace(".1.", ".0.").replace(".2.", ".0."),',
            "each stage numbers its layers from 0 when it draws them",
        ),
        (
            "drawn_by_own_depth",
            "materialize",
            "model.config.n_layers",
            "len(model.model.layers)",
            "by the stage's depth",
        ),
        (
            "norm_of_own_stage",
            "global_norm",
            "for dim in mesh.sizes:",
            'for dim in {*mesh.sizes} - {"pp"}:',
            "each clips",
        ),
        ("stages_taken_for_copies", "global_norm", '{"pp", *', "{*", "every stage counts 1/pp"),
    ),
    **of(
        "common.comm",
        "zero 2",
        (
            "not_reduced_only_scattered",
            "reduce_scatter",
            "torch.sum(parts.view(group.size, -1), 0, out=output.view(-1))",
            "output.view(-1).copy_(parts.view(group.size, -1)[group.rank])",
            "own gradient only",
        ),
    ),
    **of(
        "step02_ddp",
        "naive",
        (
            "weights_instead_of_gradients",
            "NaiveSync",
            "self.sum_up(param.grad, group)",
            "self.sum_up(param.data.div_(group.size), group)",
            "weights are averaged, gradients stay at home",
        ),
        (
            "averaged",
            "NaiveSync",
            "dist.all_reduce(gradient, group=group.handle)",
            "dist.all_reduce(gradient, group=group.handle), gradient.div_(group.size)",
            "scaled twice",
        ),
        ("loss_of_the_own_rank", "train", 'all_reduce(loss, mesh["dp"]).wait()', "pass", "the logged loss"),
        ("same_sequences_everywhere", "train", "x[mine]", "x[: len(x[mine])]", "all ranks work on rank 0's share"),
    ),
    **of(
        "step02_ddp",
        "naive, uneven",
        (
            "mean_of_ranks_means",
            "train",
            "(targets != IGNORE).sum()",
            'mesh["dp"].size * (targets[mine] != IGNORE).sum()',
            "each rank divides by its own targets",
        ),
    ),
    **of(
        "step02_ddp",
        "ring",
        ("ring_one_round_short", "RingSync", "range(2 * (n - 1))", "range(2 * (n - 1) - 1)", "a piece has an old sum"),
        ("ring_adds_for_ever", "RingSync", " if s < n - 1 else incoming", "", "complete pieces are added once more"),
    ),
    **of(
        "step02_ddp",
        "bucket",
        ("not_summed", "BucketSync", "self.pending.append(all_reduce(bucket.flat, bucket.group))", "pass", "no sum"),
        (
            "last_bucket_forgotten",
            "BucketSync",
            "self.pending.append(all_reduce(bucket.flat, bucket.group))",
            "bucket is self.buckets[-1] or self.pending.append(all_reduce(bucket.flat, bucket.group))",
            "one is left",
        ),
        (
            "summed_twice",
            "BucketSync",
            "self.pending.append(",
            "all_reduce(bucket.flat, bucket.group).wait(), self.pending.append(",
            "as a tied one by both its names",
        ),
        (
            "sent_after_the_first_micro_batch",
            "BucketSync",
            "additions * len(bucket.params)",
            "len(bucket.params)",
            "what later micro-batches add is not summed",
        ),
        ("buckets_not_emptied", "BucketSync", "bucket.flat.zero_()", "pass", "the gradients of the step before stay"),
    ),
    **of(
        "step03_zero",
        "zero 1",
        ("updates_not_gathered", "Zero1", "self.publish()", "pass", "others' slices stay as they were"),
        ("piece_off_by_one", "Unit", "self.first, 0), self.length)", "self.first, 0), self.length - 1)", "one is left"),
        ("norm_of_own_slice", "train", "sliced=config.zero > 0", "sliced=False", "slices are taken for copies"),
        ("slices_not_clipped", "Zero1", ".mul_(factor)", "", "the factor is forgotten"),
    ),
    **of(
        "step03_zero",
        "zero 1 of 3",
        (
            "tail_not_padded",
            "Unit",
            "-(-ends[-1] // group.size)",
            "ends[-1] // group.size",
            "the last elements are lost",
        ),
    ),
    **of(
        "step03_zero",
        "zero 2",
        (
            "slices_not_accumulated",
            "Zero2",
            "unit.grad_slice += unit.total",
            "unit.grad_slice = unit.total",
            "the last",
        ),
        (
            "last_unit_not_landed",
            "Zero2",
            'the last unit."""\n        self.land()',
            'the last unit."""',
            "the embedding",
        ),
        (
            "slices_not_emptied",
            "Zero2",
            "torch.zeros_like(unit.master)",
            "torch.ones_like(unit.master)",
            "they start at 1",
        ),
    ),
    **of(
        "step03_zero",
        "zero 3",
        (
            "memory_without_weights",
            "Zero3",
            "self.fetch(i, max(i - 1, self.lowest))",
            "[unit.flat.zero_() for unit in self.uses[i] if self.fetch(i, i) is None] and None",
            "zero in backward",
        ),
        (
            "gathered_from_itself",
            "SlicedUnit",
            "self.slice, self.group)",
            "self.slice * 0, self.group)",
            "zero weights",
        ),
    ),
    **of(
        "step04_tp_sp",
        "tp, no sp",
        (
            "g_sums_in_backward_too",
            "leave_block",
            "sum_over_ranks, unchanged",
            "sum_over_ranks, sum_over_ranks",
            "as torch.distributed.nn does",
        ),
        (
            "f_does_not_sum_in_backward",
            "enter_block",
            "unchanged, sum_over_ranks",
            "unchanged, unchanged",
            "each goes on with its part of dx",
        ),
        (
            "g_does_not_sum",
            "leave_block",
            "sum_over_ranks, unchanged",
            "unchanged, unchanged",
            "each goes on with its part of the output",
        ),
    ),
    **of(
        "step04_tp_sp",
        "tp",
        (
            "tokens_cut_but_not_summed",
            "enter_block",
            "gather_tokens, sum_and_split_tokens",
            "gather_tokens, lambda dx, g: dx.chunk(g.size, 1)[g.rank].contiguous()",
            "dx of our own heads only",
        ),
        (
            "norm_gradients_not_summed",
            "shard_tensors",
            "if sp and param.dim() == 1",
            "if False",
            "norms learn from their own tokens",
        ),
        ("partial_sums_stay", "sum_partial_gradients", "all_reduce(flat, group).wait()", "pass", "the same, elsewhere"),
        (
            "embedding_off_by_one",
            "VocabParallelEmbedding",
            "(tokens - self.ids.start)",
            "(tokens + 1 - self.ids.start)",
            "row",
        ),
        (
            "target_off_by_one",
            "vocab_parallel_cross_entropy",
            "(targets - ids.start)",
            "(targets + 1 - ids.start)",
            "another token's logit",
        ),
        (
            "padding_in_the_softmax",
            "vocab_parallel_cross_entropy",
            "logits[..., : len(ids)]",
            "logits",
            "counts as words",
        ),
        (
            "softmax_of_own_logits",
            "vocab_parallel_cross_entropy",
            "everyone[:, 0].logsumexp(0)",
            "everyone[group.rank, 0]",
            "the sum of exponentials of a part of the vocabulary",
        ),
        (
            "rows_for_columns",
            "cut_matrix",
            "weight.dim() + dim",
            "weight.dim() - 2",
            "o_proj, down_proj",
        ),
    ),
    **of(
        "step04_tp_sp",
        "tp, tied",
        ("tie_dropped", "shard_tensors", "if config.tied else", "if False else", "head and embedding part"),
    ),
    **of(
        "step05_cp_ring",
        "cp",
        ("not_summed_over_cp", "shard_context", '"data", "dp", "cp"', '"data", "dp"', "dp is 1, so nothing is summed"),
        (
            "loss_of_dp_only",
            "train",
            'all_reduce(loss, mesh["data"])',
            'all_reduce(loss, mesh["dp"])',
            "the logged loss",
        ),
        (
            "positions_ignored",
            "train",
            "model(x, y, here)",
            "model(x, y)",
            "every rank rotates as if it were the first",
        ),
        (
            "labels_shifted_after_the_cut",
            "train",
            "for x in (tokens, targets))",
            "for x in (tokens, targets.index_fill(1, here[-1:], IGNORE)))",
            "a chunk's last token loses its target",
        ),
        (
            "lse_in_bf16",
            "merge",
            "torch.logaddexp(lse, part_lse)",
            "torch.logaddexp(lse, part_lse).bfloat16()",
            "rounded",
        ),
        (
            "not_causal_at_home",
            "zigzag_visible",
            "(both, both, True)",
            "(both, both, False)",
            "own later keys are seen",
        ),
        (
            "cut_in_order",
            "zigzag_positions",
            "(chunks[rank], chunks[-1 - rank])",
            "(chunks[2 * rank], chunks[2 * rank + 1])",
            "the plain ring's tokens, zigzag's rule",
        ),
        (
            "no_final_rotation",
            "RingAttention",
            "arriving.wait()  # the",
            "arriving.wait(), (dkv := outgoing)  # the",
            "one hop from home",
        ),
        (
            "keys_of_hop_0_in_backward",
            "RingAttention",
            "kv = next_kv\n        arriving",
            "pass\n        arriving",
            "the forward is right",
        ),
        ("own_share_only", "RingAttention", "dkv += share", "dkv = share", "what others have added is lost"),
    ),
    **of(
        "step05_cp_ring",
        "cp 3",
        (
            "wrong_source",
            "RingAttention",
            "source = (r - hop) % n",
            "source = (r + hop) % n",
            "the rank on the right",
        ),
    ),
    **of(
        "step06_pipeline",
        "pp",
        (
            "pipeline_loss_not_divided",
            "Pipeline",
            "y / self.n_targets",
            "y / (self.n_targets / len(self.xs))",
            "as many times too large as there are micro-batches",
        ),
        ("targets_of_another", "Pipeline", "self.ys[i]", "self.ys[i - 1]", "of the micro-batch before"),
        ("loss_on_the_last_rank_only", "train", 'all_reduce(loss, mesh["pp"]).wait()', "pass", "others show 0"),
        ("stage_starts_late", "forward_stage", "in place.layers:", "in place.layers[1:]:", "a layer less on each"),
    ),
    **of(
        "common.layout",
        "pp, tied",
        ("tied_counted_twice", "global_norm", "record.stages * mesh.world", "mesh.world", "in the norm"),
    ),
    **of(
        "step06_pipeline",
        "pp, tied",
        ("tied_not_summed", "sum_tied", "gradients[TIED] += theirs", "pass", "each end learns for itself"),
        (
            "tie_dropped_by_the_stage",
            "keep_stage",
            " and not (has_last and model.config.tied)",
            "",
            "the last has none",
        ),
    ),
    **of(
        "step06_pipeline",
        "lists",
        ("last_output_taken", "ListPipeline", "box[waiting] = output,", "box[waiting] = output * 0,", "inside a rank"),
        (
            "lists_forget_loss",
            "Pipeline",
            "self.loss += y.detach()",
            "self.loss = y.detach()",
            "the last one's is shown",
        ),
    ),
    **of(
        "step07_moe_ep",
        "moe",
        ("gates_not_differentiated", "MoE", "top_scores[..., None]", "top_scores.detach()[..., None]", "a deaf router"),
        ("scores_not_normalised", "MoE", "if self.top_k > 1:", "if False:", "they do not sum to one"),
        ("rows_of_other_tokens", "MoE", "token = order // self.top_k", "token = order % len(tokens)", "wrong order"),
        ("balance_not_added", "AddLoss", "ctx.weight, dtype", "0.0, dtype", "nothing spreads the tokens"),
        (
            "balance_per_micro_batch",
            "MoE",
            " * config.micro_batch_size / config.global_batch_size",
            "",
            "its strength grows with accumulation",
        ),
    ),
    **of(
        "step07_moe_ep",
        "moe, cp",
        ("balanced_by_own_tokens", "MoE", "all_reduce(counts, self.sharers).wait()", "pass", "f of a rank's tokens"),
    ),
    **of(
        "step07_moe_ep",
        "moe, tp",
        ("router_not_summed_over_tp", "shard_experts", 'partial_over=("tp",)', "partial_over=()", "copies part"),
        ("balance_times_tp", "MoE", " / config.tp", "", "all tp ranks add the whole of it"),
    ),
    **of(
        "step07_moe_ep",
        "ep",
        ("returned_in_another_order", "visit_experts", "out[order.argsort()]", "out[order]", "rows of other tokens"),
        ("not_sorted_by_expert", "visit_experts", "visitors[order]", "visitors", "others' rows meet the wrong expert"),
        (
            "ep_must_multiply",
            "shard_experts",
            "ranks.shape[1] % ep:",
            "ranks.shape[1] * ep > mesh.world:",
            "ep of 2 ranks",
        ),
    ),
    **of(
        "step07_moe_ep",
        "ep of 4",
        (
            "experts_summed_over_all_data",
            "shard_experts",
            'data_group="expert_data"',
            'data_group="data"',
            "with other experts'",
        ),
        ("experts_averaged", "AllToAll", "AllToAll.apply(grad,", "AllToAll.apply(grad / 2,", "by the ranks of ep"),
    ),
    **of(
        "common.layout",
        "ep",
        (
            "experts_taken_for_copies",
            "global_norm",
            "split.over for split in record.splits",
            'split.over for split in record.splits if split.over != "ep"',
            "the norm takes ours for everyone's",
        ),
    ),
    # services
    "resume-without-moments": Fault(
        "services.boxes",
        "take",
        "optimizer.rule.state[master.tensor][kind] = room.tensor",
        "pass",
        "a resumed AdamW begins anew",
    ),
    "resume-from-rank-0s-slice": Fault(
        "services.boxes",
        "masters",
        "first = max(0, units[name].first - units[name].span[name][0]) if units else 0",
        "first = 0",
        "a slice is read from the beginning of its parameter",
    ),
    "resume-from-rank-0s-rows": Fault(
        "services.boxes",
        "Piece",
        "start[split.dim] += split.start",
        "start[split.dim] += 0",
        "all ranks of tp read the rows of the first",
    ),
    "resume-at-the-first-batch": Fault(
        "services.resume",
        "Keeper",
        'self.done = found.index["step"]',
        "self.done = 0",
        "data and learning rate begin anew",
    ),
    "validation-of-one-rank": Fault(
        "services.evaluation",
        "validate",
        'for dim in ("dp", "cp", "pp"):',
        "for dim in ():",
        "the validation loss is that of one rank's tokens",
    ),
}


def functions_of(thing: Any) -> dict[str, FunctionType]:
    """A function, or all methods of a class, by name."""
    members = vars(thing).items() if inspect.isclass(thing) else [("", thing)]
    plain = {name: getattr(member, "__func__", member) for name, member in members}  # of static methods, what is inside
    return {name: member for name, member in plain.items() if isinstance(member, FunctionType)}


@contextmanager
def injected(name: str) -> Iterator[None]:
    """Inside, the named mistake is in the program: the code of the functions that hold its text is exchanged.

    The functions stay the objects that they are, so menus, importers and `super()` meet the mistake too.
    """
    fault = FAULTS[name]
    module = importlib.import_module(fault.module)
    right = getattr(module, fault.owner)
    source = textwrap.dedent(inspect.getsource(right))
    if fault.old not in source:
        raise KeyError(f"{name}: {fault.old!r} is not in {fault.module}.{fault.owner}")
    made: dict = {}
    exec(compile(source.replace(fault.old, fault.new), f"<fault {name}>", "exec"), vars(module), made)
    wrong, kept = functions_of(made[fault.owner]), functions_of(right)
    codes = {key: function.__code__ for key, function in kept.items()}
    try:
        for key, function in kept.items():
            function.__code__ = wrong[key].__code__
        yield
    finally:
        for key, function in kept.items():
            function.__code__ = codes[key]
