"""Flags of variants of steps 3 to 5 that cannot work: one line, which names the flag."""

import pytest

from common import UserError
from common.model import PRESETS, ModelConfig
from services.run import check, compose
from tests.equal import SMALL

WRONG = {
    "--cp-mode ulysses": ("step05_cp_ring", 3, dict(cp=3, cp_mode="ulysses")),
    "--zero-replicas 3": ("step03_zero", 4, dict(zero=1, zero_replicas=3)),
    "--zero-replicas 2": ("step03_zero", 4, dict(zero=0, zero_replicas=2)),
    "--offload-optimizer cpu": ("step03_zero", 2, dict(zero=0, offload_optimizer="cpu")),
    "--offload-params cpu": ("step03_zero", 2, dict(zero=2, offload_params="cpu")),
    "--end-token 259": ("step01_single_gpu", 1, dict(documents="mask", end_token=259)),
}


@pytest.mark.parametrize("flag", WRONG)
def test_names_the_flag(flag):
    """Before anything is built."""
    step, world, flags = WRONG[flag]
    PRESETS["test"] = ModelConfig(**SMALL)
    with pytest.raises(UserError, match=f"^{flag}"):
        check(compose(__import__(step))(model="test", **flags), world)
