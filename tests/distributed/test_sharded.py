"""A cache sharded by heads, by tokens and by both, in processes of a gloo group, against one store."""

import pytest

pytest.importorskip("torch.distributed")

import on_ranks
from processes import Processes
from twins import OPERATIONS, WRITES

SLIDING = {"window": [9, None], "sinks": 2}
CASES = [  # shard, mesh, interleave, changes of the form, dtype of queries, operations
    pytest.param("tokens", None, 4, SLIDING | {"batch_size": 2}, "float32", OPERATIONS, id="tokens"),
    pytest.param("heads", None, 64, SLIDING | {"batch_size": 2}, "float32", WRITES, id="heads"),
    pytest.param("tokens", None, 1, {"window": 7, "dtype": "float16"}, "float16", WRITES, id="token-by-token"),
    pytest.param("tokens", None, 5, SLIDING | {"dtype": "int8"}, "float32", WRITES, id="int8", marks=pytest.mark.full),
    pytest.param("tokens", None, 64, {"dtype": "bfloat16", "head_dim_v": 4}, "bfloat16", WRITES, id="one-block",
                 marks=pytest.mark.full),
]  # fmt: skip


@pytest.mark.parametrize(("shard", "mesh", "interleave", "changes", "queries", "kinds"), CASES)
def test_two_ranks_are_one_store(two, shard, mesh, interleave, changes, queries, kinds):
    two.run(on_ranks.random_operations, shard, mesh, interleave, changes, queries, kinds, 30, 1)


def test_sink_logits_count_once(two):
    two.run(on_ranks.random_operations, "tokens", None, 4, SLIDING, "float32", WRITES, 20, 6, ["sink_logits"])


@pytest.mark.parametrize("ranks", ["two", "three"])
def test_slopes_count_the_tokens_of_other_ranks(ranks, request):
    assert set(request.getfixturevalue(ranks).run(on_ranks.slopes)) == {28}


@pytest.mark.parametrize(
    ("interleave", "changes", "terms"),
    [
        (4, SLIDING | {"batch_size": 2}, ["alibi_slopes"]),
        (5, {}, ["alibi_slopes", "sink_logits"]),
        (1, {"window": 7}, ["alibi_slopes"]),
    ],
)
@pytest.mark.parametrize("ranks", ["two", "three"])
@pytest.mark.full
def test_slopes_with_other_operations(ranks, request, interleave, changes, terms):
    operations = "tokens", None, interleave, changes, "float32", WRITES, 20, 7, terms
    request.getfixturevalue(ranks).run(on_ranks.random_operations, *operations)


@pytest.mark.parametrize("ranks", ["two", "three"])
@pytest.mark.full
def test_tiles_of_kvarn_sharded_by_heads(ranks, request):
    assert {*request.getfixturevalue(ranks).run(on_ranks.tiles_by_heads)} == {128}


@pytest.mark.parametrize("ranks", [pytest.param("two", marks=pytest.mark.full), "three"])
def test_the_mass_is_of_the_tokens_of_all_ranks(ranks, request):
    for found in request.getfixturevalue(ranks).run(on_ranks.masses):
        assert found == (11, 24)


@pytest.mark.parametrize("mesh", [(1, 3), (3, 1)], ids=str)
def test_three_ranks_are_one_store(three, mesh):
    """A mesh of two dimensions, of which one cuts."""
    three.run(on_ranks.random_operations, ("heads", "tokens"), mesh, 4, SLIDING, "float32", WRITES, 20, 2)


@pytest.mark.long
def test_a_mesh_cuts_both():
    processes = Processes(4)
    operations = on_ranks.random_operations
    processes.run(operations, ("heads", "tokens"), (2, 2), 4, SLIDING, "float32", OPERATIONS, 60, 3)
    processes.run(operations, ("tokens", "heads"), (2, 2), 3, SLIDING, "float32", OPERATIONS, 60, 5)
    processes.end()


@pytest.mark.long
def test_two_thousand_operations(three):
    changes = SLIDING | {"batch_size": 2}
    three.run(on_ranks.random_operations, "tokens", None, 4, changes, "float32", OPERATIONS, 2000, 4)


def test_positions_in_arrays(two):
    assert "is not a multiple of 2 ranks x interleave=2" in two.run(on_ranks.at_positions)[0]


def test_what_is_refused(two):
    first, second = two.run(on_ranks.refusals)
    wanted = [
        "ShapeError: ShardedKVCacheStore: num_kv_heads=5 cannot be divided evenly among 2 ranks. Use a number of ranks "
        "that divides them, or shard by tokens.",
        "OptionError: ShardedKVCacheStore: shard='rows' is unknown. Use 'heads' or 'tokens'; for a two-dimensional "
        "mesh, a pair of both in the order of its dimensions.",
        "OptionError: ShardedKVCacheStore: shard=('heads', 'tokens') is for 2 dimensions, but the group has "
        "1. Name what each dimension shards.",
    ]
    assert first[:3] == second[:3] == wanted
    assert "KV heads 3..5 of 6. k, v and q must have the heads of this rank." in second[4]
    kinds = ["Position", *["Shape"] * 3, "Capacity", "Shape", "NotShared", "Option", "Shape", *["Option"] * 3, "Shape"]
    kinds.append("Option")
    for message, kind in zip(first[3:17], kinds, strict=True):
        assert message.startswith(f"{kind}Error: "), message
    assert first[17:] == second[17:] == [0, False, True, False]


def test_a_group_that_is_gone(three):
    for found in three.run(on_ranks.gone):
        assert len(found) == 2
        assert all(message.startswith("GroupError: ShardedKVCacheStore") for message in found), found


def test_ranks_that_disagree_and_one_that_dies():
    processes = Processes(2, seconds=20, debug=True)
    found = processes.run(on_ranks.disagree)
    assert found[0] == found[1]
    assert found[0][1] == 0
    assert "the ranks disagree: rank 0: ShardedKVCacheStore.append 0 f32[2,6,8] on cpu" in found[0][0]
    assert "rank 1: ShardedKVCacheStore.append 0 f32[3,6,8] on cpu" in found[0][0]

    survivor, dead = processes.try_run(on_ranks.die)
    assert dead == (False, "the process has ended")
    assert survivor[0], survivor
    assert survivor[1].startswith("GroupError: ShardedKVCacheStore.attend: rank 0 of 2 lost the other processes ("), (
        survivor
    )
    processes.end()


@pytest.mark.full
def test_calls_inside_of_what_torch_compiles(two):
    for held, why in two.run(on_ranks.compiled_calls):
        assert held == 7
        assert "extend" in why
