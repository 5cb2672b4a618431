"""What several labs look at: a small decoder and its losses, a function there and back, a record, groups, an error."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from common.comm import Group, Mesh, Pending, all_reduce
from common.layout import layout_of, materialize
from common.model import Decoder, ModelConfig
from extras.labs.course import FOUND, Case, Row
from extras.labs.tape import Tape

CPU = torch.device("cpu")
SHAPE = dict(dim=16, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=12, vocab_size=13, seq_len=6)


def decoder(seed: int | None = None, dtype: torch.dtype = torch.float64, **shape: Any) -> Decoder:
    """A decoder of SHAPE, but for `shape`, on the meta device; with a seed it has memory and values."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(**SHAPE | shape))
    if seed is not None:
        fill(model, seed, dtype)
    return model


def fill(model: Decoder, seed: int, dtype: torch.dtype = torch.float64):
    """Give what is on the meta device memory and values."""
    materialize(model, seed % 1000, CPU, dtype, [name for name, param in model.named_parameters() if param.is_meta])


class Small(Case):
    """A small decoder, and two sequences of drawn tokens for each rank, step and micro-batch (of `micro`)."""

    def model(self) -> Decoder:
        """Filled."""
        return decoder(self.seed)

    def loss(self, model: Decoder, *which: int) -> Tensor:
        """The loss of the tokens of (rank, step, micro-batch)."""
        tokens = self.ids(f"tokens {which}", SHAPE["vocab_size"], 2, SHAPE["seq_len"])
        return model(tokens, tokens.flip(1))

    def backwards(self, model: Decoder, sync: Any, mesh: Mesh, turn: int) -> Iterator[Tape]:
        """A rank's step as far as finish(): a tape of the backward of each micro-batch."""
        sync.begin(self.micro)
        for i in range(self.micro):
            loss = self.loss(model, mesh["dp"].rank, turn, i)
            with Tape(mesh) as tape:
                loss.backward()
            yield tape


def gradients(model: nn.Module, says: str = "the gradient of") -> dict[str, Tensor]:
    """Of parameters that are trained, by name; zero where there is none."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return {f"{says} {name}": torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


def there_and_back(
    names: Iterable[str], function: Callable, leaves: Iterable[Tensor], dy: Tensor, mesh: Mesh | None = None
) -> dict[str, Any]:
    """function(*leaves) and the gradients of the leaves, by name; whether leaves and dy stay; with a mesh, bytes sent.

    A leaf is given as a plain tensor, or is a module's parameter. The gradient is zero of what y does not depend on.
    """
    leaves, dy = [x if x.requires_grad else x.detach().clone().requires_grad_() for x in leaves], dy.clone()
    before = [x.detach().clone() for x in (*leaves, dy)]
    there, back = (Tape(mesh), Tape(mesh)) if mesh else (nullcontext(), nullcontext())
    with there:
        y = function(*leaves)
    with back:
        grads = torch.autograd.grad(y, leaves, dy, materialize_grads=True)
    found = dict(zip(names, (y.detach(), *grads), strict=True)) | {"the inputs stay": same(before, (*leaves, dy))}
    return found | ({"bytes forward": there.sent(), "bytes backward": back.sent()} if mesh else {})


def record(name: str, param: Tensor) -> Iterator[Row]:
    """Rows of a parameter's shape, and of what its record says: cuts (dim, over, start, stop, full) and so on."""
    layout = layout_of(param)
    yield f"the shape of {name}", list(param.shape), FOUND
    found = [[shard.dim, shard.over, shard.start, shard.stop, shard.full] for shard in layout.shards]
    yield f"the cuts of {name}", found, FOUND
    says = f"partial_over of {name} (dimensions over which its gradient is still to be summed)"
    yield says, sorted(layout.partial_over), FOUND
    yield f"data_dim of {name}", layout.data_dim, FOUND


def same(before: Iterable[Tensor], after: Iterable[Tensor]) -> bool:
    """Whether these tensors are what they were."""
    return all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


def apart(mesh: Mesh) -> Group:
    """A group that is not the world, and whose ranks count otherwise: all but rank 0, which is in a group of one."""
    for row in ([0], range(1, mesh.world)):
        mesh.enter("apart", np.array([row]))
    return mesh["apart"]


def under_way() -> int:
    """How many operations somebody still keeps."""
    return sum(isinstance(thing, Pending | dist.Work) for thing in gc.get_objects())


def members(mesh: Mesh, name: str) -> Tensor:
    """The ranks of a group of the mesh."""
    here = torch.zeros(mesh.world).index_fill_(0, torch.tensor([mesh.rank]), 1.0)
    all_reduce(here, mesh[name]).wait()
    return here.nonzero().flatten()


def refused(function: Callable[..., Any], *args: Any) -> str:
    """The kind of error that a call ends with. Raises NotImplementedError: the function is not written yet."""
    try:
        function(*args)
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__
    return "no error"
