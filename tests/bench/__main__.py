"""Run one measurement and print its table.

    python -m tests.bench                    list the measurements
    python -m tests.bench NAME [options]     run tests/bench/NAME.py; --help after NAME shows its options

The table goes to stdout, everything else to stderr.
"""

import importlib
import sys
from pathlib import Path


def available() -> dict[str, str]:
    """Each measurement's name and the first line of its docstring."""
    found = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    return {name: importlib.import_module(f"tests.bench.{name}").__doc__.splitlines()[0] for name in found}


def main(argv: list[str]) -> int:
    """Dispatch to `tests.bench.NAME.main(argv)`; returns the exit status."""
    if argv and (Path(__file__).parent / f"{argv[0]}.py").exists() and not argv[0].startswith("_"):
        importlib.import_module(f"tests.bench.{argv[0]}").main(argv[1:])
        return 0
    if argv:
        print(f"error: no measurement is called {argv[0]}", file=sys.stderr)
    for name, summary in available().items():
        print(f"{name:12} {summary}", file=sys.stderr if argv else sys.stdout)
    return 2 if argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
