"""Speeds up how an engine reads the Python source of a kernel, by removing repeated work.

An engine walks through the source of a function once for every call of it in a kernel. If the machine code is found on
disk, this takes most of the time. While this library's kernels are compiled, this module replaces parts of the engine:
the result is the same program, sooner.
"""

from __future__ import annotations

import ast
import functools
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

from tikv.engines import Engine
from tikv.runtime.cache import BoundedCache

_sources: BoundedCache[tuple[Callable[[Any], Any], str, int, str], Any] = BoundedCache()
_lines = functools.lru_cache(1 << 15)(textwrap.fill)  # engines call it for each line of a function
_texts = types.SimpleNamespace(fill=_lines, dedent=functools.lru_cache(1 << 12)(textwrap.dedent))


def changes(engine: Engine) -> Iterator[tuple[Any, str, Any]]:
    """(where, name, value) of each part of the engine that is replaced while a kernel is compiled."""
    walker = engine.part("lang.ast.ast_transformer_utils")
    yield getattr(walker, engine.context_class), engine.position_method, _line_of
    reader, parser = engine.part(engine.source_reader), engine.part(engine.source_parser)
    for name in ("getsourcelines", "getsourcefile"):
        yield reader, name, _once(getattr(reader, name))
    yield parser, "textwrap", _texts
    if engine.writes_trees_anew:
        trees = _Trees(parser.transform_tree)
        yield parser, "ast", types.SimpleNamespace(parse=trees.parse)
        yield parser, "transform_tree", trees.transform
        yield walker.Builder, "__call__", _visit
        yield engine.settings, "src_info_stack", [""]  # the current line of expressions, which no message shows


def _once(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`read(function)` of the source, once for all functions that were made from the same lines."""

    def read_once(function: Any) -> Any:
        code = function.__code__
        key = read, code.co_filename, code.co_firstlineno, code.co_name
        source = _sources.get(key)
        return _sources.keep(key, read(function)) if source is None else source

    return read_once


def _line_of(context: Any, node: Any) -> str:
    """The position of an expression; the engine would also format its source line."""
    return f'File "{context.file}", line {node.lineno + context.lineno_offset}, in {context.func.func.__name__}:\n'


class _Trees:
    """Syntax trees of sources. The engine writes results into a tree, so a tree serves one call at a time.

    A function's tree serves later calls in a kernel too; a kernel's own does not, as the engine removes its arguments.
    """

    def __init__(self, transform: Callable[[Any, Any], Any]) -> None:
        self.plain_transform = transform
        self.free: dict[str, list[ast.Module]] = {}
        self.source_of: dict[int, str] = {}

    def parse(self, source: str) -> ast.Module:
        """A tree of a source that no call is using."""
        free = self.free.get(source)
        tree = free.pop() if free else ast.parse(source)
        self.source_of[id(tree)] = source
        return tree

    def transform(self, tree: ast.Module, context: Any) -> Any:
        """The engine's transform of a tree, which is then free for other calls."""
        transformed = self.plain_transform(tree, context)
        if not (context.is_kernel or context.is_real_function):
            self.free.setdefault(self.source_of[id(tree)], []).append(tree)
        return transformed


def _visit(builder: Any, context: Any, node: Any) -> Any:
    """Turn a part of a tree into a part of a program; the engine would also record the line of each part."""
    try:
        return getattr(builder, "build_" + node.__class__.__name__)(context, node)
    except Exception as error:
        if context.raised or not isinstance(node, (ast.stmt, ast.expr)):
            raise
        context.raised = True
        raise RuntimeError(f"{_line_of(context, node)}{error}") from error
