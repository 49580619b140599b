"""What goes wrong in first minutes: each mistake raises one error of this library, which says what to do.

One error: no other one is in its traceback, "during the handling of which" or as "the direct cause" of which it came.
"""

import copy
import pickle
import traceback

import numpy as np
import pytest

import tikv

HEADS, WIDTH = 2, 16
FORM = {"num_layers": 2, "num_kv_heads": HEADS, "head_dim": WIDTH, "capacity": 8, "dtype": "float32"}
POOL = {"num_layers": 1, "num_kv_heads": HEADS, "head_dim": WIDTH, "num_blocks": 4, "block_size": 4, "dtype": "float32"}


def store(tokens=0, **options):
    made = tikv.KVCacheStore(**{**FORM, **options})
    if tokens:
        made.append(0, rows(tokens), rows(tokens))
    return made


def pool():
    made = tikv.PagedKVCacheStore(**POOL)
    return made, made.add()


def rows(tokens=1, heads=HEADS, width=WIDTH, dtype=np.float32):
    return np.ones((tokens, heads, width), dtype)


def append(*axes, **options):
    """Append the same array as keys and values."""
    return lambda: store(**options).append(0, rows(), rows()) if not axes else store(**options).append(0, *axes)


def of_pool(call):
    return lambda: call(*pool())


def compacted():
    made = store(10, capacity=16)
    made.compact(0, np.array([[0, 8, 9]]))
    return made


def heads_first(tokens, heads):
    return rows(tokens, heads).transpose(1, 0, 2)


