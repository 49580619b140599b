"""What several of the examples use: a small model, its memory, and the likelihood of a text."""
