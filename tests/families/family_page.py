"""The page of the manual that says how each family does."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, NamedTuple

import torch
import transformers
from family_settings import CHUNKS, CODES_TOLERANCE, LENGTHS, PROMPT, STEPS, TOLERANCE
from family_verdicts import outcome

WORDS = ("yes", "refused", "differs", "no cache", "not run", "not built")
HEAD = """# Families of transformers

What `TikvCache` does in each model of transformers {transformers} that generates, with torch {torch}, as this command
found it on a CPU:

```sh
python tests/families/survey.py --write docs/families.md
```

It makes a tiny random model of every class with `generate` (few layers of each kind, narrow, with weights so large
that attention counts) and compares the logits of each step with those of the same model without any cache, which is
given the whole text each time. Seven settings: a prompt of {prompt} tokens and {steps} single ones; a batch of
{lengths} tokens padded on the left; the prompt in pieces of {chunks}; three tokens that are taken back by `crop`;
beams that are reordered; `generate`; and, of an encoder-decoder, a cache for each of the two. Each with attention
"eager", "sdpa" and "tikv", where the model has them; and with a cache of int8 under "tikv", whose logits are compared
with those of the same cache under the model's own attention. Right is what is within {tolerance} of the logits'
standard deviation, for int8 {codes}. Transformers' own cache is run beside it: where that is itself not as no cache,
the table says so. Where layers choose keys by an indexer, the notes say how attention "tikv" is told of the choice, and
that it read the rows of those keys alone.

`TikvCache` is in the table:

- **yes**: all settings are right, or as transformers' own cache, which the notes say;
- **refused**: `TikvCache(model.config)` raises, and says which layer and why;
- **differs**: something is not right, and what;
- **no cache**: the model takes none of transformers' caches;
- **not run**, **not built**: no tiny model says anything of it, and why.

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
    return page_of(found, transformers.__version__, torch.__version__)


def page_of(table: list[Row], transformers_version: str, torch_version: str) -> str:
    """The page that has these rows, found with these versions."""
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
    return head + "".join(f"| {' | '.join(row)} |\n" for row in table)


def rows(text: str) -> list[Row]:
    """Those of a page's table."""
    found = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in text.splitlines() if line[:2] == "| "]
    return [Row(*cells) for cells in found[2:]]  # behind the table's own head


def versions(text: str) -> tuple[str, str]:
    """Those of transformers and torch that a page is of."""
    found = re.search(r"of transformers (\S+) that generates, with torch (\S+),", text)
    assert found is not None, "the page does not say of which versions it is"
    return found[1], found[2]


def _cell(text: str) -> str:
    """Text as a cell of a table."""
    text = text.replace("|", "\\|").replace("<", "&lt;").replace("`", "")
    return text if len(text) <= 300 else text[:297] + "..."
