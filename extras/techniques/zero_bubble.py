"""Zero-bubble schedules, --schedule zb-h1, zb-h2, zbv and dualpipev: backward in two actions.

For y = x W^T, backward computes dx = dy W, for which the previous rank waits, and dW = dy^T x, for
which nobody waits. So an action B computes dx, and keeps x and dy. An action W computes dW later,
when the rank would otherwise be idle (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"). In the
pictures F is a digit, B a letter and W a dash, each takes a unit of time, and a dot is idle time:

    zb-h1, 4 ranks, 6 micro-batches         zb-h2, 3 ranks, 5 micro-batches
    0123...a-4b-5c-d-e-f-                   01234a-b-c-d-e-..
    .012..a3b-4c-5d-e-f--                   .012a3b4c-d-e---.
    ..01.a2b3c-4d-5e-f---                   ..0a1b2c3d4e-----
    ...0a1b2c3d-4e-5f----

    zbv, 3 ranks, 5 micro-batches           dualpipev, 2 ranks, 4 micro-batches
    012340a-1b-2c-a-3d-b-4e-c-d-e-..        0120a-13b-2a-c-3b-d-c-.d-
    .012031a-2b-4a-3c-b-4d-ced-e---.        .00112a-2a-3b-3b-c-c-dd--
    ..001122a-3a-3b-4b-4c-cddee-----

zb-h1 is 1F1B, in which the last W fill the cool-down. zb-h2 begins with twice as many forwards. In
zbv and dualpipev a rank has two shorter stages, and the stages form a V: stages r and 2p-1-r are on
rank r. So the loss is on rank 0, which can begin its backward at once. zbv is from Qi et al. 2024,
"Pipeline Parallelism with Controllable Memory", and dualpipev from the code of DeepSeek's DualPipe
(DeepSeek-V3, section 3.2.1), which also overlaps a forward with a backward.

LAW. Let F, B and W take f, b and w. This is how long a rank is idle in a step, and of how many
micro-batches it holds activations, from F to W, at most:

    1f1b         (p-1) (f + b + w)        always                           p
    zb-h1        (p-1) (f + b - w)        if w <= f, w <= b, m >= p        p
    zb-h2        (p-1) (f + b - 2w) *     if w <= f, 2w <= f+b, m >= 2p-1  2p - 1
    zbv          0 *                      if f = b = w, m >= 2p - 1        p
    dualpipev    (p-1) f                  if f = b = w, m >= 2p            p + 1/2

*: between its first F and its last W. In zbv and dualpipev, f, b and w are those of the shorter
stages. In the first picture a rank is idle for 3 of 21 units; 1F1B would be idle for 9 of 27.

W computes the gradients of the matrices in layers, also those of experts. Gradients of the norms,
embedding, router and head are computed in B (for the head, W would need dy for all the vocabulary).
But B changes no `.grad`: W adds all gradients of a stage, last layer first, as a backward would, so
that the sums of syncs and ZeRO can start in their usual order. With --zero 3, the weights that B
has gathered are freed by W, or by an F that comes earlier.

Run it:    torchrun --nproc_per_node=4 -m extras step06_pipeline.py --pp 4 --schedule zb-h1
You should see step 1's losses.
"""

from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from common.comm import Mesh
from common.model import Decoder
from common.schedules import Action
from extras.techniques._orders import ORDERS, Order, OrderedPipeline
from step06_pipeline import SCHEDULES, Config, Stage
from step07_moe_ep import ExpertLinear, expert_product

COSTS = {"F": 1, "B": 1, "W": 1}

# --- The order of the actions


def write_out(stages: tuple[int, ...], *phases: tuple[int, str]) -> list[Action]:
    """The actions of all phases: (3, "F0 B0 W") repeats its words three times.

    F0 is the forward of the next micro-batch through stages[0], B1 the next backward through
    stages[1]. W is the oldest W that is left, if there is one; the last ones are appended.
    """
    actions = []
    counts = defaultdict(int)  # word -> the next micro-batch
    left = []
    for times, words in phases:
        for word in words.split() * times:
            if word == "W":
                actions += left[:1]
                left = left[1:]
                continue
            action = Action(word[0], counts[word], stages[int(word[1])])
            actions.append(action)
            counts[word] += 1
            if action.kind == "B":
                left.append(action._replace(kind="W"))
    return actions + left


