"""Whole lives of a `TikvCache`, tried by machine: random operations in any order, each compared with no cache at all."""
