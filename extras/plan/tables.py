"""Formats tables as text."""


def table(rows: list[list[str]]) -> str:
    """Format rows of cells as an aligned text table. The first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(cells)))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
