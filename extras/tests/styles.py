"""Right solutions of the labs' tasks in other styles, which must earn all points (extras/tests/test_labs.py)."""

import ast

from extras.labs import source
from extras.labs.course import load, path_of

S2, S4 = "step02_ddp", "step04_tp_sp"

LAST_IMPORT = "from step03_zero import STAGES, make_optimizer\n"
RAW_RING = """        n, r = group.size, group.rank
        pieces = [p.clone() for p in gradient.view(-1).tensor_split(n)]
        right, left = (dist.get_global_rank(group.handle, (r + d) % n) for d in (1, -1))
        for s in range(2 * n - 2):
            room = torch.empty_like(pieces[(r - s - 1) % n])
            sending = dist.isend(pieces[(r - s) % n], right, group=group.handle)
            dist.irecv(room, left, group=group.handle).wait(), sending.wait()
            pieces[(r - s - 1) % n] = pieces[(r - s - 1) % n] + room if s < n - 1 else room
        gradient.copy_(torch.cat(pieces).view_as(gradient))
"""
BY_ALL_REDUCES = """        def summed(x):
            total = x.detach().clone()
            all_reduce(total, group).wait()
            return total + x - x.detach()

        with torch.enable_grad():
            given = logits.detach().to(wide(logits.dtype)).requires_grad_()
            own = given[..., : len(ids)]
            most = own.detach().amax(-1) if len(ids) else given.new_full(targets.shape, -torch.inf)
            everyone = most.new_empty(group.size, *most.shape)
            all_gather(everyone.view(-1), most.contiguous().view(-1), group).wait()
            most = everyone.amax(0)
            sums = summed((own - most[..., None]).exp().sum(-1))
            here = (targets >= ids.start) & (targets < ids.stop)
            picked = given.gather(-1, torch.where(here, targets - ids.start, 0)[..., None])[..., 0] * here
            loss = ((sums.log() + most - summed(picked)) * (targets != IGNORE)).sum()
        ctx.save_for_backward(*torch.autograd.grad(loss, given))
        return loss.detach()
"""


def body(module: str, name: str) -> str:
    """The text of a function's body, without its docstring."""
    text = path_of(module).read_text()
    code = source.code_of(source.definitions(ast.parse(text))[name])
    return "".join(text.splitlines(True)[code[0].lineno - 1 : code[-1].end_lineno])


F, G = "def enter_block(x: Tensor, group: Group, sp: bool)", "def leave_block(x: Tensor, group: Group,"
DOCSTRING = ' and another one in backward."""\n'
NONES = "ctx.backwards(grad, ctx.group), None, None, None"
OPTIONAL = "\ntry:\n    import numpy as np\nexcept ImportError:\n    np = None\n"
QUIET = "def quiet(f):\n    return lambda *a, **k: f(*a, **k)\n\n\n@quiet\n"
MISSING = "        self.missing = 0  # additions to its gradients that are still to come in this step\n"
FUTURE = "from __future__ import annotations\n\n"
RAW = "    import torch.distributed as dist\n\n    dist.all_reduce(x, group=group.handle)\n"
FUNCTIONAL = """    from torch.distributed._functional_collectives import all_reduce as total

    return total(x, "sum", group.handle) + 0
"""
GATHERED = """    from torch.distributed._functional_collectives import all_gather_tensor

    return all_gather_tensor(x.contiguous(), 1, group.handle) + 0
"""
JOINED = "def joined(parts):\n    return torch.cat(list(parts), 1)\n\n\n"
EXTENDED = "        lists[-1] += (param,)\n"
CALLABLE = "from collections.abc import Callable\n"
STYLES = {  # lab, task, texts (old, new)
    "from __future__ import annotations": (4, 2, [(CALLABLE, FUTURE + CALLABLE)]),
    "an own decorator": (4, 2, [(F, QUIET + F)]),
    "a constant as default": (4, 2, [(LAST_IMPORT, LAST_IMPORT + "\nY = True\n"), (F, F.replace("bool", "bool = Y"))]),
    "an alias": (4, 2, [(LAST_IMPORT, LAST_IMPORT + "\nRanks = Group\n"), (G, G.replace("Group", "Ranks"))]),
    "try: import": (4, 2, [(LAST_IMPORT, LAST_IMPORT + OPTIONAL), (NONES, NONES + " if np else None")]),
    "a class attribute": (
        4, 2, [(DOCSTRING, DOCSTRING + "\n    no = None\n"), (NONES, NONES.replace("None", "Conjugate.no"))]),
    "a helper of one's own": (
        4, 1, [("def gather_tokens(", JOINED + "def gather_tokens("),
               ("shards.movedim(0, 1).flatten(1, 2)", "joined(shards)")]),
    "raw torch.distributed": (4, 1, [("    all_reduce(x, group).wait()\n    return x\n", RAW + "    return x\n")]),
    "functional collectives": (
        4, 1, [("    all_reduce(x, group).wait()\n    return x\n", FUNCTIONAL), (body(S4, "gather_tokens"), GATHERED)]),
    "the loss by other collectives": (4, 3, [(body(S4, "VocabParallelCrossEntropy.forward"), BY_ALL_REDUCES)]),
    "an attribute of an earlier task": (
        2, 4, [(MISSING, "        self.missing, self.number = 0, len(params)\n"),
               ("n_micro_batches * len(bucket.params)", "n_micro_batches * bucket.number")]),
    "a raw ring": (2, 2, [(body(S2, "RingSync.sum_up"), RAW_RING)]),
    "other names and loops": (2, 3, [("        lists[-1].append(param)\n", EXTENDED)]),
}  # fmt: skip

