"""1F1B with messages of 8 bits (--schedule 1f1b-int8). It is lossy: x and dx are rounded.

A token's numbers are divided by a scale, so that the largest becomes 127, and rounded to integers:

    x = [0.5 -2.0 1.0], scale = 2 / 127    sent: [32 -127 64], scale    received: [0.504 -2.0 1.008]

In backward, rounding counts as the identity ("straight-through estimator", Bengio et al. 2013).
Wang et al. 2022, "Fine-tuning Language Models over Slow Networks", compress these messages, too.

LAW. A message has dim + 4 bytes for each token, where fp32 has 4 dim. For tiny that is 132 in place
of 512: with 4 sequences of 256 tokens, 135,168 bytes in place of 524,288.

Run it:    torchrun --nproc_per_node=4 -m extras step06_pipeline.py --pp 4 --schedule 1f1b-int8
You should see losses that agree with step 1's in about three digits.
"""

import torch
from torch import Tensor

from common.comm import exchange
from extras.techniques.compressed_sync import from_int8, to_int8
from step06_pipeline import SCHEDULES, OneForwardOneBackward, empty_message


class Int8Pipeline(OneForwardOneBackward):
    """1F1B whose messages are integers, with a scale for each token."""

    def send_receive(
        self, peer: int, send: Tensor | None = None, receive_for: int | None = None
    ) -> Tensor | None:
        """As `Pipeline.send_receive`."""
        if not 0 <= peer < self.group.size:
            return None
        sends = []
        receives = []
        if send is not None:
            sends.append((to_int8(send), peer))
        if receive_for is not None:
            x = empty_message(self.stage.tokens[receive_for], self.model, self.sp_ranks)
            message = x.new_empty(*x.shape[:2], x.shape[2] + 4, dtype=torch.int8)
            receives.append((message, peer))
        exchange(sends, receives, self.group).wait()
        return from_int8(message, x.dtype) if receives else None


SCHEDULES["1f1b-int8"] = Int8Pipeline
