"""What several labs look at: a small decoder, a parameter's record, gradients, the ranks of a group, an error."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from common.comm import Mesh, all_reduce
from common.layout import layout_of, materialize
from common.model import Decoder, ModelConfig

CPU = torch.device("cpu")


def decoder(seed: int | None = None, dtype: torch.dtype = torch.float64, **shape: Any) -> Decoder:
    """A decoder of this shape on the meta device; with a seed it has memory and values."""
    with torch.device("meta"):
        model = Decoder(ModelConfig(**shape))
    if seed is not None:
        fill(model, seed, dtype)
    return model


def fill(model: Decoder, seed: int, dtype: torch.dtype = torch.float64):
    """Give what is on the meta device memory and values."""
    materialize(model, seed % 1000, CPU, dtype, [name for name, param in model.named_parameters() if param.is_meta])


def gradients(model: nn.Module, says: str = "the gradient of") -> dict[str, Tensor]:
    """Of parameters that are trained, by name; zero where there is none."""
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    return {f"{says} {name}": torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


def there_and_back(names: Iterable[str], y: Tensor, leaves: Iterable[Tensor], dy: Tensor) -> dict[str, Tensor]:
    """y and the gradients of the leaves, by name; zero for what y does not depend on."""
    return dict(zip(names, (y.detach(), *torch.autograd.grad(y, leaves, dy, materialize_grads=True)), strict=True))


def record(name: str, param: Tensor) -> dict[str, Any]:
    """A parameter's shape, and what its record says."""
    layout = layout_of(param)
    cuts = [[split.dim, split.over, split.start, split.stop, split.full] for split in layout.splits]
    found = {f"the shape of {name}": list(param.shape), f"the cuts of {name}": cuts}
    return found | {f"{name} is partial over": list(layout.partial_over), f"data_group of {name}": layout.data_group}


def same(before: Iterable[Tensor], after: Iterable[Tensor]) -> bool:
    """Whether these tensors are what they were."""
    return all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


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
