"""Mistakes that a chapter's own tests notice. A line each: where it is put in, what it becomes, who must notice, why.

pytest tests/test_faults.py                   every text below stands in the program, once
pytest tests/test_faults.py -m exhaustive     each is put into a copy of the course, and its test must fail there
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """One mistake."""

    module: str  # "step02_ddp" or "common.comm"
    old: str  # text that occurs once in the file
    new: str  # what it becomes
    test: str  # "file::test", in tests/: this one fails
    meaning: str  # what is wrong then; a link, if others had it


# fmt: off
FAULTS = [
    # --- chapter 1, and common/{model,data,layout,trainer}.py
    # --- chapter 2, and common/comm.py
    Fault("step02_ddp", 'missing = n_micro_batches * len(', 'missing = (n_micro_batches - 1) * len(', "test_step02::test_bucket_sync_sums", "the last micro-batch is added after its sum: https://github.com/deepspeedai/DeepSpeed/pull/7985"),  # noqa: E501
    # --- chapter 3
    # --- chapter 4
    # --- chapter 5
    # --- chapter 6, and common/schedules.py
    # --- chapter 7
]
