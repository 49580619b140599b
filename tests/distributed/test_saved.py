"""A shared cache saved by some ranks and loaded by others."""

import pytest

pytest.importorskip("torch.distributed")

import on_ranks


def test_any_ranks_load_what_others_saved(three, tmp_path):
    for counts, messages in three.run(on_ranks.save_and_load, str(tmp_path)):
        assert counts == [4, 4], "an index and three files; those of the save before are gone"
        assert len(messages) == 4
        assert "ShardedKVCacheStore.load: there is no file" in messages[0]
        assert "is not an index of a shared cache" in messages[1]
        assert "does not end in .json" in messages[2]
        assert "there is no folder" in messages[3]
