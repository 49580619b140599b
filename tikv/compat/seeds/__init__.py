"""The source systems by their own names: `variants` (rows of `spec`), `layers`; the append plan is in `ops.ragged`."""
