"""What a run costs on paper: bytes, FLOPs, traffic. Pure functions of shape, precision and layout."""
