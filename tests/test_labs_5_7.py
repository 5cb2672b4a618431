"""Labs 5 to 7, beside tests/test_labs.py: wrong solutions that must lose points, and right ones in other styles."""

import ast

import pytest

from labs.course import load, path_of
from labs.judge import Judge
from labs.source import definitions
from tests.test_labs import handed_in, judged, sabotaged

ROWS: dict[tuple[int, int], list[tuple[str, str, str, str]]] = {  # as tests/sabotage.py
    (5, 1): [
        ("no part is causal", "part_attention", "0.0, causal)", "0.0, False)"),
        ("merge: parts count alike", "merge", "torch.sigmoid(part_lse - lse)[..., None]", "0.5"),
        ("merge: exp overflows", "merge", "torch.logaddexp(lse, part_lse)", "(lse.exp() + part_lse.exp()).log()"),
        ("merge: not in place", "merge", "o.lerp_(", "o = o.lerp("),
    ],
    (5, 2): [
        ("zigzag: before and after", "zigzag_visible", "source < rank", "source > rank"),
        ("zigzag: all see all", "zigzag_visible", "(both, first, False)", "(both, both, False)"),
        ("zigzag: an odd number of tokens", "zigzag_positions", "if seq_len % (2 * n):", "if False:"),
    ],
    (5, 3): [
        ("backward: softmax of the part", "part_gradients", "lse.contiguous()", "part_attention(q, k, v, causal)[1]"),
        ("backward: without rowsum", "part_gradients", "q, k, v, o, lse.con", "q, k, v, 0 * o, lse.con"),
    ],
    (5, 4): [
        (
            "ring: waits at once",
            "RingAttention",
            "            for rows, keys, causal in visible(r",
            "            sending.wait() if hop + 1 < n else None\n            for rows, keys, causal in visible(r",
        ),
        (
            "ring: backward waits for sums at once",
            "RingAttention",
            "[(dkv, (r - 1) % n)], ctx.group)\n",
            "[(dkv, (r - 1) % n)], ctx.group)\n            arriving.wait()\n",
        ),
        (
            "ring: every part is kept",
            "RingAttention",
            "                kv = next_kv\n        o = o",
            "                kv = next_kv\n                ctx.parts = [*getattr(ctx, 'parts', []), kv]\n        o = o",
        ),
        ("ring: zigzag whatever `visible` says", "RingAttention", " in visible(", " in zigzag_visible("),
        ("ring: backward, too", "RingAttention", "ctx.visible(", "zigzag_visible("),
        (
            "ring: sums in 16 bits",
            "RingAttention",
            "(torch.zeros_like(x, dtype=wide(q.dtype)) for x in (q, kv))",
            "(torch.zeros_like(x) for x in (q, kv))",
        ),
        ("ring: a message too many", "RingAttention", "if hop + 1 < n:", "if True:"),
    ],
    (5, 5): [
        (
            "heads repeated before the ring",
            "ring_attention",
            "for x in (q, k, v))",
            "for x in (q, *(y.repeat_interleave(q.shape[2] // y.shape[2], 2) for y in (k, v))))",
        ),
        ("ring_attention: zigzag only", "ring_attention", "group, visible)", "group, zigzag_visible)"),
        ("records forget data", "shard_context", 'note_layout(param, data_group="data")', "pass"),
        ("first layer only", "shard_context", "model.model.layers.values()", "[model.model.layers['0']]"),
        ("tokens tp cannot divide", "shard_context", "if len(positions) % tp.size:", "if False:"),
    ],
    (6, 1): [
        ("1F1B: one forward too few", "one_f_one_b", "p - 1 - rank", "p - 2 - rank"),
        ("1F1B: as afab", "one_f_one_b", "p - 1 - rank", "m"),
        ("interleaved: backwards in order of forwards", "weave", "reversed(stages)", "stages"),
        ("interleaved: as afab", "interleaved", "(v - 1) * p + 2 * (p - 1 - rank)", "v * m"),
        ("interleaved: rounds that are not full", "interleaved", "if v > 1 and m % p:", "if False:"),
    ],
    (6, 2): [
        (
            "a stage forgets positions",
            "forward_stage",
            "rope_tables(positions,",
            "rope_tables(torch.arange(len(positions)),",
        ),
        ("the output is kept", "Pipeline", "= x, get_gradient_edge(y)", "= x, y"),
        ("the last loss only", "Pipeline", "self.loss += y", "self.loss = y"),
    ],
    (6, 3): [
        (
            "a send before the receive",
            "Pipeline",
            "exchange(sends, receives, self.group).wait()",
            "exchange(sends, [], self.group).wait(); exchange([], receives, self.group).wait()",
        ),
        ("all forwards first", "Pipeline", "min(m, self.group.size - 1 - rank)", "m"),
        ("few micro-batches forgotten", "Pipeline", "min(m, self.group.size - 1 - rank)", "self.group.size - 1 - rank"),
        (
            "dx of the wrong micro-batch",
            "Pipeline",
            "self.backward(i - warm_up, rank, dy)",
            "self.backward(i, rank, dy)",
        ),
    ],
    (6, 4): [
        (
            "receives at the end",
            "add_messages",
            'programs[peer].append(Line("receive", waiting, rank))',
            'programs[peer].insert(0, Line("receive", waiting, rank))',
        ),
        (
            "messages inside a rank",
            "add_messages",
            " and (peer := places[waiting.stage].rank) != rank",
            " and ((peer := places[waiting.stage].rank) or True)",
        ),
        (
            "receives awaited where posted",
            "ListPipeline",
            "exchange([], [(buffer, peer)], self.group)\n",
            "exchange([], [(buffer, peer)], self.group)\n                box[action][1].wait()\n",
        ),
        (
            "sends awaited at once",
            "ListPipeline",
            "[(box.pop(action)[0], peer)], [], self.group)\n",
            "[(box.pop(action)[0], peer)], [], self.group)\n                sent[peer].wait()\n",
        ),
        (
            "inputs are not awaited",
            "ListPipeline",
            "                pending.wait()\n                output",
            "                output",
        ),
    ],
    (6, 5): [
        (
            "all embeddings count twice",
            "keep_stage",
            "elif model.config.tied and places[0].rank != places[-1].rank:",
            "elif model.config.tied:",
        ),
        ("layers of the first stage only", "keep_stage", "for place in mine for n", "for place in mine[:1] for n"),
    ],
    (7, 1): [
        ("experts in another order", "ExpertLinear", "self.weight, strict", "self.weight.flip(0), strict"),
        (
            "silu of the wrong matrix",
            "Experts",
            "F.silu(self.gate_proj(rows, counts)) * self.up_proj(rows, counts)",
            "F.silu(self.up_proj(rows, counts)) * self.gate_proj(rows, counts)",
        ),
    ],
    (7, 2): [
        ("one score divided by itself", "MoE", "if self.top_k > 1:", "if True:"),
        ("router in 16 bits", "MoE", "wide(x.dtype)", "x.dtype"),
        (
            "experts that nobody chose",
            "MoE",
            "F.one_hot(selected_experts.flatten(), p.shape[-1]).sum(0)",
            "torch.bincount(selected_experts.flatten())",
        ),
    ],
    (7, 3): [
        (
            "weight times dy",
            "AddLoss",
            "grad.new_full((), ctx.weight, dtype=wide(grad.dtype))",
            "ctx.weight * grad.sum()",
        ),
        ("counts summed in place", "MoE", "counts = counts.clone()", "pass"),
        ("P of own tokens", "MoE", "/ n_tokens", "/ len(p)"),
    ],
    (7, 4): [
        (
            "backward sends as forward",
            "AllToAll",
            "ctx.way_back = received, sent, group",
            "ctx.way_back = sent, received, group",
        ),
        (
            "counts of this rank",
            "visit_experts",
            "experts(visitors[order], inward.sum(0))",
            "experts(visitors[order], leaving[group.rank] * len(visitors) // max(1, len(visitors)))",
        ),
    ],
    (7, 5): [
        ("dense layers forgotten", "shard_experts", "config.dense_layers + ", ""),
        (
            "ep multiplies",
            "shard_experts",
            'mesh.enter("ep", ranks.reshape(-1, ep))',
            'mesh.enter("ep", ranks.reshape(len(ranks), -1, ep).swapaxes(1, 2).reshape(-1, ep))',
        ),
        ("experts are not cut", "shard_experts", 'cut(linear.weight, 0, mesh["ep"])', "linear.weight"),
        ("too many experts a token", "shard_experts", "config.experts_per_token > config.experts:", "False:"),
    ],
}

