"""Decode attention: queries of the newest tokens over cached keys, in one launch, or in two if the keys are split.

A task is a block of query rows of one KV head of one sequence, over one split of the keys it sees (`task`). Rows are
counted query by query, the heads of a group first. An index counts the visible keys (`visible`): first the sinks, then
the newest tokens, so no task looks at a key outside. `addresses` has their addresses. Each folder has the kernels of an
architecture that compute attention: `cpu`, `spirv`, `cuda`, and of CUDA `sm80` and `sm90`. With several splits they
write normalised parts and base-2 log-sum-exps, which `merge` turns into the result. `mass` and `merge_states` start
from a result.
"""
