"""Run one measurement and print its table.

python -m tests.bench                    list the measurements
python -m tests.bench NAME [options]     --help after NAME shows its options
"""

import importlib
import sys

from common import UserError

MEASUREMENTS = {"plan": "tests.bench.plan"}


def main(argv: list[str]) -> int:
    """Call `main(argv)` of a measurement; a mistake is one line and exit status 2."""
    try:
        if not argv:
            for name, module in MEASUREMENTS.items():
                print(f"{name:12} {importlib.import_module(module).__doc__.splitlines()[0]}")
            return 0
        if argv[0] not in MEASUREMENTS:
            raise UserError(f"no measurement is called {argv[0]}; there are {', '.join(MEASUREMENTS)}")
        importlib.import_module(MEASUREMENTS[argv[0]]).main(argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