# Right solutions as others would write them: lab, task, {hole: its source}
STYLES: dict[str, tuple[int, int, dict[str, str]]] = {
    "lab 5: formulas and einsum instead of kernels": (
        5,
        1,
        {
            "part_attention": """
def part_attention(q, k, v, causal):
    g = q.shape[1] // k.shape[1]
    q, k, v = (x.float() if x.dtype == torch.bfloat16 else x for x in (q, k, v))
    scores = torch.einsum("bgrqd,bgkd->bgrqk", q.unflatten(1, (-1, g)), k) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(q.shape[2], k.shape[2]).triu(1).bool(), float("-inf"))
    top = scores.amax(-1, keepdim=True)
    e = (scores - top).exp()
    o = torch.einsum("bgrqk,bgkd->bgrqd", e / e.sum(-1, keepdim=True), v)
    return o.flatten(1, 2), (top.squeeze(-1) + e.sum(-1).log()).flatten(1, 2)
""",
            "merge": """
def merge(o, lse, part_o, part_lse):
    total = torch.maximum(lse, part_lse) + torch.log1p(torch.exp(-(lse - part_lse).abs()))
    o *= torch.exp(lse - total).unsqueeze(-1)
    o += torch.exp(part_lse - total).unsqueeze(-1) * part_o
    lse[...] = total
""",
        },
    ),
    "lab 5: a raw isend and irecv, k and v apart": (
        5,
        4,
        {
            "RingAttention.forward": """
    @staticmethod
    def forward(ctx, q, k, v, group, visible):
        import torch.distributed as dist

        n, r = group.size, group.rank
        ahead, behind = (dist.get_global_rank(group.handle, i % n) for i in (r + 1, r - 1))
        o, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"))
        mine = (k.contiguous(), v.contiguous())
        for source in [(r - i) % n for i in range(n)]:
            works, coming = [], []
            if source != (r + 1) % n:
                for x in mine:
                    coming.append(torch.zeros_like(x))
                    works.append(dist.isend(x, ahead, group=group.handle))
                    works.append(dist.irecv(coming[-1], behind, group=group.handle))
            for rows, keys, causal in visible(r, source, q.shape[2]):
                part, part_lse = part_attention(q[rows], mine[0][keys], mine[1][keys], causal)
                merge(o[rows], lse[rows], part, part_lse)
            for work in works:
                work.wait()
            mine = coming
        ctx.everything = (q, k, v, o, lse, group, visible, ahead, behind)
        return o.clone()
""",
            "RingAttention.backward": """
    @staticmethod
    def backward(ctx, do):
        import torch.distributed as dist

        q, k, v, o, lse, group, visible, ahead, behind = ctx.everything
        n, r, dtype = group.size, group.rank, torch.promote_types(q.dtype, torch.float32)

        def swap(*tensors):
            there = [torch.empty_like(x) for x in tensors]
            works = [dist.isend(x.contiguous(), ahead, group=group.handle) for x in tensors]
            return there, works + [dist.irecv(x, behind, group=group.handle) for x in there]

        dq, mine, sums = torch.zeros(q.shape, dtype=dtype), [k.contiguous(), v.contiguous()], None
        for i in range(n):
            coming, works = swap(*mine) if i < n - 1 else (None, [])
            shares = [torch.zeros(x.shape, dtype=dtype) for x in (k, v)]
            for rows, keys, causal in visible(r, (r - i) % n, q.shape[2]):
                a, b, c = part_gradients(do[rows], q[rows], mine[0][keys], mine[1][keys], o[rows], lse[rows], causal)
                dq[rows] += a
                shares[0][keys] += b
                shares[1][keys] += c
            if sums is not None:
                for work in sums[1]:
                    work.wait()
                shares = [x + y for x, y in zip(shares, sums[0])]
            sums = swap(*shares)
            for work in works:
                work.wait()
            mine = coming
        for work in sums[1]:
            work.wait()
        return dq.to(q.dtype), *(x.to(q.dtype) for x in sums[0]), None, None
""",
        },
    ),
    "lab 6: 1F1B as a loop": (
        6,
        1,
        {
            "common.schedules:one_f_one_b": """
def one_f_one_b(p, m, v, rank):
    done, found = [0, 0], []
    while done[1] < m:
        forward = done[0] < m and done[0] - done[1] < p - rank
        found.append(Action("F" if forward else "B", done[not forward], rank))
        done[not forward] += 1
    return found
""",
        },
    ),
    "lab 6: 1F1B with raw messages": (
        6,
        3,
        {
            "Pipeline.send_receive": """
    def send_receive(self, peer, send=None, receive=None):
        raise RuntimeError("not needed")
""",
            "Pipeline.run": """
    def run(self):
        import torch.distributed as dist

        r, p, m, pg = self.group.rank, self.group.size, len(self.xs), self.group.handle
        going = []

        def get(other, i):
            if not 0 <= other < p:
                return None
            room = self.buffer(i)
            return room, dist.irecv(room, group=pg, group_src=other)

        def ready(thing):
            if thing is None:
                return None
            thing[1].wait()
            return thing[0]

        xs, dys = [get(r - 1, 0)], []
        f = b = 0
        while b < m:
            if f < m and f - b < p - r:
                x = ready(xs[f])
                y = self.forward(f, r, x)
                if r + 1 < p:
                    going.append((y, dist.isend(y, group=pg, group_dst=r + 1)))
                dys.append(get(r + 1, f))
                f += 1
                if f < m:
                    xs.append(get(r - 1, f))
            else:
                dx = self.backward(b, r, ready(dys[b]))
                if r:
                    going.append((dx, dist.isend(dx, group=pg, group_dst=r - 1)))
                b += 1
        for _, work in going:
            work.wait()
""",
        },
    ),
    "lab 6: a tree of edges": (
        6,
        2,
        {
            "Pipeline.forward": """
    def forward(self, i, stage, x):
        given = self.xs[i] if x is None else x.clone().requires_grad_(True)
        out = forward_stage(self.model, self.places[stage], given, self.ys[i], self.positions)
        if self.places[stage].after is None:
            out = out.div(self.n_targets)
            with torch.no_grad():
                self.loss = self.loss + out
        self.mine = getattr(self, "mine", {}) | {(stage, i): (given, torch.autograd.graph.get_gradient_edge(out))}
        return out.detach().clone() if x is not None else out.data
""",
            "Pipeline.backward": """
    def backward(self, i, stage, dy):
        given, edge = self.mine[stage, i]
        del self.mine[stage, i]
        torch.autograd.backward([edge], [dy] if dy is not None else None)
        return given.grad if given.is_floating_point() else None
""",
        },
    ),
    "lab 7: a loop over experts": (
        7,
        2,
        {
            "MoE.forward": """
    def forward(self, x):
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        dtype = torch.promote_types(x.dtype, torch.float32)
        p = torch.softmax(x.to(dtype) @ self.router.weight.to(dtype).t(), -1)
        chosen = torch.zeros_like(p, dtype=torch.bool).scatter(1, p.detach().topk(self.top_k, 1).indices, True)
        gates = p * chosen
        if self.top_k != 1:
            gates = gates / gates.sum(1, keepdim=True)
        expert, token = chosen.t().nonzero().unbind(1)
        counts = chosen.sum(0)
        rows = self.experts(x[token], counts) * gates[token, expert].unsqueeze(1)
        out = torch.zeros(x.shape, dtype=rows.dtype).index_add(0, token, rows)
        return AddLoss.apply(out.to(x.dtype).reshape(shape), self.balance_loss(p, counts), self.weight)
""",
        },
    ),
    "lab 7: raw all_to_all_single, and its own backward": (
        7,
        4,
        {
            "AllToAll.forward": """
    @staticmethod
    def forward(ctx, rows, sent, received, group):
        import torch.distributed as dist

        ctx.group, ctx.sizes = group, (sent, received)
        out = torch.zeros(sum(received), *rows.shape[1:], dtype=rows.dtype)
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group.handle)
        return out
""",
            "AllToAll.backward": """
    @staticmethod
    def backward(ctx, grad):
        import torch.distributed as dist

        sent, received = ctx.sizes
        back = torch.zeros(sum(sent), *grad.shape[1:], dtype=grad.dtype)
        dist.all_to_all_single(back, grad.contiguous(), sent, received, group=ctx.group.handle)
        return back, None, None, None
""",
            "visit_experts": """
def visit_experts(experts, group, rows, num_tokens_per_expert):
    import torch.distributed as dist

    n, counts = group.size, num_tokens_per_expert.contiguous()
    theirs = torch.zeros_like(counts)
    dist.all_to_all_single(theirs, counts, group=group.handle)
    table = theirs.reshape(n, -1).tolist()
    sent, received = counts.reshape(n, -1).sum(1).tolist(), [sum(line) for line in table]
    came = AllToAll.apply(rows, sent, received, group)
    pieces = list(came.split([size for line in table for size in line]))
    each = len(table[0])
    turned = [pieces[r * each + e] for e in range(each) for r in range(n)]
    out = experts(torch.cat(turned), torch.tensor([sum(line[e] for line in table) for e in range(each)]))
    parts = out.split([len(piece) for piece in turned])
    home = torch.cat([parts[e * n + r] for r in range(n) for e in range(each)])
    return AllToAll.apply(home, received, sent, group)
""",
        },
    ),
}


