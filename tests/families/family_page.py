"""The page of the manual that says how each family does."""

from __future__ import annotations

from collections import Counter
from typing import Any

import transformers
from family_settings import CHUNKS, CODES_TOLERANCE, LENGTHS, PROMPT, STEPS, TOLERANCE
from family_verdicts import outcome

HEAD = """# Families of transformers

What `TikvCache` does in each model of transformers {version} that generates, as this command found it:

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
the table says so.

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


def page(results: dict[str, Any]) -> str:
    """The whole page, from what `survey` found."""
    counts: Counter[str] = Counter()
    lines = []
    for family, classes in sorted(results.items()):
        for found in classes:
            word, notes = outcome(found)
            counts[word] += 1
            lines.append(f"| {family} | {found['class']} | {word} | {_cell('; '.join(notes))} |\n")
    words = ("yes", "refused", "differs", "no cache", "not run", "not built")
    told = ", ".join(f"{counts[word]} {word}" for word in words if counts[word])
    head = HEAD.format(
        version=transformers.__version__,
        prompt=PROMPT,
        steps=STEPS,
        lengths=", ".join(map(str, LENGTHS[:-1])) + f" and {LENGTHS[-1]}",
        chunks=", ".join(map(str, CHUNKS[:-1])) + f" and {CHUNKS[-1]}",
        tolerance=TOLERANCE,
        codes=CODES_TOLERANCE,
        counts=f"{sum(counts.values())} classes of {len(results)} families: {told}",
    )
    return head + "".join(lines)


def rows(text: str) -> dict[tuple[str, str], str]:
    """Of each family and class the word that a page has."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[0].lstrip("| ") not in ("family", "---"):
            found[cells[0].lstrip("| "), cells[1]] = cells[2]
    return found


def _cell(text: str) -> str:
    """Text as a cell of a table."""
    text = text.replace("|", "\\\\|").replace("<", "&lt;").replace("`", "")
    return text if len(text) <= 300 else text[:297] + "..."
