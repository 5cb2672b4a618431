"""Run one measurement and print its table.

    python -m extras.bench NAME [options]     without NAME, it lists the names; --help: the options

The table goes to stdout, everything else to stderr.
"""

from types import ModuleType

from common import UserError
from extras.bench import contests, gpus, plan
from extras.start import start

MODULES: dict[str, ModuleType] = {  # name -> module with main(name, argv)
    **dict.fromkeys(contests.CONTESTS, contests),
    "plan": plan,
    "gpus": gpus,
}


def main(argv: list[str]):
    """Run the measurement that argv[0] names. Raises UserError."""
    if not argv or argv[0] not in MODULES:
        raise UserError(f"name one measurement: {', '.join(MODULES)}")
    MODULES[argv[0]].main(argv[0], argv[1:])


if __name__ == "__main__":
    start(main)
