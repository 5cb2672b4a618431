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
    Fault("step05_cp_ring", "model(x, y, here) / n_targets", 'model(x, y, here) / ((y != IGNORE).sum().clamp(min=1) * len(xs) * mesh["data"].size)', "test_step05::test_cp_trains_to_step_1s_numbers", "a mean of means: https://github.com/huggingface/transformers/issues/24725"),  # noqa: E501
    Fault("step05_cp_ring", "(targets != IGNORE).sum().clamp(min=1)", '(targets[mine] != IGNORE).sum().clamp(min=1) * mesh["dp"].size', "test_step05::test_cp_trains_to_step_1s_numbers", "each rank counts its own targets: https://github.com/pytorch/torchtitan/pull/2206"),  # noqa: E501
    Fault("step05_cp_ring", "learning_rate(step, config)", 'learning_rate(step * mesh["dp"].size, config)', "test_step05::test_cp_trains_to_step_1s_numbers", "the schedule runs faster with ranks: https://github.com/huggingface/accelerate/issues/662"),  # noqa: E501
    Fault("step05_cp_ring", "micro_loss = model(x, y, here) / n_targets", 'micro_loss = model(x, y, here) / n_targets * mesh["cp"].size', "test_step05::test_cp_trains_to_step_1s_numbers", "the loss times cp: https://github.com/NVIDIA/Megatron-LM/issues/906"),  # noqa: E501
    Fault("step05_cp_ring", "for x in (tokens, targets))\n        loss", "for x in (tokens, targets.index_fill(1, here[-1:], IGNORE)))\n        loss", "test_step05::test_what_is_given_to_the_model_and_sent", "a chunk's last token loses its target: https://github.com/huggingface/transformers/pull/36607"),  # noqa: E501
    Fault("step05_cp_ring", "        loss = 0.0\n        sync", "        ys = tuple(x.roll(-1, 1) for x in xs)\n        loss = 0.0\n        sync", "test_step05::test_what_is_given_to_the_model_and_sent", "labels are shifted after the cut: https://github.com/huggingface/transformers/pull/36607"),  # noqa: E501
    Fault("step05_cp_ring", "                kv = next_kv\n        arriving.wait()", "                pass\n        arriving.wait()", "test_step05::test_ring_backward", "backward has keys of another hop; the forward is right: https://github.com/NVIDIA/Megatron-LM/issues/1464"),  # noqa: E501
    Fault("step05_cp_ring", "dq, dkv = (torch.zeros_like(x, dtype=wide(q.dtype)) for", "dq, dkv = (torch.zeros_like(x) for", "test_step05::test_ring_of_bf16", "gradients are added up in 16 bits: https://github.com/zhuzilin/ring-flash-attention/issues/42"),  # noqa: E501
    Fault("step05_cp_ring", "o = torch.zeros_like(q, dtype=wide(q.dtype))", "o = torch.zeros_like(q)", "test_step05::test_ring_of_bf16", "outputs are added up in 16 bits: https://github.com/zhuzilin/ring-flash-attention/issues/42"),  # noqa: E501
    Fault("step05_cp_ring", "            arriving.wait()  # dkv: what", "            # dkv: what", "test_step05::test_ring_backward", "a sum is used that has not arrived: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step05_cp_ring", "        arriving.wait()  # the gradient", "        # the gradient", "test_step05::test_ring_backward", "the last sum is used before it has arrived: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step05_cp_ring", "                sending.wait()\n                kv = next_kv\n        o =", "                kv = next_kv\n        o =", "test_step05::test_ring_forward", "k and v are used that have not arrived: https://github.com/deepspeedai/DeepSpeed/issues/8061"),  # noqa: E501
    Fault("step05_cp_ring", "                sending.wait()\n                kv = next_kv\n        arriving", "                kv = next_kv\n        arriving", "test_step05::test_ring_backward", "k and v are used that have not arrived, in backward"),  # noqa: E501
    Fault("step05_cp_ring", '"data", "dp", "cp"', '"data", "dp"', "test_step05::test_shard_context", "gradients are not summed over cp"),  # noqa: E501
    Fault("step05_cp_ring", 'all_reduce(loss, mesh["data"])', 'all_reduce(loss, mesh["dp"])', "test_step05::test_cp_trains_to_step_1s_numbers", "the logged loss is that of dp"),  # noqa: E501
    Fault("step05_cp_ring", "model(x, y, here)", "model(x, y)", "test_step05::test_cp_trains_to_step_1s_numbers", "every rank rotates as if its tokens were the first"),  # noqa: E501
    Fault("step05_cp_ring", "torch.logaddexp(lse, part_lse)", "torch.logaddexp(lse, part_lse).bfloat16()", "test_step05::test_merge_of_the_docstrings_example", "lse is rounded to 16 bits"),  # noqa: E501
    Fault("step05_cp_ring", "(whole, whole, True)", "(whole, whole, False)", "test_step05::test_zigzag_visible", "own later keys are seen"),  # noqa: E501
    Fault("step05_cp_ring", "(chunks[rank], chunks[-1 - rank])", "(chunks[2 * rank], chunks[2 * rank + 1])", "test_step05::test_zigzag_positions", "tokens in order, and the rule of zigzag"),  # noqa: E501
    Fault("step05_cp_ring", "arriving.wait()  # the", "arriving.wait(), (dkv := outgoing)  # the", "test_step05::test_ring_backward", "gradients are one hop from home"),  # noqa: E501
    Fault("step05_cp_ring", "dkv += found", "dkv = found", "test_step05::test_ring_backward", "what other ranks have added is lost"),  # noqa: E501
    Fault("step05_cp_ring", "torch.sigmoid(part_lse - lse)", "torch.where(lse.isinf(), 1.0, 0.5).to(lse)", "test_step05::test_merge_of_the_docstrings_example", "parts are averaged, whatever they weigh"),  # noqa: E501
    Fault("step05_cp_ring", "            source = (r - hop) % n  # whose", "            source = (r + hop) % n  # whose", "test_step05::test_ring_forward", "the rank on the right is taken for the one on the left"),  # noqa: E501
    Fault("step05_cp_ring", "            source = (r - hop) % n\n", "            source = (r + hop) % n\n", "test_step05::test_ring_backward", "in backward, too"),  # noqa: E501
    Fault("step05_cp_ring", "for x in (q, k, v)), group", "for x in (q, *(x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v)))), group", "test_step05::test_ring_forward", "heads are repeated before they travel: more bytes"),  # noqa: E501
    Fault("step05_cp_ring", "p = (scaled_scores(q, k, causal) - lse[..., None]).exp()", "p = scaled_scores(q, k, causal).softmax(-1)", "test_step05::test_part_gradients", "the softmax of this part alone"),  # noqa: E501
    Fault("step05_cp_ring", "dq[:, :, queries] += part_dq", "dq[:, :, queries] = part_dq", "test_step05::test_ring_backward", "only the last part counts in a query's gradient"),  # noqa: E501
    Fault("step05_cp_ring", "ds = p * (dp - delta)", "ds = p * dp", "test_step05::test_part_gradients", "D is left out"),  # noqa: E501
    Fault("step05_cp_ring", "scores = scaled_scores(q, k, causal)", "scores = scaled_scores(q, k, False)", "test_step05::test_part_attention", "no part is causal"),  # noqa: E501
    Fault("step05_cp_ring", "torch.sigmoid(part_lse - lse)[..., None]", "0.5", "test_step05::test_merge_of_the_docstrings_example", "parts count alike"),  # noqa: E501
    Fault("step05_cp_ring", "torch.logaddexp(lse, part_lse)", "(lse.exp() + part_lse.exp()).log()", "test_step05::test_merge_of_three_parts", "e^882 is infinite"),  # noqa: E501
    Fault("step05_cp_ring", "o.lerp_(", "o = o.lerp(", "test_step05::test_merge_of_the_docstrings_example", "not in place"),  # noqa: E501
    Fault("step05_cp_ring", "part_o.to(o.dtype)", "part_o", "test_step05::test_merge_of_the_docstrings_example", "no cast of a part of 16 bits"),  # noqa: E501
    Fault("step05_cp_ring", "o.lerp_(part_o.to(o.dtype), torch.sigmoid(part_lse - lse)[..., None])", "o.add_(part_o.to(o.dtype).sub_(o).mul_(torch.sigmoid(part_lse - lse)[..., None]))", "test_step05::test_merge_of_three_parts", "merge changes its input"),  # noqa: E501
    Fault("step05_cp_ring", "source < rank", "source > rank", "test_step05::test_zigzag_visible", "before and after are exchanged"),  # noqa: E501
    Fault("step05_cp_ring", "(whole, first, False)", "(whole, whole, False)", "test_step05::test_zigzag_visible", "later keys of earlier ranks are seen"),  # noqa: E501
    Fault("step05_cp_ring", "if seq_len % (2 * n):", "if False:", "test_step05::test_zigzag_positions", "chunks that are not equally long"),  # noqa: E501
    Fault("step05_cp_ring", "seq_len % (2 * n)", "(seq_len // n) % 2", "test_step05::test_zigzag_positions", "half of a rounded quotient"),  # noqa: E501
    Fault("step05_cp_ring", "(dp - delta)", "(dp + delta)", "test_step05::test_part_gradients", "D's sign"),
    Fault("step05_cp_ring", "q, k, v, o, do = same_heads(q, k, v, o, do)", "q, k, v, o, do = (x.to(k.dtype) for x in same_heads(q, k, v, o, do))", "test_step05::test_part_gradients", "a part of the gradients is found in 16 bits"),  # noqa: E501
    Fault("step05_cp_ring", "            for queries, keys, causal in visible(r", "            sending.wait() if hop + 1 < n else None\n            for queries, keys, causal in visible(r", "test_step05::test_law_of_messages_and_work", "waits at once: nothing is hidden"),  # noqa: E501
    Fault("step05_cp_ring", "            arriving = exchange([(outgoing, (r + 1) % n)], [(dkv, (r - 1) % n)], ctx.group)\n", "            arriving = exchange([(outgoing, (r + 1) % n)], [(dkv, (r - 1) % n)], ctx.group)\n            arriving.wait()\n", "test_step05::test_law_of_messages_and_work", "waits for sums at once: nothing is hidden"),  # noqa: E501
    Fault("step05_cp_ring", "                kv = next_kv\n        o =", "                kv = next_kv\n                ctx.parts = [*getattr(ctx, 'parts', []), kv]\n        o =", "test_step05::test_law_of_live_memory", "all k and v are kept for backward"),  # noqa: E501
    Fault("step05_cp_ring", " in visible(", " in zigzag_visible(", "test_step05::test_ring_forward", "zigzag, whatever the rule is"),  # noqa: E501
    Fault("step05_cp_ring", "ctx.visible(r", "zigzag_visible(r", "test_step05::test_ring_backward", "in backward, too"),
    Fault("step05_cp_ring", "            if hop + 1 < n:  # send", "            if True:  # send", "test_step05::test_ring_forward", "a message too many"),  # noqa: E501
    Fault("step05_cp_ring", "            if hop + 1 < n:\n                next_kv", "            if True:\n                next_kv", "test_step05::test_ring_backward", "a message too many in backward"),  # noqa: E501
    Fault("step05_cp_ring", "[(kv, (r + 1) % n)], [(next_kv, (r - 1) % n)], group)", "[(kv, (r + 1) % n)], [], group)\n                exchange([], [(next_kv, (r - 1) % n)], group).wait()", "test_step05::test_law_of_messages_and_work", "received before the work"),  # noqa: E501
    Fault("step05_cp_ring", "ctx.group, ctx.visible = group, visible", "ctx.group, ctx.visible, ctx.o = group, visible, o", "test_step05::test_law_of_live_memory", "ctx keeps the output: a cycle"),  # noqa: E501
    Fault("step05_cp_ring", "            if hop + 1 < n:\n                sending.wait()\n                kv = next_kv\n        o =", "            held = [*(held if hop else []), kv]\n            if hop + 1 < n:\n                sending.wait()\n                kv = next_kv\n        o =", "test_step05::test_law_of_live_memory", "forward holds all k and v"),  # noqa: E501
    Fault("step05_cp_ring", "(q, k, v)), group, visible, kernel)", "(q, k, v)), group, zigzag_visible, kernel)", "test_step05::test_ring_forward", "ring_attention has one rule"),  # noqa: E501
    Fault("step05_cp_ring", 'note_layout(param, data_dim="data")', "pass", "test_step05::test_shard_context", "records do not name dp x cp"),  # noqa: E501
    Fault("step05_cp_ring", "model.model.layers.values()", '[model.model.layers["0"]]', "test_step05::test_shard_context", "only the first layer goes round the ring"),  # noqa: E501
    Fault("step05_cp_ring", "if sp and len(positions) % tp.size:", "if False:", "test_step05::test_shard_context", "tokens that tp cannot divide"),  # noqa: E501
    # --- chapter 6, and common/schedules.py
    # --- chapter 7
]
