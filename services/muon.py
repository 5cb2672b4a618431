"""A variant of the update (`--optimizer muon`): a matrix moves by its momentum made orthogonal, so it must be whole.

AdamW looks at each number alone, so any slice of a parameter can be updated where it lies. Muon cannot be cut like
that. With gradient G and momentum M of a matrix W [out, in], learning rate lr, weight decay d (Jordan et al. 2024):

    M = 0.95 M + 0.05 G          U = 0.95 M + 0.05 G           number by number, where the slices lie (Nesterov)
    O = orthogonal(U)            U = A S B^T -> about A B^T    needs all of U: five Newton-Schulz iterations
    W = (1 - lr d) W - lr 0.2 sqrt(max(out, in)) O             number by number, where the slices lie

0.2 sqrt(max) gives an update the size of AdamW's, so --lr and --weight-decay mean the same for both (Liu et al. 2025,
"Muon is Scalable for LLM Training", arXiv 2502.16982, called Moonlight here). `torch.optim.Muon` with "match_rms_adamw"
is the same on one device, bit for bit.

WHICH PARAMETERS. The hidden matrices, `*_proj.weight`: of attention, MLPs and each expert, alone. AdamW keeps norms,
embedding and head, as in both papers: a vector has no singular values, and a row of the embedding is looked up, not
multiplied. The router stays with AdamW, too: it is a classifier, as the head is. (This is a choice of this course.)

WHO OWNS WHAT, as in Moonlight's Algorithm 1. Momentum is cut by ZeRO as AdamW's moments are: 4 bytes a number, not 8.

    1  each rank makes U of its slice                              nothing is sent
    2  a unit's U is all-gathered over the n ranks that cut it     (n-1)/n S            ZeRO's dp (experts: expert_data)
    3  the parts of a matrix are all-gathered over tp              (tp-1)/tp S          where tensor parallelism cuts it
    4  each rank makes O of the matrices of which its slice has a part, keeps its own part, and drops the rest

S: bytes that are gathered, 2 a number: U is rounded to bf16 before it travels, as the iterations would round it anyway
(in fp64, nothing is rounded). A matrix on k slices is made orthogonal k times on each tp rank; in return, no O is sent.
Without ZeRO, each rank has all of U, and step 2 sends nothing. In fp32, layouts differ by the rounding of bf16.
"""

from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Mesh, all_gather
from common.layout import Split, layout_of

MOMENTUM = 0.95
A, B, C = 3.4445, -4.7750, 2.0315  # x -> A x + B x^3 + C x^5 drives singular values to 0.7 .. 1.2 (Jordan)


def is_hidden(name: str) -> bool:
    """Whether a parameter is updated by Muon, going by its name."""
    return name.endswith("_proj.weight")


def orthogonal(x: Tensor, iterations: int = 5) -> Tensor:
    """Matrices [n, rows, columns] -> each with all its singular values near 1, in the dtype of `x`.

    In bf16 it is what torch.optim.Muon computes. An odd polynomial of x changes singular values and nothing else.
    """
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # now no singular value is above 1
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if tall else x


def join(part: Tensor, split: Split, dim: int, mesh: Mesh) -> Tensor:
    """A rank's part of matrices [n, rows, columns] -> whole along `dim`, gathered from the ranks that share them."""
    group = mesh[split.over]
    parts = part.new_empty(group.size, *part.shape)
    all_gather(parts.view(-1), part.reshape(-1), group, "(muon)").wait()
    return torch.cat(tuple(parts[:: split.copies]), dim)


