"""Formats tables as text."""


def table(rows: list[list[str]]) -> str:
    """Format rows of cells as an aligned text table. The first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        cells[0] = row[0].ljust(widths[0])
        lines.append("  ".join(cells))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
