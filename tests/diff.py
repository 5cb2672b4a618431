"""What one chapter adds to the one before: the diff of two neighbours' `train`.

python -m tests.diff 3 4
"""

import ast
import difflib
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def path_of(step: int) -> Path:
    """The file of a step."""
    (path,) = ROOT.glob(f"step{step:02d}_*.py")
    return path


def train_of(step: int) -> list[str]:
    """The lines of a step's `train`, without the blank ones."""
    text = path_of(step).read_text()
    (train,) = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "train"]
    lines = text.splitlines()[train.lineno - 1 : train.end_lineno]
    return [line for line in lines if line.strip()]


def main(argv: list[str]):
    """Print the diff of the two `train`s."""
    first, second = (int(word) for word in argv)
    names = [path_of(n).name for n in (first, second)]
    print("\n".join(difflib.unified_diff(train_of(first), train_of(second), *names, lineterm="", n=2)))


if __name__ == "__main__":
    main(sys.argv[1:])
