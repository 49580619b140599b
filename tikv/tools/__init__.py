"""What the command line runs: `doctor`, `support`, `bench`; and `roofline`, the arithmetic of bytes and rates."""