def restyled(number: int, holes: dict[str, str]) -> dict[str, str]:
    """The project's files with these definitions in the place of their own, by module."""
    sources: dict[str, str] = {}
    for hole, text in holes.items():
        home, _, name = hole.rpartition(":")
        module = home or load(number).modules[-1]
        source = sources.get(module, path_of(module).read_text())
        node, lines = definitions(ast.parse(source))[name], source.splitlines(keepends=True)
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        sources[module] = "".join(lines[: start - 1]) + text.strip("\n") + "\n" + "".join(lines[node.end_lineno :])
    return sources


SHOWN = ("ring: waits at once", "1F1B: as afab", "silu of the wrong matrix")  # by default
WRONG = [(*place, row) for place, rows in ROWS.items() for row in rows]


@pytest.mark.parametrize(
    "number, task, row",
    [pytest.param(*w, marks=() if w[2][0] in SHOWN else pytest.mark.exhaustive, id=w[2][0]) for w in WRONG],
)
def test_a_wrong_solution_loses_points(tmp_path, monkeypatch, number, task, row):
    """Each in its own task."""
    monkeypatch.setattr(Judge, "words", lambda *_: "")  # what kind it is takes more runs
    assert any(result.text for result in judged(sabotaged(tmp_path / "lab", number, row), task, seconds=20))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", STYLES)
def test_another_style_loses_nothing(tmp_path, name):
    """Right numbers, bytes and order are enough."""
    number, task, holes = STYLES[name]
    folder = handed_in(tmp_path / "lab", number)
    folder.sources |= restyled(number, holes)
    assert [result.text for result in judged(folder, task) if result.text] == []
