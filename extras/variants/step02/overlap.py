"""Starts an all-reduce for each gradient during the last backward (`--sync overlap`), without buckets.

It hides communication as buckets do, but sends many small messages, and each costs a latency. In step 2 this is
BucketSync with a limit of 0 bytes, because a bucket holds at least one parameter.
"""

from dataclasses import replace
from typing import Any

from common.comm import Mesh
from common.model import Decoder
from step02_ddp import SYNCS, BucketSync


class OverlapSync(BucketSync):
    """BucketSync with a bucket for each parameter."""

    def __init__(self, model: Decoder, config: Any, mesh: Mesh):
        super().__init__(model, replace(config, bucket_mb=0.0), mesh)


SYNCS["overlap"] = OverlapSync
