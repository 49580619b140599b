"""Memory that knows how many tokens it holds."""
