"""Laws on paper: FLOPs, bytes held, bytes sent, as functions of plain sizes. Steps and variants are not imported."""
