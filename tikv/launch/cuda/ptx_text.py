"""Read PTX text: the form of a register, and the instructions of an entry."""

from __future__ import annotations

REGISTER = r"%[a-z]+\d+"
ARGUMENTS = "arguments"  # the parameter that the rewritten entry takes


def statements(body: str) -> list[str]:
    """The instructions of an entry, without comments, declarations and labels, with one space between words."""
    lines = (" ".join(line.partition("//")[0].split()) for line in body.splitlines())
    return [line for line in lines if line.endswith(";") and not line.startswith(".")]
