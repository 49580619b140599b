"""Decode attention: queries of the newest tokens over cached keys, one launch, or two where the keys are split.

A task is a block of query rows of one KV head of one sequence, over one split of the keys it sees (`task`). Rows are
counted query by query, the heads of a group first. Keys are counted by an index over what is visible (`visible`): first
the sinks, then the newest tokens, so that no task ever looks at a key outside; `addresses` says where they lie. `cpu`,
`cuda`, `subgroup`, `tensor_cores` and for prompts `hopper` attend; with several splits they leave normalised parts
and base-2 log-sum-exps, which `merge` turns into the result. `mass` and `merge_states` start from a result.
"""
