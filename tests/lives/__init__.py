"""Whole lives of a `TikvCache`: random operations in any order, each compared with a model without a cache."""