# As others would write whole functions: lab, task, {hole: its source}
HOLES: dict[str, tuple[int, int, dict[str, str]]] = {
    "lab 1: a function around each layer": (1, 4, {
        "recompute_layers": """
def recompute_layers(model):
    from torch.utils.checkpoint import checkpoint

    def again(forward):
        return lambda *args: checkpoint(forward, *args, use_reentrant=False)

    for i in model.model.layers:
        model.model.layers[i].forward = again(model.model.layers[i].forward)
""",
    }),
    "lab 3: masks and narrow": (3, 1, {
        "Unit.view": """
    def view(self, flat, name):
        begin, end = self.span[name]
        return flat.narrow(0, begin, end - begin).reshape(self.named[name].shape)
""",
        "Unit.view_shard": """
    def view_shard(self, shard, name):
        begin, end = self.span[name]
        first = max(begin, self.first)
        length = min(end, self.first + self.length) - first
        return shard.narrow(0, first - self.first, length) if length > 0 else shard.narrow(0, 0, 0)
""",
    }),
    "lab 5: groups of heads, einsum, and a softmax by hand": (5, 1, {
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
    }),
    "lab 5: a raw isend and irecv, k and v apart": (5, 4, {
        "RingAttention.forward": """
    @staticmethod
    def forward(ctx, q, k, v, group, visible, kernel=None):
        import torch.distributed as dist

        n, r = group.size, group.rank
        ahead, behind = (dist.get_global_rank(group.handle, i % n) for i in (r + 1, r - 1))
        dtype = torch.promote_types(q.dtype, torch.float32)
        o = torch.zeros(q.shape, dtype=dtype)
        lse = torch.full(q.shape[:-1], float("-inf"), dtype=dtype)
        mine = (k.contiguous(), v.contiguous())
        for source in [(r - i) % n for i in range(n)]:
            works, coming = [], []
            if source != (r + 1) % n:
                for x in mine:
                    coming.append(torch.zeros_like(x))
                    works.append(dist.isend(x, ahead, group=group.handle))
                    works.append(dist.irecv(coming[-1], behind, group=group.handle))
            for rows, keys, causal in visible(r, source, q.shape[2]):
                part, part_lse = part_attention(q[:, :, rows], mine[0][:, :, keys], mine[1][:, :, keys], causal)
                merge(o[:, :, rows], lse[:, :, rows], part, part_lse)
            for work in works:
                work.wait()
            mine = coming
        ctx.everything = (q, k, v, o.to(q.dtype), lse, group, visible, ahead, behind)
        return o.to(q.dtype).clone()
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
                own = [x[:, :, rows] for x in (do, q, o, lse)]
                a, b, c = part_gradients(*own[:2], *(x[:, :, keys] for x in mine), *own[2:], causal)
                dq[:, :, rows] += a
                shares[0][:, :, keys] += b
                shares[1][:, :, keys] += c
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
        return dq.to(q.dtype), *(x.to(q.dtype) for x in sums[0]), None, None, None
""",
    }),
    "lab 6: 1F1B as a loop": (6, 1, {
        "common.schedules:one_f_one_b": """
def one_f_one_b(p, m, v, rank):
    done, found = [0, 0], []
    while done[1] < m:
        forward = done[0] < m and done[0] - done[1] < p - rank
        found.append(Action("F" if forward else "B", done[not forward], rank))
        done[not forward] += 1
    return found
""",
    }),
    "lab 6: 1F1B with raw messages": (6, 3, {
        "OneForwardOneBackward.execute": """
    def execute(self):
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
    }),
    "lab 6: a tree of edges": (6, 2, {
        "Pipeline.forward": """
    def forward(self, i, stage, x):
        given = self.xs[i] if x is None else x.clone().requires_grad_(True)
        out = forward_stage(self.model, self.places[stage], given, self.ys[i], self.positions)
        if self.places[stage].after is None:
            out = out.div(self.n_targets)
            with torch.no_grad():
                self.loss = self.loss + out
        self.graphs |= {(i, stage): (given, torch.autograd.graph.get_gradient_edge(out))}
        return out.detach().clone() if x is not None else out.data
""",
        "Pipeline.backward": """
    def backward(self, i, stage, dy):
        given, edge = self.graphs[i, stage]
        del self.graphs[i, stage]
        torch.autograd.backward([edge], [dy] if dy is not None else None)
        return given.grad if given.is_floating_point() else None
""",
    }),
    "lab 7: a loop over experts": (7, 2, {
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
        return AddLoss.apply(out.to(x.dtype).reshape(shape), self.aux_loss(p, counts), self.coeff)
""",
    }),
    "lab 7: raw all_to_all_single, and sorting by argsort": (7, 4, {
        "transpose_blocks": """
def transpose_blocks(rows, sizes):
    cells = torch.arange(sizes.numel()).view(sizes.shape)
    owner = cells.flatten().repeat_interleave(sizes.flatten())
    return torch.cat([rows[owner == cell] for cell in cells.T.flatten()])
""",
        "dispatch": """
def dispatch(rows, group, leaving, arriving):
    import torch.distributed as dist

    sent, received = leaving.sum(1).tolist(), arriving.sum(1).tolist()
    out = torch.zeros(sum(received), *rows.shape[1:], dtype=rows.dtype)
    dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group.handle)
    expert = torch.arange(arriving.shape[1]).repeat(len(arriving)).repeat_interleave(arriving.flatten())
    return out[expert.argsort(stable=True)]
""",
        "combine": """
def combine(rows, group, leaving, arriving):
    import torch.distributed as dist

    sent, received = arriving.sum(1).tolist(), leaving.sum(1).tolist()
    expert = torch.arange(arriving.shape[1]).repeat(len(arriving)).repeat_interleave(arriving.flatten())
    outgoing, home = (torch.zeros(n, *rows.shape[1:], dtype=rows.dtype) for n in (sum(sent), sum(received)))
    outgoing[expert.argsort(stable=True)] = rows
    dist.all_to_all_single(home, outgoing, received, sent, group=group.handle)
    return home
""",
        "visit_experts": """
def visit_experts(experts, group, rows, num_tokens_per_expert):
    import torch.distributed as dist

    leaving = num_tokens_per_expert.reshape(group.size, -1).contiguous()
    arriving = torch.zeros_like(leaving)
    dist.all_to_all_single(arriving, leaving, group=group.handle)

    class There(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return dispatch(x, group, leaving, arriving)

        @staticmethod
        def backward(ctx, dy):
            return combine(dy, group, leaving, arriving)

    class Home(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return combine(x, group, leaving, arriving)

        @staticmethod
        def backward(ctx, dy):
            return dispatch(dy, group, leaving, arriving)

    return Home.apply(experts(There.apply(rows), arriving.sum(0)))
""",
    }),
}  # fmt: skip


def restyled(number: int, holes: dict[str, str]) -> dict[str, str]:
    """The project's files with these definitions in the place of their own, by module."""
    sources: dict[str, str] = {}
    for hole, written in holes.items():
        home, _, name = hole.rpartition(":")
        module = home or load(number).modules[-1]
        text = sources.get(module, path_of(module).read_text())
        node, lines = source.definitions(ast.parse(text))[name], text.splitlines(keepends=True)
        start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        sources[module] = "".join(lines[: start - 1]) + written.strip("\n") + "\n" + "".join(lines[node.end_lineno :])
    return sources
