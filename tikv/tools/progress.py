"""The progress of a command, shown on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


def is_shown() -> bool:
    """Whether stderr is a terminal."""
    return sys.stderr is not None and sys.stderr.isatty()


@contextlib.contextmanager
def progress(title: str, total: int, in_lines: bool = False) -> Iterator[Callable[[str, int], None]]:
    """A bar on a terminal's stderr, or a line if rich is missing; call it with the text and how much is done.

    If stderr is a pipe or a file, nothing is shown; with `in_lines`, one line for each call, at once.
    """
    if not is_shown():

        def tell(now: str, done: int) -> None:
            if in_lines and sys.stderr is not None:
                print(f"{title}: {now} ({done} of {total})", file=sys.stderr, flush=True)

        yield tell
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:

        def line(now: str, done: int) -> None:
            print(f"\r\x1b[K{title}: {now} ({done} of {total})", end="", file=sys.stderr, flush=True)

        try:
            yield line
        finally:
            print(end="\r\x1b[K", file=sys.stderr, flush=True)
        return
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda now, done: bar.update(task, completed=done, description=f"{title}: {now}")
