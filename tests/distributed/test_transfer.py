"""Sequences of a paged store sent from one process to another."""

import pytest

pytest.importorskip("torch.distributed")

import on_ranks

CASES = [
    pytest.param({"page_summaries": 2}, id="NHD"),
    pytest.param({"layout": "HND", "dtype": "int8", "scale_dtype": "float32"}, id="int8"),
    pytest.param({"layout": "VLLM", "dtype": "bfloat16"}, id="VLLM", marks=pytest.mark.full),
]


@pytest.mark.parametrize("changes", CASES)
def test_what_is_received_is_what_was_sent(two, changes):
    two.run(on_ranks.send_and_receive, changes)


def test_groups_along_tokens_go_with_their_newest_tokens(two):
    two.run(on_ranks.send_groups)


def test_what_a_receiver_refuses(two):
    sender, receiver = two.run(on_ranks.refuse_to_receive)
    assert receiver[0] == (
        "ShapeError: recv_sequence: the pool of rank 0 has head_dim=8 there and 16 here, head_dim_v=8 there and 16 "
        "here. Create both with the same head_dim, head_dim_v."
    )
    assert sender[0] == f"GroupError: send_sequence: rank 1 refused: {receiver[0].partition(': ')[2]}"
    assert receiver[1].startswith("CapacityError: recv_sequence: ")
    assert sender[1] == f"GroupError: send_sequence: rank 1 refused: {receiver[1].partition(': ')[2]}"
    assert sender[2] == "PositionError: send_sequence: dst=2 is outside 0..1."
    assert receiver[2] == "PositionError: recv_sequence: src=-1 is outside 0..1."
