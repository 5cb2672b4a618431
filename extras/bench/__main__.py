"""Run one measurement and print its table.

    python -m extras.bench NAME [options]     without NAME, it lists the names; --help: the options

The table goes to stdout, everything else to stderr.
"""

import sys
from types import ModuleType

from common import UserError
from extras.bench import cluster, contests, gpus, plan

MODULES: dict[str, ModuleType] = {  # name -> module with main(name, argv)
    **dict.fromkeys(contests.CONTESTS, contests),
    "plan": plan,
    "gpus": gpus,
    "cluster-bytes": cluster,
}


def main(argv: list[str]):
    """Run the measurement that argv[0] names. A UserError here, not on a rank, prints one line;
    exit status 2.
    """
    try:
        if not argv or argv[0] not in MODULES:
            raise UserError(f"name one measurement: {', '.join(MODULES)}")
        MODULES[argv[0]].main(argv[0], argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
