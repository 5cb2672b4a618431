"""Wrong solutions of the labs' tasks, by (lab, task): (name, owner, old, new), text that changes in the step's file.

Beside these, a task's `faults` name rows of tests/faults.py. tests/test_labs.py hands each of them in: it loses points.
"""

ROWS: dict[tuple[int, int], list[tuple[str, str, str, str]]] = {
    (1, 1): [("the cosine ends at zero", "learning_rate", "0.1 + 0.45", "0.5")],
    (1, 2): [("PyTorch's betas", "adamw", "(0.9, 0.95)", "(0.9, 0.999)")],
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
        ("small norms are scaled up", "train", "/ max(norm, config.grad_clip)", "/ norm"),
    ],
    (2, 1): [
        ("not waited for", "NaiveSync", "group=group.handle)", "group=group.handle, async_op=True)"),
        ("all are summed over dp", "NaiveSync", "self.mesh[layout_of(param).data_group]", 'self.mesh["dp"]'),
    ],
    (2, 2): [
        ("what arrives has another dtype", "RingSync", "torch.empty_like(own)", "torch.zeros(own.shape)"),
        (
            "torch's all-reduce after all",
            "RingSync",
            "        for s in range(2 * (n - 1)):",
            "        dist.all_reduce(gradient, group=group.handle)\n        for s in range(0):",
        ),
        ("only the first half", "RingSync", "range(2 * (n - 1))", "range(n - 1)"),
    ],
    (2, 3): [
        ("a buffer in the parameters' dtype", "Bucket", "params[0].grad_dtype", "params[0].dtype"),
        ("bytes of the parameters", "group_params", "p.grad_dtype.itemsize", "p.itemsize"),
        ("a list may not be exactly full", "group_params", "> limit", ">= limit"),
        ("groups are mixed", "group_params", "setdefault(layout_of(param).data_group", 'setdefault("dp"'),
    ],
    (2, 4): [
        ("no hook", "BucketSync", "param.register_post_accumulate_grad_hook(partial(self.added, bucket))", "pass"),
        ("a late-binding lambda", "BucketSync", "partial(self.added, bucket)", "lambda p: self.added(bucket, p)"),
        (
            "waiting at once",
            "BucketSync",
            "self.pending.append(all_reduce(bucket.flat, bucket.group))",
            "all_reduce(bucket.flat, bucket.group).wait()",
        ),
        (
            "sent out of order",
            "BucketSync",
            "        while self.unsent and self.unsent[0].missing == 0:\n            self.send(self.unsent.pop(0))",
            "        if bucket.missing == 0:\n            self.unsent.remove(bucket), self.send(bucket)",
        ),
    ],
    (2, 5): [("the sync begins with one addition", "train", "sync.begin(len(xs))", "sync.begin(1)")],
    (3, 1): [
        ("a layer's number has one digit", "unit_names", r"layers\.\d+", r"layers\.\d"),
        ("a part is a copy", "Unit", "return slice_[start:stop]", "return slice_[start:stop].clone()"),
        ("units with others' parameters", "unit_names", "(module, layout_of(param).data_group)", '(module, "")'),
    ],
    (3, 2): [
        (
            "an all-reduce",
            "Zero1",
            "        return reduce_scatter(unit.total, unit.gradient, unit.group)",
            "        all_reduce(unit.gradient, unit.group).wait()\n"
            "        unit.total.copy_(unit.gradient[unit.first : unit.first + unit.length])\n        return Pending()",
        ),
        (
            "our own slice, not summed",
            "Zero1",
            "        return reduce_scatter(unit.total, unit.gradient, unit.group)",
            "        unit.total.copy_(unit.gradient[unit.first : unit.first + unit.length])\n        return Pending()",
        ),
    ],
    (3, 3): [
        ("the first learning rate for ever", "Zero1", 'group["lr"] = lr', 'group.setdefault("lr", lr)'),
        ("masters are not copied back", "Zero1", "unit.slice.copy_(unit.master)", "pass"),
        ("gradients stay", "Zero1", "unit.gradient = unit.total = unit.grad_slice = None", "pass"),
    ],
    (3, 4): [
        (
            "waiting at once",
            "Zero2",
            "self.in_flight = unit, self.reduce(unit)",
            "self.in_flight = unit, self.reduce(unit)\n        self.land()",
        ),
        ("whole gradients stay", "Zero2", "param.grad = None\n        unit.missing", "unit.missing"),
    ],
    (3, 5): [
        ("never freed", "SlicedUnit", "self.flat.untyped_storage().resize_(0)", "pass"),
        ("gathered again", "SlicedUnit", "if not self.gathered:", "if True:"),
    ],
    (3, 6): [
        ("nothing is gathered in advance", "Zero3", "[*self.uses[i], *self.uses[following]]", "self.uses[i]"),
        ("weights stay after forward", "Zero3", "                unit.free()", "                pass"),
        ("a tied head's weights go", "Zero3", "if unit not in self.uses[min(i + 1, len(self.uses) - 1)]:", "if True:"),
    ],
    (4, 1): [
        ("the caller's tensor", "sum_over_ranks", "x.clone(memory_format=torch.contiguous_format)", "x.contiguous()"),
        ("parts side by side", "gather_tokens", "parts.movedim(0, 1)", "parts.movedim(0, 2)"),
        (
            "tokens of the own part alone",
            "sum_and_split_tokens",
            "reduce_scatter(part.view(-1), parts.view(-1), group).wait()",
            "part.copy_(parts[group.rank])",
        ),
    ],
    (4, 2): [
        ("sp the other way round in f", "enter_block", "if sp:", "if not sp:"),
        ("sp is ignored in g", "leave_block", "if sp:", "if False:"),
    ],
    (4, 3): [
        ("exp and a sum", "vocab_parallel_cross_entropy", "[:, 0].logsumexp(0)", "[:, 0].exp().sum(0).log()"),
        ("no gradient", "vocab_parallel_cross_entropy", "everyone[group.rank] = ours", "pass"),
        ("targets that do not count", "vocab_parallel_cross_entropy", ".where(targets != IGNORE, 0.0).sum()", ".sum()"),
        ("others' tokens get a row", "VocabParallelEmbedding", " * held[..., None]", ""),
    ],
    (4, 4): [
        ("nothing is cut", "shard_tensors", "if group.size == 1:", "if True:"),
        ("norms are summed without SP, too", "shard_tensors", "if sp and param.dim() == 1", "if param.dim() == 1"),
        ("SP whatever the flag says", "shard_tensors", "(output, group, sp)", "(output, group, True)"),
        ("the earlier cuts are forgotten", "cut", "(*layout_of(weight).splits, split)", "(split,)"),
    ],
    (4, 5): [
        ("new tensors", "sum_partial_gradients", "part.copy_(total.view_as(part))", "part = total"),
        ("too many sums", "sum_partial_gradients", "if group.name in layout_of(params[name]).partial_over", "if True"),
    ],
}  # fmt: skip
