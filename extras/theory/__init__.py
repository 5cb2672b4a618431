"""Laws on paper: FLOPs, bytes held, bytes sent, seconds, as functions of plain sizes; the planner asks them."""
