"""Prints what one chapter adds to the one before: the diff of the two steps' `train`, without blank lines.

python -m extras.tests.diff 3 4
"""

import difflib
import importlib
import inspect
import sys
from pathlib import Path


def main(argv: list[str]):
    """Print the diff of the `train` functions of two steps."""
    paths = [next(Path(__file__).parents[2].glob(f"step{int(word):02d}_*.py")) for word in argv]
    sources = [inspect.getsource(importlib.import_module(path.stem).train) for path in paths]
    old, new = ([line for line in source.splitlines() if line.strip()] for source in sources)
    print("\n".join(difflib.unified_diff(old, new, *(path.stem for path in paths), lineterm="", n=2)))


if __name__ == "__main__":
    main(sys.argv[1:])
