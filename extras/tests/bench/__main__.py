"""Run one measurement and print its table.

    python -m extras.tests.bench                    list the measurements
    python -m extras.tests.bench NAME [options]     --help after NAME shows its options

The table goes to stdout, everything else to stderr. Figures go to extras/tests/bench/figures.
"""

import sys
from types import ModuleType

from common import UserError
from extras.tests.bench import attention, cluster, contests, plan

MODULES: dict[str, ModuleType] = {  # name -> module with main(name, argv)
    **dict.fromkeys(contests.CONTESTS, contests),
    "attention": attention,
    "plan": plan,
    "cluster-bytes": cluster,
}


def main(argv: list[str]) -> int:
    """Take the measurement that argv[0] names; returns the exit status. A mistake is one line."""
    try:
        if argv and argv[0] not in MODULES:
            raise UserError(f"no measurement is called {argv[0]}; there are {', '.join(MODULES)}")
        if argv:
            MODULES[argv[0]].main(*argv[:1], argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, module in MODULES.items() if not argv else ():
        about = contests.CONTESTS[name].about if module is contests else module.__doc__.splitlines()[0]
        print(f"{name:14} {about}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
