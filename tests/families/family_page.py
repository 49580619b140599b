"""The page of the manual that says how each family does."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

import hybrids
import torch
import transformers
from family_settings import CHUNKS, CODES_TOLERANCE, LENGTHS, PROMPT, STEPS, TOLERANCE
from family_verdicts import outcome
from tiny_models import folders

WORDS = ("yes", "refused", "differs", "no cache", "not run", "not built")
HEAD = """# Families of transformers

This page says what `TikvCache` does in each model of transformers {transformers} that generates text, with
torch {torch} on a CPU. This command tried the models and wrote the page:

```sh
python tests/families/survey.py --write docs/families.md
```

For every class with `generate`, the command makes a tiny model with random weights. The model has few layers of each
kind, all of them narrow, and its weights are so large that attention matters. The command compares the logits of each
step with those that the same model computes from the whole text, without a cache. There are seven settings:

- a prompt of {prompt} tokens and then {steps} single ones ("steps" in the table);
- a batch of {lengths} tokens, padded on the left ("left-padded");
- the prompt in pieces of {chunks} ("chunks");
- three tokens that `crop` takes back ("crop");
- beams that change their order ("reorder");
- `generate`;
- for an encoder-decoder, one cache for the decoder's tokens and another one for the encoder's.

Each setting runs with attention "eager", "sdpa" and "tikv", if the model supports them. The first three settings also
run with an int8 cache under "tikv", which is compared with an int8 cache under the model's own attention.
Logits count as right if they differ by at most {tolerance} of their standard deviation, or {codes} with int8.

Transformers' own cache runs in the same settings. If both caches give the same wrong logits, the notes say by how many
standard deviations these differ from the logits without a cache: "the same as transformers' own cache, which differs by
0.5". If a model has layers in which an indexer chooses keys, the notes say in which form the model passes the choice to
attention "tikv", which then reads only those keys. If the result in a setting depends on the attention, the setting has
several notes. Notes longer than 300 characters are cut.

The column `TikvCache` has one of these words:

- **yes**: each setting is right, or `TikvCache` does there what transformers' own cache does: it gives the same logits,
  or both fail; or `TikvCache` refuses what transformers' own cache gets wrong. The notes name these settings, except
  `generate` if both fail there;
- **refused**: `TikvCache(model.config)` raises an error, which the notes quote;
- **differs**: something is not right, and the notes say what;
- **no cache**: the model takes none of transformers' caches;
- **not run**, **not built**: no setting fits the model, or a tiny model could not be built; the notes say why.

{counts}.

| family | class | `TikvCache` | notes |
| --- | --- | --- | --- |
"""


class Row(NamedTuple):
    """A class in the table; its fields are cells."""

    family: str
    cls: str
    word: str
    notes: str


def page(results: dict[str, Any]) -> str:
    """The whole page, from what `survey` found."""
    found = []
    for family, classes in sorted(results.items()):
        for one in classes:
            word, notes = outcome(one)
            found.append(Row(family, one["class"], word, _cell("; ".join(notes))))
    with_states = [hybrids.row(family) for family in hybrids.FAMILIES if family in folders()]
    return page_of(found, with_states, transformers.__version__, torch.__version__)


def page_of(table: list[Row], with_states: list[hybrids.Row], transformers_version: str, torch_version: str) -> str:
    """The page that has these rows, and these of families with states, found with these versions."""
    counts = Counter(row.word for row in table)
    families = len({row.family for row in table})
    told = ", ".join(f"{counts[word]} {word}" for word in WORDS if counts[word])
    head = HEAD.format(
        transformers=transformers_version,
        torch=torch_version,
        prompt=PROMPT,
        steps=STEPS,
        lengths=", ".join(map(str, LENGTHS[:-1])) + f" and {LENGTHS[-1]}",
        chunks=", ".join(map(str, CHUNKS[:-1])) + f" and {CHUNKS[-1]}",
        tolerance=TOLERANCE,
        codes=CODES_TOLERANCE,
        counts=f"{len(table)} classes of {families} families: {told}",
    )
    return head + "".join(f"| {' | '.join(row)} |\n" for row in table) + "\n" + hybrids.table(with_states)


def rows(text: str) -> list[Row]:
    """Those of a page's table."""
    lines = text.partition(hybrids.HEADING)[0].splitlines()
    found = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines if line[:2] == "| "]
    return [Row(*cells) for cells in found[2:]]  # behind the table's own head


def versions(text: str) -> tuple[str, str]:
    """Those of transformers and torch that a page is of."""
    found = re.search(r"of transformers (\S+) that generates text, with\ntorch (\S+) ", text)
    assert found is not None, "the page does not say of which versions it is"
    return found[1], found[2]


def _cell(text: str) -> str:
    """Text as a cell of a table."""
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("`", "")
    return text if len(text) <= 300 else text[:297] + "..."
