"""The layers of a `TikvCache`: `layer` has the class of most, from which the others are derived.

`ring` has layers whose slots may be a ring, and `streaming` those with a window and sinks. Layers of `indexed` have
keys of an indexer, of `groups` groups along tokens, of `states` a state; those of `host` lie in the host's memory, and
those of `cross` may hold an encoder's tokens. `room` says how much memory a layer has, `traced` is an update in
compiled code, and `state_calls` cuts calls of modules with a state into pieces.
"""
