"""`TikvCache`, in `cache`: what a program calls, for all layers of a model together.

`options` checks its options, `kinds` says what the model's layers cache, and `choice` makes the layers for them.
`encoder_decoder` has the class for models with an encoder. `new_tokens`, `step_use`, `needs` and `generation` refuse
what would go wrong later: other texts, interrupted steps, too little memory, too long texts. `files` (with
`state_files`) and `snapshots` keep what a cache holds.
"""
