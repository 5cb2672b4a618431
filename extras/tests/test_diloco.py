"""DiLoCo (extras/variants/step02/diloco.py) beside a plain loop of two models. (With H = 1, and resumed: rows.py.)"""

from copy import deepcopy

import torch

from extras.tests import equal
from extras.tests.equal import difference
from step01_single_gpu import Optimizer, learning_rate, scale

FLAGS = dict(steps=6, global_batch_size=4, lr=0.02, save_every=0)


def two_models() -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process: two models take three steps of AdamW each, on half of each batch, then torch's SGD an outer step."""
    config = equal.config_of("step01_single_gpu", FLAGS)
    parts = equal.watch("step01_single_gpu", FLAGS | dict(steps=0)).parts
    shared, models = parts.model, [deepcopy(parts.model) for _ in range(2)]
    inner = [Optimizer(model, config) for model in models]
    outer, losses = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True), []
    for step in range(6):
        tokens, targets = parts.data.batch(step)
        losses.append(0.0)
        for model, optimizer, x, y in zip(models, inner, tokens.chunk(2), targets.chunk(2), strict=True):
            loss = model(x, y) / y.numel()
            loss.backward()
            losses[-1] += loss.item() / 2
            norm = torch.nn.utils.get_total_norm(optimizer.gradients().values()).item()
            scale(optimizer.gradients(), min(1.0, config.grad_clip / norm))
            optimizer.step(learning_rate(step, config))
            optimizer.zero_grad()
        if step % 3 == 2:
            for param, *copies in zip(*(model.parameters() for model in (shared, *models)), strict=True):
                param.grad = param.detach() - (copies[0].detach() + copies[1].detach()) / 2
            outer.step()
            for model in models:
                model.load_state_dict(shared.state_dict())
    return losses, {name: param.detach() for name, param in shared.named_parameters()}


def test_ranks_that_meet_are_two_models(pools):
    """Losses and weights to 1e-10. Of six steps two send weights, as much as a step of step 2 its gradients."""
    losses, weights = two_models()
    plain = pools(2).run(equal.record, "step02_ddp", FLAGS)[0].sent[0]["dp"]
    for seen in pools(2).run(equal.record, "step02_ddp", FLAGS | dict(sync="diloco", inner_steps=3), equal.Apart):
        assert difference(seen.losses, losses) < 1e-10
        assert max(difference(seen.parameters[name], weight) for name, weight in weights.items()) < 1e-10
        loss_alone, *_ = sent = [step["dp"] for step in seen.sent]
        assert sent == [loss_alone, loss_alone, plain] * 2 and loss_alone == 8
