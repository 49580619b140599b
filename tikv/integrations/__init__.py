"""Drop-in caches for model libraries. Each module imports its library, so import the one you use."""
