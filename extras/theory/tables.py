"""Tables of text."""


def table(rows: list[list[str]]) -> str:
    """Rows of cells, the first a header, as an aligned text table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append("  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(cells)))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])