class Muon:
    """An update rule: Muon for the hidden matrices, and for the rest AdamW, whose place it takes.

    `pieces`: what this rank updates, by name: whole local parameters or, with a `unit` of step 3, parts of them.
    """

    def __init__(self, adamw: Any, pieces: dict[str, Tensor], params: dict[str, nn.Parameter], mesh: Mesh, unit: Any):
        """`adamw`: the rule so far, with its state. `params`: all those of the unit."""
        self.adamw, self.params, self.mesh, self.unit = adamw, params, mesh, unit
        self.hidden = {name: piece for name, piece in pieces.items() if is_hidden(name)}
        self.state, self.param_groups = adamw.state, adamw.param_groups
        for piece in self.hidden.values():  # keeps the first of AdamW's two, in its home (--offload-...)
            self.state[piece] = dict(momentum_buffer=self.state[piece]["exp_avg"])
        self.dtype = torch.float64 if next(iter(params.values())).dtype == torch.float64 else torch.bfloat16

    def own_part(self, name: str) -> tuple[int, int, int]:
        """Of a hidden parameter: this rank's first element, and from which matrix to which it has a part (experts)."""
        first = max(0, self.unit.first - self.unit.place[name][0]) if self.unit else 0
        each = self.params[name].shape[-2:].numel()
        return first, first // each, -(-(first + self.hidden[name].numel()) // each)

    def gather(self, updates: dict[str, Tensor]) -> dict[str, Tensor]:
        """Updates of this rank's pieces -> of all elements of these parameters, flat, in `dtype`, on the device."""
        unit, to = self.unit, dict(device=self.mesh.device, dtype=self.dtype)
        if unit is None:
            return {name: update.to(**to).flatten() for name, update in updates.items()}
        own, whole = torch.zeros(unit.length, **to), torch.empty(unit.length * unit.group.size, **to)
        for name, update in updates.items():
            unit.cut(own, name).copy_(update)
        all_gather(whole, own, unit.group, "(muon)").wait()
        return {name: whole[slice(*unit.place[name])] for name in updates}

    def orthogonal_part(self, name: str, update: Tensor) -> tuple[Tensor, float]:
        """The flat update of a parameter -> of the matrices of which this rank has a part: its part; and the scale."""
        param, (first, low, high) = self.params[name], self.own_part(name)
        rows, columns = param.shape[-2:]
        cuts = [(split, split.dim - param.dim()) for split in layout_of(param).splits]
        cuts = [(split, dim) for split, dim in cuts if dim >= -2]  # to be dealt experts cuts no matrix
        x = update[low * rows * columns : high * rows * columns].view(-1, rows, columns)
        for split, dim in cuts:
            x = join(x, split, dim, self.mesh)
        scale = 0.2 * max(x.shape[-2:]) ** 0.5
        x = orthogonal(x)
        for split, dim in cuts:
            x = x.narrow(dim, split.start, split.stop - split.start)
        return x.flatten()[first - low * rows * columns :][: self.hidden[name].numel()], scale

    def zero_grad(self):
        """Drop the gradients."""
        self.adamw.zero_grad()

    @torch.no_grad()
    def step(self):
        """Update the pieces from their gradients. A collective: ranks that share a unit or a matrix meet here."""
        updates = {}
        for name, piece in self.hidden.items():
            momentum = self.state[piece]["momentum_buffer"].lerp_(piece.grad, 1 - MOMENTUM)
            updates[name], piece.grad = piece.grad.lerp(momentum, MOMENTUM), None  # AdamW skips what has no gradient
        for name, update in self.gather(updates).items():
            (part, scale), piece, group = self.orthogonal_part(name, update), self.hidden[name], self.param_groups[0]
            piece.mul_(1 - group["lr"] * group["weight_decay"])
            piece.add_(part.view_as(piece).to(piece), alpha=-group["lr"] * scale)
        self.adamw.step()


def take_over(optimizer: Any, config: Any, mesh: Mesh):
    """--optimizer muon: put the rule in place of AdamW, whose state is still zero. Each of ZeRO's units has its own.

    AdamW's second number is freed here. It has taken no more memory than the gradients will, which do not exist yet.
    """
    updates = getattr(optimizer, "updates", None)
    if config.optimizer == "muon" and updates is None:
        optimizer.inner = Muon(optimizer.inner, optimizer.masters, optimizer.params, mesh, None)
    for update in updates or ():
        for unit in update.units if config.optimizer == "muon" else ():
            if any(map(is_hidden, unit.trained)):  # also where its slice has no piece
                update.rule = Muon(update.rule, unit.pieces, unit.named, mesh, unit)
