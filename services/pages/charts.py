"""Charts of a run, from the files in its directory: matplotlib draws them as SVG, in the page's colours and fonts."""

from pathlib import Path


def of_run(folder: Path) -> list[tuple[str, str]]:
    """(title, SVG)."""
    return []
