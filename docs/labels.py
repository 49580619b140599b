"""An extension of griffe, which reads docstrings for mkdocstrings: labelled lines become paragraphs of their own.

In the sources "Exactness: ..." and "Cost: ..." stand on lines that follow each other, which Markdown would join. A
section "Raises" of prose, such as "As `append`.", names no error, and griffe would leave it out. It also leaves out
any other entry without a name and a colon on its first line, so the build refuses one.
"""

import re
from typing import Any

import griffe

RAISES = re.compile(r"^Raises:\n    (As .*(?:\n    .*)*)", re.MULTILINE)
SECTION = re.compile(r"^(Args|Attributes|Raises):\n((?:    .*\n?|\n)+)", re.MULTILINE)
NAMELESS = re.compile(r"^ {4}[^ :][^:\n]*$", re.MULTILINE)
LABEL = re.compile(r"\n[ \t]*(Exactness|Cost|Source|Threads|Processes|GPUs|Copies): ")


class Labels(griffe.Extension):
    """Puts a blank line before each label, makes the label bold, and keeps errors that are told in prose."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called for each object that was read.

        Raises:
            ValueError: the page would lack an entry of its docstring.
        """
        if obj.docstring is not None:
            text = RAISES.sub(lambda found: "**Raises:** " + found[1].replace("\n    ", "\n"), obj.docstring.value)
            for section, entries in SECTION.findall(text):
                if lost := NAMELESS.search(entries):
                    raise ValueError(f"{obj.path}: {section} has the entry {lost[0].strip()!r}, which has no name: ...")
            obj.docstring.value = LABEL.sub(r"\n\n**\1:** ", text)
