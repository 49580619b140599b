"""What the command line runs: `doctor`, `support`, `bench`, `export`, `warmup`; `roofline` has bytes and rates."""
