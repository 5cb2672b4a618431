"""python tests/count.py STEP.py FLAGS: runs a step, and leaves in calls-RANK.json how often it called each function.

Of those functions that are in step0*.py or common/ beside the step. It imports nothing of ours.
"""

import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path

seen: Counter = Counter()
folders = {os.getcwd(), os.path.join(os.getcwd(), "common")}


def profile(frame, event: str, _argument):
    """What Python calls at each call."""
    path = frame.f_code.co_filename
    if event == "call" and os.path.dirname(path) in folders:
        seen[f"{os.path.basename(path)}:{frame.f_code.co_firstlineno} {frame.f_code.co_name}"] += 1


if __name__ == "__main__":
    target, *sys.argv = sys.argv[1:]
    sys.path[0] = os.getcwd()
    sys.setprofile(profile)
    try:
        runpy.run_path(os.path.abspath(sys.argv[0]), run_name="__main__")
    finally:
        sys.setprofile(None)
        Path(target, f"calls-{os.environ.get('RANK', 0)}.json").write_text(json.dumps(seen))