# What was done, and two words of what the error says: what is wrong, and the way out.
MISTAKES = {
    "rows of float64": (append(rows(dtype=np.float64), rows(dtype=np.float64)), "float64", "Append float32"),
    "rows of integers": (append(rows(dtype=np.int64), rows(dtype=np.int64)), "int64", "Append float32"),
    "rows as lists": (append(rows().tolist(), rows().tolist()), "list", "Pass a NumPy array"),
    "None for an array": (lambda: store(1).attend(0, None), "q is ", "Pass a NumPy array"),
    "a dtype that does not exist": (lambda: store(dtype="float15"), "unknown dtype 'float15'", "Use one of float32"),
    "a full store": (append(rows(9), rows(9)), "full", "Use capacity >= 9"),
    "one token too many": (lambda: store(8).append(0, rows(), rows()), "full", "Use capacity >= 9"),
    "another text without reset": (
        lambda: store(6).extend(0, rows(6, 4), rows(6), rows(6)),
        "position=6",
        "reset() forgets an earlier text",
    ),
    "a layer to which nothing was appended": (
        lambda: store(3).attend(1, rows(1, 4)),
        "layer 1 holds no tokens, and layer 0 holds 3",
        "Append to layer 1 first",
    ),
    "no capacity": (lambda: store(capacity=0), "capacity=0 is outside the range", "Use 1 or more"),
    "heads before tokens": (append(heads_first(5, 2), heads_first(5, 2)), "heads of k is 5", "layout='head_major'"),
    "queries with heads before tokens": (
        lambda: store(3).attend(0, heads_first(2, 4)),
        "4 queries",
        "layout='head_major'",
    ),
    "torch's four axes": (
        lambda: store().extend(0, rows(3, 4)[None].swapaxes(1, 2), *[rows(3)[None].swapaxes(1, 2)] * 2),
        "heads of k is 3",
        "layout='head_major'",
    ),
    "another layout's name": (lambda: store().append(0, rows(), rows(), layout="NHD"), "'NHD'", "token_major"),
    "a layer too many": (lambda: store().append(2, rows(), rows()), "layer=2", "0..1"),
    "a layer by name": (lambda: store().append("0", rows(), rows()), "layer is '0'", "Pass an int"),
    "a width that is a float": (lambda: store(head_dim=16.0), "head_dim is 16.0", "Pass an int"),
    "heads that were repeated": (append(rows(3, 4), rows(3, 4)), "heads of k is 4", "without the repetition"),
    "another batch": (
        append(rows()[None].repeat(3, 0), rows()[None].repeat(3, 0), batch_size=2),
        "batch of k is 3",
        "batch_size=3",
    ),
    "a batch in a store of one sequence": (
        append(rows()[None].repeat(3, 0), rows()[None].repeat(3, 0)),
        "is 3",
        "batch_size=3",
    ),
    "another width": (append(rows(width=8), rows(width=8)), "width of k is 8", "16 is needed"),
    "fewer values than keys": (append(rows(3), rows(2)), "tokens of v is 2", "3 is needed"),
    "no axis for the batch": (append(rows(), rows(), batch_size=2), "3 axes", "(batch, T, H, D)"),
    "query heads that do not divide": (lambda: store(1).attend(0, rows(1, 3)), "3 query heads", "a multiple of 2"),
    "a scale that is not a number": (lambda: store(1).attend(0, rows(1, 4), scale="1"), "scale='1'", "Use a float"),
    "a window wider than the store": (lambda: store(window=9), "window=9", "at most 8"),
    "windows for some layers": (lambda: store(window=[4]), "1 entries", "num_layers=2"),
    "more taken back than there is": (lambda: store(1).trim(5), "5 tokens", "Drop at most 1"),
    "indices that are not sorted": (
        lambda: store(5).compact(0, np.array([[[2, 1], [0, 1]]])),
        "1 after 2",
        "sort them",
    ),
    "positions for indices": (
        lambda: compacted().compact(0, np.array([[0, 9]])),
        "has 9, and 3 rows are held",
        "not positions in the text",
    ),
    "more taken back than was kept": (
        lambda: compacted().trim(3),
        "cannot go back beyond token 7, which compact() dropped",
        "Drop at most 2",
    ),
    "a step's queries before its keys": (
        lambda: tikv.compile_step(store(), layers=0).run(rows(1, 4), rows(), rows()),
        "heads of k is 4",
        "If these are queries, mind the order",
    ),
    "queries with tokens before heads, for scores of pages": (
        lambda: tikv.page_scores(rows(1, 4)[None], *np.ones((2, 1, HEADS, 1, WIDTH), np.float32), 5),
        "1 query heads",
        "pass q.swapaxes(1, 2)",
    ),
    "a cache to copy to, with tokens before heads": (
        lambda: tikv.copy(rows(3), rows(8), position=0),
        "heads of cache is 8",
        "In the other order of its axes, cache fits",
    ),
    "a cache with tokens before heads": (
        lambda: tikv.decode_attention(rows(1, 4), *[rows(8)[None]] * 2, 8),
        "8 KV heads",
        "Heads come before tokens",
    ),
    "scores of pages for those of tokens": (
        lambda: tikv.select(np.ones((1, 1, 8), np.float32), 4, valid=100),
        "valid is 100, but there are scores for 8 tokens",
        "or page= if these are scores of pages",
    ),
    "columns apart": (append(rows(width=32)[..., ::2], rows(width=32)[..., ::2]), "not contiguous", "Pass a copy"),
    "a group wider than a head": (lambda: store(dtype=tikv.Quant(bits=4)), "16 wide", "a multiple of 64"),
    "bits that are not supported": (lambda: tikv.Quant(bits=5), "bits=5", "(2, 3, 4, 8)"),
    "a sequence that was not added": (
        of_pool(lambda made, seq: made.append(0, rows(), rows(), [7])),
        "sequence 7",
        "add()",
    ),
    "a sequence instead of a list": (
        of_pool(lambda made, seq: made.append(0, rows(), rows(), seq)),
        "seqs is 0",
        "[0]",
    ),
    "rows of two prompts without their lengths": (
        of_pool(lambda made, seq: made.append(0, rows(5), rows(5), [seq, made.add()])),
        "number of rows is 5",
        "cu_seqlens=[0, ..., 5]",
    ),
    "an axis of sequences in a pool": (
        of_pool(lambda made, seq: made.append(0, rows()[None], rows()[None], [seq])),
        "4 axes",
        "all sequences one after the other",
    ),
    "numbers of tokens for cu_seqlens": (
        of_pool(lambda made, seq: made.append(0, rows(3), rows(3), [seq], [3])),
        "length of cu_seqlens is 1",
        "0, then where the rows of each",
    ),
    "text for token ids": (lambda: pool()[0].add("hello"), "is text, 'hello'", "Pass a list of integers"),
    "a full pool": (
        of_pool(lambda made, seq: made.append(0, rows(17), rows(17), [seq], cu_seqlens=[0, 17])),
        "5 blocks are needed",
        "swap out a sequence",
    ),
    "pickle": (lambda: pickle.dumps(store()), "pickle", "save() and load()"),
    "a step that is copied": (
        lambda: copy.copy(tikv.compile_step(store())),
        "cannot be copied",
        "Call compile_step for each store",
    ),
    "groups of tokens without newest ones": (
        lambda: tikv.Quant(bits=4, axis="tokens"),
        "residual=0",
        "Use residual=64, the group, or more",
    ),
    "a shallow copy": (lambda: copy.copy(store()), "copy", "copy.deepcopy()"),
    "a file that is not there": (lambda: tikv.KVCacheStore.load("nowhere.safetensors"), "no file", "Give the path"),
    "a file of something else": (lambda: tikv.KVCacheStore.load(__file__), "cannot read", "Save the cache again"),
    "a picture in another format": (lambda: store().draw("picture.gif"), "'picture.gif'", ".svg"),
    "a back end that does not exist": (lambda: tikv.init("gpu"), "unknown arch 'gpu'", "cuda"),
}


@pytest.mark.archs("cpu")
def test_a_first_mistake_raises_one_error_that_says_what_to_do(arch):
    wrong = []
    for what, (call, fault, remedy) in MISTAKES.items():
        try:
            call()
        except tikv.TikvError as error:
            printed = "".join(traceback.format_exception(error))
            if fault not in str(error) or remedy not in str(error):
                wrong.append(f"{what}: {error}")
            if printed.count("Traceback (most recent call last)") != 1:
                wrong.append(f"{what}: more than one error is printed")
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{what}: was taken")
    assert wrong == []


@pytest.mark.archs("cpu")
def test_a_first_mistake_with_transformers_raises_one_error(arch):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from tikv.integrations.transformers import TikvCache

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    for call, fault, remedy in (
        (
            lambda: TikvCache(transformers.LlamaForCausalLM(config)),
            "LlamaForCausalLM is not a conf",
            "Use model.config",
        ),
        (lambda: TikvCache("a/model"), "str is not a configuration", "Use model.config"),
        (lambda: TikvCache(config, dtype="int5"), "unknown dtype 'int5'", "Use one of float32"),
    ):
        with pytest.raises(tikv.TikvError, match=fault) as caught:
            call()
        assert remedy in str(caught.value)
        assert "".join(traceback.format_exception(caught.value)).count("Traceback (most") == 1
