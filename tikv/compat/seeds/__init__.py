"""The source systems' functions under their own names: `variants` (rows of `spec`), `layers`, `append_plan`."""
