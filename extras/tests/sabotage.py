"""Wrong solutions of the labs' tasks, by (lab, task): (name, owner, old, new, ...), text that changes in the file.

Beside these, a task's `faults` name rows of tests/faults.py. tests/test_labs.py hands each of them in: it loses points.
"""

import ast


def changed(sources: dict[str, str], owner: str, *pairs: str) -> dict[str, str]:
    """Sources, by module, where a function or class has other text: old, new, ... Raises KeyError if one is missing."""
    found = dict(sources)
    for module, text in sources.items():
        for node in ast.parse(text).body:
            if getattr(node, "name", "") == owner:
                part = before = ast.get_source_segment(text, node)
                for old, new in zip(pairs[::2], pairs[1::2], strict=True):
                    if old not in part:
                        raise KeyError(f"{old!r} is not in {owner}")
                    part = part.replace(old, new)
                found[module] = text.replace(before, part)
    if found == sources:
        raise KeyError(f"there is no {owner}")
    return found


ROWS: dict[tuple[int, int], list[tuple[str, ...]]] = {
    (1, 1): [
        ("the cosine ends at zero", "learning_rate", "0.1 + 0.45", "0.5"),
    ],
    (1, 2): [
        ("PyTorch's betas", "adamw", "(0.9, 0.95)", "(0.9, 0.999)"),
    ],
    (1, 3): [
        ("the first learning rate for ever", "Optimizer", 'group["lr"] = lr', 'group.setdefault("lr", lr)'),
        ("what is not trained has a master", "Optimizer", " if param.requires_grad}", "}"),
    ],
    (1, 4): [
        ("one layer is left out", "recompute_layers", "model.model.layers.values()", "[model.model.layers['0']]"),
        ("nothing is recomputed", "recompute_layers", "layer.forward = ", "layer.other = "),
    ],
    (1, 5): [
        ("the loss is not detached", "train", "micro_loss.detach()", "micro_loss"),
        ("small norms are scaled up", "train", "min(1.0, config.grad_clip / norm)", "config.grad_clip / norm"),
    ],
    (2, 1): [
        ("not waited for", "NaiveSync", "group=group.handle)", "group=group.handle, async_op=True)"),
        ("all are summed over dp", "NaiveSync", "data_parallel_group(param, self.mesh)", 'self.mesh["dp"]'),
        ("no guard for a group of one", "NaiveSync", "if group.size > 1:", "if True:"),
    ],
    (2, 2): [
        ("what arrives has another dtype", "RingSync", "torch.empty_like(target)", "torch.zeros(target.shape)"),
        ("torch's all-reduce after all", "RingSync", "        for s in range(2 * (n - 1)):",
         "        dist.all_reduce(gradient, group=group.handle)\n        for s in range(0):"),
        ("only the first half", "RingSync", "range(2 * (n - 1))", "range(n - 1)"),
        ("a ring of the whole world", "RingSync",
         "n, r = group.size, group.rank",
         "n, r = dist.get_world_size(), dist.get_rank()"),
    ],
    (2, 3): [
        ("a buffer in the parameters' dtype", "Bucket", "params[0].grad_dtype", "params[0].dtype"),
        ("bytes of the parameters", "fill_buckets", "param.grad_dtype.itemsize", "param.itemsize"),
        ("a bucket may not be exactly full", "fill_buckets", "size > room", "size >= room"),
        ("groups are mixed", "fill_buckets", " or group is not last_group", ""),
    ],
    (2, 4): [
        ("no hook", "BucketSync", "param.register_post_accumulate_grad_hook(partial(self.mark_ready, bucket))", "pass"),
        ("a late-binding lambda", "BucketSync", "partial(self.mark_ready, bucket)",
         "lambda p: self.mark_ready(bucket, p)"),
        ("waiting at once", "BucketSync", "self.pending.append(all_reduce(bucket.flat, bucket.group))",
         "all_reduce(bucket.flat, bucket.group).wait()"),
        ("sent out of order", "BucketSync",
         "        while self.unsent and self.unsent[0].missing == 0:\n            self.send(self.unsent.pop(0))",
         "        if bucket.missing == 0:\n            self.unsent.remove(bucket), self.send(bucket)"),
        ("dp whatever the record says", "BucketSync",
         "fill_buckets(backwards, mesh,",
         "fill_buckets(backwards, dict.fromkeys(mesh.groups, mesh[\"dp\"]),"),
        ("the last sum alone is awaited", "BucketSync",
         "        for pending in self.pending:\n"
         "            pending.wait()",
         "        self.pending[-1].wait()"),
        ("sums of earlier steps are kept", "BucketSync",
         "self.unsent, self.pending = list(self.buckets), []",
         "self.unsent, self.pending = list(self.buckets), getattr(self, 'pending', [])"),
        ("hooks on what does not train", "BucketSync", "if param.requires_grad]", "]"),
    ],
    (2, 5): [
        ("the sync begins with one addition", "train", "sync.begin(len(xs))", "sync.begin(1)"),
        ("the first learning rate for ever", "train", "learning_rate(step, config)", "learning_rate(0, config)"),
        ("clip 0 leaves nothing", "train", "if config.grad_clip and norm else 1.0", "if norm else 1.0"),
        ("recomputation is ignored", "train", "RECOMPUTE[config.recompute](model)", "pass"),
        ("a new optimizer in each step", "train",
         "sync.begin(len(xs))",
         "sync.begin(len(xs)), optimizer.torch_optimizer.state.clear()"),
    ],
    (3, 1): [
        ("a layer's number has one digit", "unit_names", "layers\\.\\d+", "layers\\.\\d"),
        ("a part is a copy", "Unit", "return shard[start:stop]", "return shard[start:stop].clone()"),
        ("units with others' parameters", "unit_names", "(module, layout_of(param).data_dim)", '(module, "")'),
    ],
    (3, 2): [
        ("an all-reduce", "Zero1",
         "        return reduce_scatter(unit.reduced_shard, unit.gradient, unit.group)",
         "        all_reduce(unit.gradient, unit.group).wait()\n"
         "        unit.reduced_shard.copy_(unit.gradient[unit.first : unit.first + unit.length])\n"
         "        return Pending()"),
        ("our own shard, not summed", "Zero1",
         "        return reduce_scatter(unit.reduced_shard, unit.gradient, unit.group)",
         "        unit.reduced_shard.copy_(unit.gradient[unit.first : unit.first + unit.length])\n"
         "        return Pending()"),
    ],
    (3, 3): [
        ("the first learning rate for ever", "Zero1", 'group["lr"] = lr', 'group.setdefault("lr", lr)'),
        ("masters are not copied back", "Zero1", "unit.shard.copy_(unit.master)", "pass"),
        ("gradients stay", "Zero1", "unit.gradient = unit.reduced_shard = unit.grad_shard = None", "pass"),
        (".grad stays", "Zero1", "                param.grad = None", "                pass"),
        ("weights are not awaited", "Zero1",
         "        for pending in [all_gather(unit.flat, unit.shard, unit.group) for unit in self.units]:\n"
         "            pending.wait()",
         "        self.arriving = [all_gather(unit.flat, unit.shard, unit.group) for unit in self.units]"),
    ],
    (3, 4): [
        ("waiting at once", "Zero2", "self.in_flight = unit, self.reduce(unit)",
         "self.in_flight = unit, self.reduce(unit)\n        self.land()"),
        ("whole gradients stay", "Zero2", "param.grad = None\n        unit.missing", "unit.missing"),
        ("what does not train is missing", "Zero2", "len(unit.trained)", "len(unit.named)"),
    ],
    (3, 5): [
        ("never freed", "ShardedUnit", "self.flat.untyped_storage().resize_(0)", "pass"),
        ("gathered again", "ShardedUnit", "if not self.gathered:", "if self.gathering.wait() is None:"),
        ("freed while it arrives", "ShardedUnit",
         "            self.gathering.wait()\n"
         "            self.flat",
         "            self.flat"),
    ],
    (3, 6): [
        ("nothing is gathered in advance", "Zero3", "[*self.uses[i], *self.uses[ahead]]", "self.uses[i]"),
        ("weights stay after forward", "Zero3", "                unit.free()", "                pass"),
        ("a tied head's weights go", "Zero3", "if unit not in self.uses[min(i + 1, len(self.uses) - 1)]:", "if True:"),
        ("fetch waits for both", "Zero3",
         "        for unit in self.uses[i]:\n"
         "            unit.gathering.wait()",
         "        for unit in [*self.uses[i], *self.uses[ahead]]:\n"
         "            unit.gathering.wait()"),
        ("a hook where there is no graph", "Zero3", "output.requires_grad and ", ""),
    ],
    (4, 1): [
        ("the caller's tensor", "sum_over_ranks", "x.clone(memory_format=torch.contiguous_format)", "x.contiguous()"),
        ("parts side by side", "gather_tokens", "shards.movedim(0, 1)", "shards.movedim(0, 2)"),
        ("tokens of the own part alone", "sum_and_shard_tokens",
         "reduce_scatter(ours.view(-1), shards.view(-1), group).wait()",
         "ours.copy_(shards[group.rank])"),
    ],
    (4, 2): [
        ("sp the other way round in f", "enter_block", "if sp:", "if not sp:"),
        ("sp is ignored in g", "leave_block", "if sp:", "if False:"),
    ],
    (4, 3): [
        ("exp and a sum", "VocabParallelCrossEntropy", "[:, 0].logsumexp(0)", "[:, 0].exp().sum(0).log()"),
        ("no one-hot", "VocabParallelCrossEntropy", "gradient.scatter_add_", "torch.scatter_add"),
        ("targets that do not count", "VocabParallelCrossEntropy", ".where(targets != IGNORE, 0.0).sum()", ".sum()"),
        ("others' tokens get a row", "VocabParallelEmbedding", " * held[..., None]", ""),
    ],
    (4, 4): [
        ("nothing is cut", "shard_tensors", "if group.size == 1:", "if True:"),
        ("norms are summed without SP, too", "shard_tensors", "if sp and param.dim() == 1", "if param.dim() == 1"),
        ("SP whatever the flag says", "shard_tensors", "leave_block(x, group, sp)", "leave_block(x, group, True)"),
        ("the earlier shards are forgotten", "shard_param", "(*layout_of(weight).shards, shard)", "(shard,)"),
    ],
    (4, 5): [
        ("new tensors", "sum_partial_gradients", "grad.copy_(total.view_as(grad))", "grad = total"),
        ("too many sums", "sum_partial_gradients", "if group.name in layout_of(params[name]).partial_over", "if True"),
    ],
    (5, 1): [
        ("no part is causal", "part_attention", "scaled_scores(q, k, causal)", "scaled_scores(q, k, False)"),
        ("merge: parts count alike", "merge", "torch.sigmoid(part_lse - lse)[..., None]", "0.5"),
        ("merge: exp overflows", "merge", "torch.logaddexp(lse, part_lse)", "(lse.exp() + part_lse.exp()).log()"),
        ("merge: not in place", "merge", "o.lerp_(", "o = o.lerp("),
        ("merge: without a cast", "merge", "part_o.to(o.dtype)", "part_o"),
        ("merge: changes its input", "merge",
         "o.lerp_(part_o.to(o.dtype), torch.sigmoid(part_lse - lse)[..., None])",
         "o.add_(part_o.to(o.dtype).sub_(o).mul_(torch.sigmoid(part_lse - lse)[..., None]))"),
    ],
    (5, 2): [
        ("zigzag: before and after", "zigzag_visible", "source < rank", "source > rank"),
        ("zigzag: all see all", "zigzag_visible", "(whole, first, False)", "(whole, whole, False)"),
        ("zigzag: an odd number of tokens", "zigzag_positions", "if seq_len % (2 * n):", "if False:"),
        ("zigzag: half of a rounded quotient", "zigzag_positions", "seq_len % (2 * n)", "(seq_len // n) % 2"),
    ],
    (5, 3): [
        ("backward: softmax of the part", "part_gradients", "p = (scaled_scores(q, k, causal) - lse[..., None]).exp()",
         "p = scaled_scores(q, k, causal).softmax(-1)"),
        ("backward: without rowsum", "part_gradients", "(dp - delta)", "dp"),
        ("backward: in 16 bits", "part_gradients",
         "q, k, v, o, do = same_heads(q, k, v, o, do)",
         "q, k, v, o, do = (x.to(k.dtype) for x in same_heads(q, k, v, o, do))"),
    ],
    (5, 4): [
        ("ring: waits at once", "RingAttention", "            for queries, keys, causal in visible(r",
         "            sending.wait() if hop + 1 < n else None\n            for queries, keys, causal in visible(r"),
        ("ring: backward waits for sums at once", "RingAttention", "[(dkv, (r - 1) % n)], ctx.group)\n",
         "[(dkv, (r - 1) % n)], ctx.group)\n            arriving.wait()\n"),
        ("ring: every part is kept", "RingAttention", "                kv = next_kv\n        o = o",
         "                kv = next_kv\n                ctx.parts = [*getattr(ctx, 'parts', []), kv]\n        o = o"),
        ("ring: zigzag whatever `visible` says", "RingAttention", " in visible(", " in zigzag_visible("),
        ("ring: backward, too", "RingAttention", "ctx.visible(", "zigzag_visible("),
        ("ring: sums in 16 bits", "RingAttention", "(torch.zeros_like(x, dtype=wide(q.dtype)) for x in (q, kv))",
         "(torch.zeros_like(x) for x in (q, kv))"),
        ("ring: a message too many", "RingAttention", "if hop + 1 < n:", "if True:"),
        ("ring: received after the work", "RingAttention",
         "sending = exchange([(kv, (r + 1) % n)], [(next_kv, (r - 1) % n)], group)",
         "sending = exchange([(kv, (r + 1) % n)], [], group)",
         "                sending.wait()\n"
         "                kv = next_kv\n"
         "        o = o",
         "                exchange([], [(next_kv, (r - 1) % n)], group).wait()\n"
         "                sending.wait()\n"
         "                kv = next_kv\n"
         "        o = o"),
        ("ring: the output is kept on ctx", "RingAttention",
         "ctx.group, ctx.visible = group, visible",
         "ctx.group, ctx.visible, ctx.o = group, visible, o"),
        ("ring: all parts are held", "RingAttention",
         "own = kv = torch.stack((k, v))",
         "own = kv = torch.stack((k, v))\n"
         "        held = []",
         "                kv = next_kv\n"
         "        o = o",
         "                held.append(kv)\n"
         "                kv = next_kv\n"
         "        o = o"),
    ],
    (5, 5): [
        ("heads repeated before the ring", "ring_attention", "for x in (q, k, v))",
         "for x in (q, *(y.repeat_interleave(q.shape[2] // y.shape[2], 2) for y in (k, v))))"),
        ("ring_attention: zigzag only", "ring_attention", "group, visible, kernel)", "group, zigzag_visible, kernel)"),
        ("records forget data", "shard_context", 'note_layout(param, data_dim="data")', "pass"),
        ("first layer only", "shard_context", "model.model.layers.values()", "[model.model.layers['0']]"),
        ("tokens tp cannot divide", "shard_context", "if sp and len(positions) % tp.size:", "if False:"),
    ],
    (6, 1): [
        ("1F1B: one forward too few", "one_f_one_b", "p - 1 - rank", "p - 2 - rank"),
        ("1F1B: as afab", "one_f_one_b", "p - 1 - rank", "m"),
        ("interleaved: backwards in order of forwards", "one_f_one_b_order", "reversed(stages)", "stages"),
        ("interleaved: as afab", "interleaved", "(v - 1) * p + min(v, 2) * (p - 1 - rank)", "v * m"),
        ("interleaved: rounds that are not full", "interleaved", "if v > 1 and m % p:", "if False:"),
        ("interleaved: all forward if m = p", "interleaved",
         "warm_up=(v - 1) * p + min(v, 2) * (p - 1 - rank))",
         "warm_up=v * m if m == p else (v - 1) * p + min(v, 2) * (p - 1 - rank))"),
    ],
    (6, 2): [
        ("a stage forgets positions", "forward_stage", "rope_tables(positions,",
         "rope_tables(torch.arange(len(positions)),"),
        ("the output is kept", "Pipeline", "= x, get_gradient_edge(y)", "= x, y"),
        ("the last loss only", "Pipeline", "self.loss += y", "self.loss = y"),
        ("graphs are never popped", "Pipeline", "self.graphs.pop((i, stage))", "self.graphs[i, stage]"),
        ("RoPE in 16 bits", "forward_stage", "wide(x.dtype)", "x.dtype"),
    ],
    (6, 3): [
        ("a send before the receive", "Pipeline", "exchange(sends, receives, self.group).wait()",
         "exchange(sends, [], self.group).wait(); exchange([], receives, self.group).wait()"),
        ("all forwards first", "OneForwardOneBackward", "min(m, self.group.size - 1 - stage)", "m"),
        ("few micro-batches forgotten", "OneForwardOneBackward", "min(m, self.group.size - 1 - stage)",
         "self.group.size - 1 - stage"),
        ("dx of the wrong micro-batch", "OneForwardOneBackward", "self.backward(i - warm_up, stage, dy)",
         "self.backward(i, stage, dy)"),
        ("AFAB: gradients in the order of a stack", "Pipeline", "dx = self.backward(i, stage, dy)",
         "dx = self.backward(m - 1 - i, stage, dy)"),
        ("peers by their world ranks", "Pipeline",
         "        exchange(sends, receives, self.group).wait()",
         "        import torch.distributed as dist\n"
         "        works = [dist.isend(x, to, group=self.group.handle) for x, to in sends]\n"
         "        for work in works + [dist.irecv(x, of, group=self.group.handle) for x, of in receives]:\n"
         "            work.wait()"),
        ("two exchanges where one is needed", "OneForwardOneBackward",
         "dy = self.send_forward(y, recv_backward=i - warm_up)",
         "self.send_forward(y)\n"
         "            dy = self.recv_backward(i - warm_up)"),
    ],
    (6, 4): [
        ("receives at the end", "add_messages", 'programs[peer].append(Instruction("receive", needs_it, rank))',
         'programs[peer].insert(0, Instruction("receive", needs_it, rank))'),
        ("messages inside a rank", "add_messages", " and (peer := places[needs_it.stage].rank) != rank",
         " and ((peer := places[needs_it.stage].rank) or True)"),
        ("receives awaited where posted", "ListPipeline", "exchange([], [(buffer, peer)], self.group)\n",
         "exchange([], [(buffer, peer)], self.group)\n                box[action][1].wait()\n"),
        ("sends awaited at once", "ListPipeline", "[(box.pop(action)[0], peer)], [], self.group)\n",
         "[(box.pop(action)[0], peer)], [], self.group)\n                sent[peer].wait()\n"),
        ("inputs are not awaited", "ListPipeline", "                pending.wait()\n                output",
         "                output"),
        ("sends are held to the end", "ListPipeline",
         "                sent[peer].wait()\n"
         "                sent[peer] = exchange(",
         "                sent[peer, action] = exchange("),
        ("the last send is never awaited", "ListPipeline",
         "        for pending in sent.values():\n"
         "            pending.wait()",
         "        pass"),
        ("peers by direction", "ListPipeline",
         "(box.pop(action)[0], peer)",
         "(box.pop(action)[0], (self.group.rank + (1 if action.kind == 'F' else -1)) % self.group.size)",
         "exchange([], [(buffer, peer)]",
         "exchange([], [(buffer, (self.group.rank - (1 if action.kind == 'F' else -1)) % self.group.size)]"),
    ],
    (6, 5): [
        ("all embeddings count twice", "keep_stage", "elif model.config.tied and places[0].rank != places[-1].rank:",
         "elif model.config.tied:"),
        ("layers of the first stage only", "keep_stage", "for place in mine for n", "for place in mine[:1] for n"),
        ("absent modules are deleted", "keep_stage",
         "trunk.norm = model.lm_head = None",
         "del trunk.norm, model.lm_head"),
        ("sum_tied: a new tensor", "sum_tied",
         "gradients[TIED] += theirs",
         "gradients[TIED] = gradients[TIED] + theirs"),
    ],
    (7, 1): [
        ("experts in another order", "ExpertLinear", "self.weight, strict", "self.weight.flip(0), strict"),
        ("silu of the wrong matrix", "Experts", "F.silu(self.gate_proj(rows, counts)) * self.up_proj(rows, counts)",
         "F.silu(self.up_proj(rows, counts)) * self.gate_proj(rows, counts)"),
    ],
    (7, 2): [
        ("one score divided by itself", "MoE", "if self.top_k > 1:", "if True:"),
        ("router in 16 bits", "MoE", "wide(x.dtype)", "x.dtype"),
        ("experts that nobody chose", "MoE", "F.one_hot(experts_TK.flatten(), p_TE.shape[-1]).sum(0)",
         "torch.bincount(experts_TK.flatten())"),
    ],
    (7, 3): [
        ("weight times dy", "AddLoss", "grad.new_full((), ctx.coeff, dtype=wide(grad.dtype))",
         "ctx.coeff * grad.sum()"),
        ("counts summed in place", "MoE", "num_tokens_per_expert_E.clone()", "num_tokens_per_expert_E"),
        ("P of own tokens", "MoE", "/ n_tokens", "/ len(p_TE)"),
    ],
    (7, 4): [
        ("backward sends as forward", "visit_experts", "there, home)\n", "there, there)\n"),
        ("counts of this rank", "visit_experts", "experts(rows_RD, arriving_Ge.sum(0))",
         "experts(rows_RD, leaving_Ge[group.rank] * len(rows_RD) // max(1, len(rows_RD)))"),
    ],
    (7, 5): [
        ("dense layers forgotten", "shard_experts", "config.dense_layers + ", ""),
        ("ep multiplies", "shard_experts", 'mesh.enter("ep", grid)', 'mesh.enter("ep", grid.reshape(ep, -1).T)'),
        ("experts are not cut", "shard_experts", 'shard_param(linear.weight, 0, mesh["ep"])', "linear.weight"),
        ("too many experts a token", "shard_experts", "config.experts_per_token > config.experts:", "False:"),
    ],
}  # fmt: skip
