"""`TikvCache`."""
