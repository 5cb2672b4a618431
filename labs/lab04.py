"""Lab 4: what is demanded of tensor and sequence parallelism. Functions `..._on_rank` run on the ranks."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import step04_tp_sp as step04
from common.comm import Mesh
from common.layout import layout_of
from common.model import IGNORE, Decoder
from labs import training
from labs.bench import Bench, numbers
from services.ledger import Ledger
from services.memory import MemoryTimeline
from tests.equivalence import SMALL

CPU = torch.device("cpu")
RUN = dict(optimizer="sgd", n_layers=2, global_batch_size=4, micro_batch_size=2, steps=2)
WHOLE = (2, dict(tp=2))


def here() -> tuple[Mesh, Any]:
    """(mesh, group) with all ranks along tp."""
    mesh = Mesh({"dp": 1, "tp": dist.get_world_size()}, CPU, Ledger())
    return mesh, mesh["tp"]


def sent(mesh: Mesh) -> dict[str, float]:
    """Bytes this rank has sent over tp since the last call, by operation."""
    return {name.strip(): n_bytes for name, n_bytes in mesh.ledger.take()["traffic"].get("tp", {}).items()}


def tokens_of(n: int, rank: int, s: int) -> slice:
    """This rank's tokens of s."""
    return slice(rank * s // n, (rank + 1) * s // n)


# --- task 1: f and g -------------------------------------------------------------------------------------------------


def pair_on_rank(seed: int, n: int, b: int, s: int, h: int) -> dict:
    """f and g, without and with sequence parallelism: values, gradients and bytes."""
    mesh, group = here()
    x, dy = (numbers(seed, name, n, b, n * s, h) for name in ("x", "dy"))
    found, part = {}, tokens_of(n, group.rank, n * s)
    for sp in (False, True):
        for name, operator in (("f", step04.enter_block), ("g", step04.leave_block)):
            own = (x[group.rank, :, part] if sp and name == "f" else x[group.rank]).clone().requires_grad_()
            y = operator(own, group, sp)
            forward = sent(mesh)
            y.backward((dy[group.rank] if name == "f" else dy[0][:, part] if sp else dy[0]).clone())
            mode = f"{name} with sp={sp}"
            found |= {f"the output of {mode}": y, f"the gradient of the input of {mode}": own.grad}
            found |= {f"bytes forward, {mode}": forward, f"bytes backward, {mode}": sent(mesh)}
    return found


def pair_case(bench: Bench) -> tuple[int, ...]:
    """(seed, ranks, batch, tokens of a rank, dim) of task 1."""
    draw = bench.draws()
    return draw.randrange(10**6), draw.choice((3, 4)), draw.randint(1, 3), draw.randint(3, 7), draw.randint(3, 9)


def pair_values(bench: Bench):
    """The forward of f and g."""
    seed, n, b, s, h = pair_case(bench)
    x = numbers(seed, "x", n, b, n * s, h)
    gathered = torch.cat([x[r, :, tokens_of(n, r, n * s)] for r in range(n)], 1)
    run = bench.ranks(n, pair_on_rank, seed, n, b, s, h)
    bench.same(run, lambda r: {"the output of f with sp=False": x[r], "the output of g with sp=False": x.sum(0)})
    bench.same(run, lambda r: {"the output of f with sp=True": gathered})
    bench.same(run, lambda r: {"the output of g with sp=True": x.sum(0)[:, tokens_of(n, r, n * s)]})


def pair_gradients(bench: Bench):
    """Their backward."""
    seed, n, b, s, h = pair_case(bench)
    dy = numbers(seed, "dy", n, b, n * s, h)
    run, text = bench.ranks(n, pair_on_rank, seed, n, b, s, h), "the gradient of the input of {} with sp={}".format
    bench.same(run, lambda r: {text("f", False): dy.sum(0), text("g", False): dy[0]})
    bench.same(run, lambda r: {text("f", True): dy.sum(0)[:, tokens_of(n, r, n * s)], text("g", True): dy[0]})


def pair_bytes(bench: Bench):
    """One all-reduce in one direction and nothing in the other, or (SP) half of it in each."""
    seed, n, b, s, h = pair_case(bench)
    run, half = bench.ranks(n, pair_on_rank, seed, n, b, s, h), (n - 1) * b * s * h * 8
    once, gather, scatter = {"all_reduce": 2 * half}, {"all_gather": half}, {"reduce_scatter": half}
    expected = {"bytes forward, f with sp=False": {}, "bytes backward, f with sp=False": once}
    expected |= {"bytes forward, g with sp=False": once, "bytes backward, g with sp=False": {}}
    expected |= {"bytes forward, f with sp=True": gather, "bytes backward, f with sp=True": scatter}
    expected |= {"bytes forward, g with sp=True": scatter, "bytes backward, g with sp=True": gather}
    bench.same(run, lambda r: expected)


# --- task 2: linear layers -------------------------------------------------------------------------------------------

MODES = ((True, True), (True, False), (False, True), (False, False))  # sp, overlap


def settled(timeline: MemoryTimeline) -> int:
    """Bytes that are still alive when gloo's thread, too, has let go of what it has sent."""
    found = [timeline.live("activations")]
    while len(found) < 30 or found[-1] < found[-30]:  # for a third of a second it has not fallen
        time.sleep(0.01)
        found.append(timeline.live("activations"))
    return found[-1]


def linears_on_rank(seed: int, n: int, b: int, s: int, h: int, wide: int) -> dict:
    """Two column-parallel layers of one input and a row-parallel one, in all four modes."""
    mesh, group = here()
    x, dy = numbers(seed, "x", b, s, h), numbers(seed, "dy", b, s, h)
    matrices = [numbers(seed, f"w{i}", wide, h) for i in range(2)]
    down, found = numbers(seed, "down", h, wide), {}
    own = tokens_of(n, group.rank, s)
    for sp, overlap in MODES:
        mode = f"sp={sp} overlap={overlap}: "
        linears = [nn.Linear(h, wide // n, bias=False) for _ in matrices]
        for linear, matrix in zip(linears, matrices, strict=True):
            linear.weight = nn.Parameter(matrix.chunk(n)[group.rank].clone())
        row = step04.RowParallelLinear(nn.Parameter(down.chunk(n, 1)[group.rank].clone()), group, sp)
        mine = (x[:, own] if sp else x).clone().requires_grad_()
        timeline = MemoryTimeline()
        with timeline.phase("forward"):
            ys = step04.ColumnParallel(group, sp, overlap)(mine, *linears)
        kept = settled(timeline) - sum(y.nbytes for y in ys)
        column_forward = sent(mesh)
        heads = [y.detach().clone().requires_grad_() for y in ys]
        out = row(heads[0] * heads[1])
        row_forward = sent(mesh)
        out.backward((dy[:, own] if sp else dy).clone())
        row_backward = sent(mesh)
        torch.autograd.backward(ys, [y.grad for y in heads])
        found |= {f"{mode}output {i} of the column layer": y for i, y in enumerate(ys)}
        found |= {f"{mode}output of the row layer": out, f"{mode}dx": mine.grad}
        found |= {f"{mode}gradient of column weight {i}": linear.weight.grad for i, linear in enumerate(linears)}
        found[f"{mode}gradient of the row weight"] = row.weight.grad
        for part, amount in (("column forward", column_forward), ("column backward", sent(mesh))):
            found[f"{mode}bytes sent, {part}"] = amount
        found[f"{mode}bytes sent, row forward"], found[f"{mode}bytes sent, row backward"] = row_forward, row_backward
        found[f"{mode}bytes kept by the column layer"] = kept
    return found


def linear_case(bench: Bench) -> tuple[int, ...]:
    """(seed, ranks, batch, tokens, dim, width) of task 2."""
    draw = bench.draws()
    seed, n = draw.randrange(10**6), draw.choice((2, 3))
    return seed, n, draw.randint(1, 2), n * draw.randint(2, 4), draw.randint(3, 8), n * draw.randint(2, 5)


def one_device_linears(seed: int, n: int, b: int, s: int, h: int, wide: int) -> Callable[[int, bool, bool], dict]:
    """The same block with whole matrices; by rank and mode, what it must find."""
    x, dy = numbers(seed, "x", b, s, h).requires_grad_(), numbers(seed, "dy", b, s, h)
    matrices = [numbers(seed, f"w{i}", wide, h).requires_grad_() for i in range(2)]
    down = numbers(seed, "down", h, wide).requires_grad_()
    ys = [F.linear(x, matrix) for matrix in matrices]
    out = F.linear(ys[0] * ys[1], down)
    out.backward(dy)

    def part(rank: int, sp: bool, overlap: bool) -> dict:
        own, mode = tokens_of(n, rank, s) if sp else slice(None), f"sp={sp} overlap={overlap}: "
        values = {f"{mode}output {i} of the column layer": y.chunk(n, -1)[rank] for i, y in enumerate(ys)}
        values[f"{mode}output of the row layer"] = out[:, own]
        gradients = {f"{mode}dx": x.grad[:, own], f"{mode}gradient of the row weight": down.grad.chunk(n, 1)[rank]}
        for i, matrix in enumerate(matrices):
            gradients[f"{mode}gradient of column weight {i}"] = matrix.grad.chunk(n)[rank]
        return dict(values=values, gradients=gradients)

    return part


def linears(bench: Bench, which: str):
    """Values or gradients, in all modes."""
    case = linear_case(bench)
    run, part = bench.ranks(case[1], linears_on_rank, *case), one_device_linears(*case)
    for sp, overlap in MODES:
        bench.same(run, lambda r, mode=(sp, overlap): part(r, *mode)[which])


def linear_values(bench: Bench):
    """The forward of column and row layers."""
    linears(bench, "values")


def linear_gradients(bench: Bench):
    """Their backward."""
    linears(bench, "gradients")


def linear_bytes(bench: Bench):
    """One collective for two matrices, and with SP and overlap one more gather."""
    case = linear_case(bench)
    _, n, b, s, h, _ = case
    run, unit = bench.ranks(n, linears_on_rank, *case), (n - 1) / n * b * s * h * 8
    for sp, overlap in MODES:
        mode = f"sp={sp} overlap={overlap}: bytes sent, "
        if sp:
            gathered, scattered = {"all_gather": unit}, {"reduce_scatter": unit}
            column = gathered, scattered | (gathered if overlap else {})
            row = scattered, gathered
        else:
            column, row = ({}, {"all_reduce": 2 * unit}), ({"all_reduce": 2 * unit}, {})
        expected = {f"{mode}column forward": column[0], f"{mode}column backward": column[1]}
        expected |= {f"{mode}row forward": row[0], f"{mode}row backward": row[1]}
        bench.same(run, lambda r, values=expected: values)


def linear_memory(bench: Bench):
    """With SP and overlap the gathered input is not kept: nothing new is."""
    case = linear_case(bench)
    run = bench.ranks(case[1], linears_on_rank, *case)
    bench.same(run, lambda r: {"sp=True overlap=True: bytes kept by the column layer": 0})


# --- task 3: the vocabulary ------------------------------------------------------------------------------------------


def vocabulary_on_rank(seed: int, n: int, b: int, s: int, h: int, vocab: int) -> dict:
    """Embedding and loss over a cut vocabulary, without and with SP."""
    mesh, group = here()
    found = {}
    for sp in (False, True):
        parts = vocabulary_layers(mesh, group, sp, seed, n, b, s, h, vocab)
        found |= {f"sp={sp}: {name}": value for name, value in parts.items()}
    return found


def vocabulary_layers(mesh: Mesh, group: Any, sp: bool, seed: int, n: int, b: int, s: int, h: int, vocab: int) -> dict:
    """The same in one of the two modes."""
    matrix, tokens, targets, dy, hidden = vocabulary_inputs(seed, b, s, h, vocab)
    length = -(-vocab // n)
    start, stop = min(group.rank * length, vocab), min((group.rank + 1) * length, vocab)
    own = tokens_of(n, group.rank, s) if sp else slice(None)

    def part() -> nn.Parameter:
        return nn.Parameter(F.pad(matrix[start:stop], (0, 0, 0, length - (stop - start))))

    layer = step04.VocabParallelEmbedding(part(), range(start, stop), group, sp)
    out = layer(tokens)
    out.backward(dy[:, own].clone())
    found = {"the embedding's output": out, "the gradient of the embedding": layer.weight.grad[: stop - start]}
    sent(mesh)
    head, mine = step04.VocabParallelHead(part(), range(start, stop), group, sp), hidden[:, own].clone()
    loss = head.loss(mine.requires_grad_(), targets, 3)
    (loss / 7).backward()
    found |= {"the loss": loss, "the gradient of hidden": mine.grad}
    found |= {"the gradient of the head": head.weight.grad[: stop - start], "what the head sends": sent(mesh)}
    return found


def vocabulary_inputs(seed: int, b: int, s: int, h: int, vocab: int) -> tuple:
    """(matrix [vocab, dim], tokens, targets int64 [batch, seq], dy and hidden [batch, seq, dim])."""
    tokens, targets = (numbers(seed, name, b, s).abs().mul(1e6).long() % vocab for name in ("tokens", "targets"))
    targets[0, 0], targets[-1, -1] = IGNORE, vocab - 1
    return numbers(seed, "matrix", vocab, h), tokens, targets, numbers(seed, "dy", b, s, h), numbers(seed, "x", b, s, h)


def vocabulary_case(bench: Bench) -> tuple[int, ...]:
    """(seed, ranks, batch, tokens, dim, vocabulary) of task 3; the last rank has padding."""
    draw = bench.draws()
    seed, n = draw.randrange(10**6), draw.choice((3, 4))
    return seed, n, 2, n * draw.randint(2, 3), draw.randint(3, 6), n * draw.randint(4, 6) - draw.randint(1, n - 1)


def one_device_vocabulary(seed: int, n: int, b: int, s: int, h: int, vocab: int) -> dict:
    """Whole matrices."""
    matrix, tokens, targets, dy, hidden = vocabulary_inputs(seed, b, s, h, vocab)
    table, head, hidden = matrix.clone().requires_grad_(), matrix.clone().requires_grad_(), hidden.requires_grad_()
    out = F.embedding(tokens, table)
    out.backward(dy)
    loss = F.cross_entropy((hidden @ head.T).flatten(0, 1), targets.flatten(), ignore_index=IGNORE, reduction="sum")
    (loss / 7).backward()
    return dict(out=out.detach(), table=table.grad, loss=loss.detach(), hidden=hidden.grad, head=head.grad)


def vocabulary(bench: Bench, keys: dict[str, str]):
    """With and without SP; `keys`: the answer's -> ours."""
    case = vocabulary_case(bench)
    _, n, _, s, _, vocab = case
    one, length = one_device_vocabulary(*case), -(-vocab // n)

    def part(rank: int, name: str, sp: bool) -> Any:
        if name in ("table", "head"):
            return one[name][rank * length : (rank + 1) * length]
        return one[name][:, tokens_of(n, rank, s)] if sp and name in ("out", "hidden") else one[name]

    run = bench.ranks(n, vocabulary_on_rank, *case)
    for sp in (False, True):
        bench.same(run, lambda r, sp=sp: {f"sp={sp}: {key}": part(r, name, sp) for key, name in keys.items()})


def embedding(bench: Bench):
    """The embedding, both ways."""
    vocabulary(bench, {"the embedding's output": "out", "the gradient of the embedding": "table"})


def loss(bench: Bench):
    """The loss."""
    vocabulary(bench, {"the loss": "loss"})


def loss_gradients(bench: Bench):
    """Its gradients."""
    vocabulary(bench, {"the gradient of hidden": "hidden", "the gradient of the head": "head"})


def loss_bytes(bench: Bench):
    """Two numbers a token, and the hidden states; no logits."""
    case = vocabulary_case(bench)
    _, n, b, s, h, _ = case
    unit, two = (n - 1) / n * b * s * h * 8, 2 * (n - 1) * b * s * 8
    for sp in (False, True):
        expected = {"all_gather": unit + two, "reduce_scatter": unit} if sp else {"all_gather": two}
        expected |= {} if sp else {"all_reduce": 2 * unit}
        run = bench.ranks(n, vocabulary_on_rank, *case)
        bench.same(run, lambda r, sp=sp, values=expected: {f"sp={sp}: what the head sends": values})


# --- task 4: the sequence-parallel pair ------------------------------------------------------------------------------


def tokens_on_rank(seed: int, n: int, b: int, s: int, h: int) -> dict:
    """Gather and scatter of inputs with none, one and two dimensions before the tokens; several under way at once."""
    mesh, group = here()
    found, started = {}, []
    for lead in ((), (b,), (b, 2)):
        parts, whole = numbers(seed, f"parts{lead}", n, *lead, s // n, h), numbers(seed, f"x{lead}", n, *lead, s, h)
        for name, call, x in (("gather", step04.gather_tokens, parts), ("scatter", step04.scatter_tokens, whole)):
            x = x[group.rank].clone()
            pending, before = call(x, group), x.clone()
            found[f"{name}_tokens with {len(lead)} leading dimensions: collectives under way"] = len(pending.works)
            found[f"{name}_tokens with {len(lead)} leading dimensions: bytes"] = sent(mesh)
            started.append((f"{name}_tokens with {len(lead)} leading dimensions: result", pending))
            if not torch.equal(x, before):
                raise AssertionError(f"{name}_tokens changes its input")
    return found | {name: pending.wait() for name, pending in reversed(started)}


def tokens_case(bench: Bench) -> tuple[int, ...]:
    """(seed, ranks, batch, tokens, dim) of task 4."""
    draw = bench.draws()
    seed, n = draw.randrange(10**6), draw.choice((3, 4))
    return seed, n, draw.randint(2, 3), n * draw.randint(2, 4), draw.randint(2, 6)


def tokens_pair(bench: Bench, name: str):
    """One of the two, at every number of leading dimensions."""
    case = tokens_case(bench)
    seed, n, b, s, h = case
    run = bench.ranks(n, tokens_on_rank, *case)
    for lead in ((), (b,), (b, 2)):
        whole = torch.cat(list(numbers(seed, f"parts{lead}", n, *lead, s // n, h)), -2)
        total = numbers(seed, f"x{lead}", n, *lead, s, h).sum(0)
        right = {"gather": lambda r, x=whole: x, "scatter": lambda r, x=total: x[..., tokens_of(n, r, s), :]}[name]
        key = f"{name}_tokens with {len(lead)} leading dimensions: result"
        bench.same(run, lambda r, key=key, right=right: {key: right(r)})


def gather(bench: Bench):
    """All-gather over tokens."""
    tokens_pair(bench, "gather")


def scatter(bench: Bench):
    """Reduce-scatter over tokens."""
    tokens_pair(bench, "scatter")


def started_not_waited(bench: Bench):
    """Each is one collective, under way when the function returns."""
    case = tokens_case(bench)
    _, n, b, s, h = case
    run = bench.ranks(n, tokens_on_rank, *case)
    for lead in ((), (b,), (b, 2)):
        unit, where = (n - 1) / n * torch.Size(lead).numel() * s * h * 8, f"with {len(lead)} leading dimensions: "
        for name, operation in (("gather", "all_gather"), ("scatter", "reduce_scatter")):
            expected = {f"{name}_tokens {where}collectives under way": 1}
            expected[f"{name}_tokens {where}bytes"] = {operation: unit}
            bench.same(run, lambda r, values=expected: values)


# --- task 5: records -------------------------------------------------------------------------------------------------


def records_on_rank(heads: int, kv_heads: int, vocab: int, sp: bool, tied: bool) -> dict:
    """The record of every parameter of a cut model, and what its layers have become."""
    mesh, _ = here()
    flags = dict(n_heads=heads, n_kv_heads=kv_heads, vocab_size=vocab, tied=tied, dim=8 * heads, n_layers=1)
    with torch.device("meta"):
        model = Decoder(step04.Config(**SMALL | flags).model_config())
    step04.shard_tensors(model, mesh, sp, True)
    found: dict[str, Any] = {}
    for name, param in model.named_parameters():
        record = layout_of(param)
        cuts = [f"dim {c.dim} over {c.over}: {c.start}-{c.stop - 1}, copies {c.copies}" for c in record.splits]
        found[f"the cuts of {name}"], found[f"the shape of {name}"] = "; ".join(cuts) or "none", list(param.shape)
        found[f"the dimensions over which the gradient of {name} is summed"] = sorted(record.partial_over)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | step04.RowParallelLinear) or "Parallel" in str(type(module)):
            found[f"the class of {name}"] = type(module).__name__
        project = getattr(module, "project", None)
        if project is not None and not isinstance(project, nn.Module):
            found[f"how {name} projects"] = getattr(type(project), "__name__", "")
    return found


def record_case(bench: Bench) -> list[tuple[int, tuple]]:
    """(ranks, arguments of `records_on_rank`): with and without SP, and with copies of key/value heads."""
    draw = bench.draws()
    vocab = draw.randint(30, 60)
    return [(2, (4, 2, vocab, True, False)), (4, (4, draw.choice((1, 2)), vocab + 1, draw.random() < 0.5, True))]


def records(bench: Bench):
    """Each parameter is cut as the project cuts it, and its gradient is summed over the same ranks."""
    for n, case in record_case(bench):
        right = bench.ranks(n, records_on_rank, *case, project=True).answers
        bench.same(bench.ranks(n, records_on_rank, *case), lambda r, right=right: right[r])


def trains(bench: Bench):
    """Two steps with two ranks to each key/value head are one device's."""
    draw = bench.draws()
    base = RUN | dict(seed=draw.randrange(1000), n_kv_heads=draw.choice((1, 2)), vocab_size=draw.randint(257, 263))
    layout = dict(tp=4, sp=True)
    training.equal_to_one_device(bench, "step04_tp_sp", 4, base, layout)
