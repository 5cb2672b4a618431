"""Starts a step with all techniques and services; their flags are added to the step's own.

python -m extras step01_single_gpu.py --dropout 0.1
torchrun --nproc_per_node=4 -m extras step04_tp_sp.py --tp 2 --sync ring
"""

import importlib
import sys
from pathlib import Path

from common.trainer import main
from extras.services import devices, dry_run
from extras.services.run import ServedRun
from extras.services.seam import compose


def start(words: list[str]):
    """Run the step that `words[0]` names, with all techniques and services. The other words are flags."""
    steps = sorted(path.stem for path in Path(__file__).parents[1].glob("step0*.py"))
    name = Path(words[0]).stem if words else ""
    if name not in steps:
        sys.exit("python -m extras STEP FLAGS, where STEP is one of " + ", ".join(f"{step}.py" for step in steps))
    sys.argv[:] = words
    devices.set_environment()
    step = importlib.import_module(name)
    main(dry_run.instead_of(step.train), compose(step), ServedRun)


if __name__ == "__main__":
    start(sys.argv[1:])
