"""What one chapter adds to the one before: the diff of two neighbours' `train`.

python -m extras.tests.diff 3 4
"""

import difflib
import importlib
import inspect
import sys
from pathlib import Path


def train_of(step: int) -> tuple[str, list[str]]:
    """A step's module, and the lines of its `train`, without the blank ones."""
    (path,) = Path(__file__).parents[2].glob(f"step{step:02d}_*.py")
    lines = inspect.getsource(importlib.import_module(path.stem).train).splitlines()
    return path.stem, [line for line in lines if line.strip()]


def main(argv: list[str]):
    """Print the diff of the two `train`s."""
    (before, old), (after, new) = (train_of(int(word)) for word in argv)
    print("\n".join(difflib.unified_diff(old, new, before, after, lineterm="", n=2)))


if __name__ == "__main__":
    main(sys.argv[1:])
