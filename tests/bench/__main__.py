"""Run one measurement and print its table.

    python -m tests.bench                    list the measurements
    python -m tests.bench NAME [options]     --help after NAME shows its options

The table goes to stdout, everything else to stderr. Figures go to tests/bench/figures.
"""

import importlib
import sys

from tests.bench.contests import CONTESTS
from tests.bench.runs import RUNS

MODULES = {  # name -> module with main(name, argv)
    **dict.fromkeys(CONTESTS, "contests"),
    **dict.fromkeys(RUNS, "runs"),
    "attention": "attention",
    "experts": "experts",
    "timelines": "timelines",
    "versions": "versions",
}


def main(argv: list[str]) -> int:
    """Call the measurement's `main`; returns the exit status."""
    if argv and argv[0] in MODULES:
        importlib.import_module(f"tests.bench.{MODULES[argv[0]]}").main(*argv[:1], argv[1:])
        return 0
    if argv:
        print(f"error: no measurement is called {argv[0]}", file=sys.stderr)
    for name, module in MODULES.items():
        row = (CONTESTS | RUNS).get(name)
        about = row.about if row else importlib.import_module(f"tests.bench.{module}").__doc__
        print(f"{name:12} {about.splitlines()[0]}", file=sys.stderr if argv else sys.stdout)
    return 2 if argv else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
