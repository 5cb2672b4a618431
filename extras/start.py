"""Starts the commands of this folder as the trainer starts a step."""

import sys
from collections.abc import Callable

from common.launch import print_error


def start(main: Callable[[list[str]], None]):
    """Run a command on the words after its name. A mistake is one line, as `report` prints it."""
    try:
        main(sys.argv[1:])
    except Exception as problem:
        sys.exit(print_error(problem))
