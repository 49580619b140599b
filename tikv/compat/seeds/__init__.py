"""The source systems by their own names: `variants` (rows of `spec`), `layers`, `append_plan`."""
