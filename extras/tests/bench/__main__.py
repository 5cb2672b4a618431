"""Run one measurement and print its table.

    python -m extras.tests.bench                    list the measurements
    python -m extras.tests.bench NAME [options]     --help after NAME shows its options

The table goes to stdout, everything else to stderr. Figures go to extras/tests/bench/figures.
"""

import importlib
import sys

from common import UserError
from extras.tests.bench.contests import CONTESTS

MODULES = {  # name -> module with main(name, argv)
    **dict.fromkeys(CONTESTS, "contests"),
    "attention": "attention",
    "plan": "plan",
    "cluster-bytes": "cluster",
}


def main(argv: list[str]) -> int:
    """Call the measurement's `main`; returns the exit status. A mistake is one line."""
    try:
        if argv and argv[0] not in MODULES:
            raise UserError(f"no measurement is called {argv[0]}; there are {', '.join(MODULES)}")
        if argv:
            importlib.import_module(f"extras.tests.bench.{MODULES[argv[0]]}").main(argv[0], argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, module in MODULES.items() if not argv else ():
        row = CONTESTS.get(name)
        about = row.about if row else importlib.import_module(f"extras.tests.bench.{module}").__doc__
        print(f"{name:12} {about.splitlines()[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
