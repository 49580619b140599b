"""An extension of griffe, which reads docstrings for mkdocstrings: labelled lines become paragraphs of their own.

In the sources "Exactness: ..." and "Cost: ..." stand on lines that follow each other, which Markdown would join.
"""

import re
from typing import Any

import griffe

LABEL = re.compile(r"\n[ \t]*(Exactness|Cost|Source|Threads|GPUs|Copies): ")


class Labels(griffe.Extension):
    """Puts a blank line before each label, and makes the label bold."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that was read."""
        if obj.docstring is not None:
            obj.docstring.value = LABEL.sub(r"\n\n**\1:** ", obj.docstring.value)