def zb_h1(p: int, m: int, v: int, rank: int, depth: int = 1) -> list[Action]:
    """ZB-H1, or ZB-H2 if `depth` is 2. W lags behind B, so that the last W fill the cool-down."""
    warm_up = min(m, depth * (p - 1 - rank))
    lag = min(m - warm_up, depth * rank)
    steady = m - warm_up - lag
    phases = [(warm_up, "F0"), (lag, "F0 B0"), (steady, "F0 B0 W"), (warm_up, "B0 W")]
    return write_out((rank,), *phases)


def zbv(p: int, m: int, rank: int) -> list[tuple[int, str]]:
    """The phases of ZB-V for at least 2p - 1 micro-batches."""
    m = max(m, 2 * p - 1)
    far = p - rank  # ranks from this one to the last, where the V turns
    return [
        (2 * far - 1, "F0"),  # until the first micro-batch has turned, and is here again
        (rank, "F1 F0"),  # until it is on rank 0, which has the loss
        (far, "F1 B1 W"),
        (m - p - far + 1, "F0 B0 W F1 B1 W"),
        (far - 1, "B0 W F1 B1 W"),  # no F0 is left
        (rank, "B0 B1"),  # other ranks wait for B, so W waits
        (far, "B0 W"),
    ]


def dualpipev(p: int, m: int, rank: int) -> list[tuple[int, str]]:
    """The phases of DualPipeV for at least 2p micro-batches, numbered as in DeepSeek's code."""
    m = max(m, 2 * p)
    near = rank + 1
    far = p - 1 - rank
    return [
        (2 * far, "F0"),  # 1: until the next rank has the first micro-batch on its way up
        (near, "F0 F1"),  # 2: until the first gradient is here
        (far, "B1 W F1"),  # 3
        (m - 2 * far - near, "F0 B1 W F1 B0 W"),  # 4
        (far, "B1 W F1 B0 W"),  # 5: no F0 is left
        (near // 2, "B1 W B0 W"),  # 6: no F1 is left
        (near % 2, "B1 W B0"),  # 6: the pair in the middle
        (near // 2, "B1 B0"),  # 6: other ranks wait for B, so W waits
        (far, "W B0"),  # 7; `write_out` appends 8, the last W
    ]


def in_vee(phases: Callable, p: int, m: int, v: int, rank: int) -> list[Action]:
    """A rank's list in a V. If there are too few micro-batches, longer phases are cut."""
    if v == 1:  # a single rank has a single stage
        return zb_h1(p, m, v, rank)
    actions = write_out((rank, 2 * p - 1 - rank), *phases(p, m, rank))
    return [action for action in actions if action.micro_batch < m]


def vee(p: int, v: int) -> list[int]:
    """The ranks of p v stages: down through all ranks and, if v is 2, up again."""
    down = list(range(p))
    return down + down[::-1] if v == 2 else down


# --- The actions


def weight_gradient(x: Tensor, dy: Tensor, counts: Tensor | None) -> Tensor:
    """x [..., in], dy [..., out] -> dW of y = x W^T [out, in], of experts [experts, out, in]."""
    if counts is None:
        return dy.flatten(0, -2).T @ x.flatten(0, -2)
    sizes = counts.tolist()
    parts = zip(x.split(sizes), dy.split(sizes), strict=True)
    return torch.stack([dy_of_expert.T @ x_of_expert for x_of_expert, dy_of_expert in parts])


class SplitProduct(torch.autograd.Function):
    """y = x W^T. Backward computes dx, and leaves a function that computes dW."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Tensor | None, leave: Callable) -> Tensor:
        """nn.Linear's forward or, with `counts`, ExpertLinear's."""
        ctx.save_for_backward(x)
        ctx.weight = weight  # the parameter: under recomputation, saved_tensors has a detached copy
        ctx.counts = counts
        ctx.leave = leave
        return F.linear(x, weight) if counts is None else expert_product(x, weight, counts)

    @staticmethod
    def backward(ctx, dy: Tensor):
        """dy -> dx. Calls `leave` with W and the function."""
        (x,) = ctx.saved_tensors
        ctx.leave(ctx.weight, partial(weight_gradient, x, dy, ctx.counts))
        if ctx.counts is None:
            dx = dy @ ctx.weight
        else:
            dx = expert_product(dy, ctx.weight.mT, ctx.counts)
        return dx, None, None, None


class SplitStage(Stage):
    """A stage whose backward is in two actions, B and W."""

    def __init__(self, model: Decoder, layers: range, positions: Tensor, number: int):
        super().__init__(model, layers, positions, number)
        self.later = defaultdict(list)  # parameter -> functions that the running B leaves for W
        self.waiting: dict[int, tuple] = {}  # micro-batch -> gradients from its B, and its `later`
        # A tied matrix that two stages of this rank share: the last stage's terms, by micro-batch
        self.tied_terms: dict[int, list[Tensor]] | None = None
        for n in layers:
            for module in model.model.layers[str(n)].modules():
                if isinstance(module, nn.Linear | ExpertLinear):
                    module.forward = partial(self.product, module)

    @torch.compiler.disable  # a compiled backward would not call `leave`
    def product(self, module: nn.Module, x: Tensor, counts: Tensor | None = None) -> Tensor:
        """The forward of a matrix."""
        return SplitProduct.apply(x, module.weight, counts, self.leave)

    def leave(self, param: nn.Parameter, gradient: Callable[[], Tensor]):
        """Keep a function for W. A parameter has several if its module is called several times."""
        self.later[param].append(gradient)

    def backward(self, i: int, dy: Tensor | None) -> Tensor | None:
        """B: return dx, or None on the first stage. No `.grad` changes."""
        x, edge = self.graphs.pop(i)
        params = list(self.model.parameters())  # those of another stage get no gradient
        inputs = params if self.is_first else [*params, x]  # tokens have no gradient
        dys = None if self.is_last else (dy,)
        with record_function(f"B{i}.{self.number}"):
            gradients = torch.autograd.grad((edge,), inputs, dys, allow_unused=True)
        ready = defaultdict(list)
        for param, gradient in zip(params, gradients, strict=False):
            if gradient is not None:  # None: W computes it, or the parameter is in another stage
                ready[param].append(gradient)
        self.waiting[i] = (ready, self.later)
        self.later = defaultdict(list)
        return None if self.is_first else gradients[-1]

    def compute_weight_gradients(self, i: int):
        """W: add each parameter's gradient to `.grad`, last layer first; hooks are called."""
        ready, later = self.waiting.pop(i)
        with record_function(f"W{i}.{self.number}"):
            for param in reversed(list(self.model.parameters())):
                terms = ready.pop(param, [])
                terms += [function() for function in later.pop(param, [])]
                if self.tied_terms is not None and param is self.model.lm_head.weight:
                    if self.is_last:  # a sync waits for one gradient a micro-batch: it comes later
                        self.tied_terms[i] = terms
                        continue
                    terms += self.tied_terms.pop(i)
                if terms:
                    torch.autograd.backward((param,), (sum(terms[1:], terms[0]),))


class SplitPipeline(OrderedPipeline):
    """Runs F, B and W."""

    stage_type = SplitStage

    def __init__(self, config: Config, model: Decoder, mesh: Mesh, positions: Tensor):
        """As `Pipeline`. If embedding and head are tied, rank 0's two stages in a V share them."""
        super().__init__(config, model, mesh, positions)
        if model.config.tied and self.group.rank == 0 and len(self.stages) > 1:
            tied_terms = {}
            for stage in self.stages.values():
                stage.tied_terms = tied_terms

    def compute(self, action: Action, x_or_dy: Tensor | None) -> Tensor | None:
        """Run an action."""
        if action.kind == "W":
            return self.stages[action.stage].compute_weight_gradients(action.micro_batch)
        return super().compute(action, x_or_dy)


ORDERS["zb-h1"] = Order(zb_h1, COSTS)
ORDERS["zb-h2"] = Order(partial(zb_h1, depth=2), COSTS)
ORDERS["zbv"] = Order(partial(in_vee, zbv), COSTS, 2, vee)
ORDERS["dualpipev"] = Order(partial(in_vee, dualpipev), COSTS, 2, vee)
for name in ("zb-h1", "zb-h2", "zbv", "dualpipev"):
    SCHEDULES[name] = SplitPipeline
