"""Speeds up how an engine reads the Python source of a kernel, by removing repeated work, and what it then keeps.

An engine walks through the source of a function once for every call of it in a kernel. If the machine code is found on
disk, this takes most of the time. While this library's kernels are compiled, this module replaces parts of the engine:
the result is the same program, sooner. Sources are read here too: `inspect` searches all modules for each function, and
divides its lines into tokens to see where it ends.
"""

from __future__ import annotations

import ast
import functools
import linecache
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any

from tikv.engines import Engine

_FEW = 9999  # characters of a line: the width that engines pass


def _filled(line: str, tabsize: int = 4, width: int = _FEW) -> str:
    """What `textwrap.fill` makes of a line that is not wrapped; engines call it for each line of a function."""
    if len(line) * tabsize >= width:
        return textwrap.fill(line, tabsize=tabsize, width=width)
    return line.expandtabs(tabsize).translate(_BLANKS).rstrip(" ")


_BLANKS = dict.fromkeys(map(ord, "\t\n\x0b\x0c\r"), " ")
_texts = types.SimpleNamespace(fill=_filled, dedent=functools.lru_cache(1 << 12)(textwrap.dedent))


def changes(engine: Engine) -> Iterator[tuple[Any, str, Any]]:
    """(where, name, value) of each part of the engine that is replaced while a kernel is compiled."""
    walker = engine.part("lang.ast.ast_transformer_utils")
    yield getattr(walker, engine.context_class), engine.position_method, _line_of
    reader, parser = engine.part(engine.source_reader), engine.part(engine.source_parser)
    yield reader, "getsourcelines", functools.partial(_lines_of, reader.getsourcelines)
    yield reader, "getsourcefile", functools.partial(_file_of, reader.getsourcefile)
    yield parser, "textwrap", _texts
    if engine.writes_trees_anew:
        trees = _Trees(parser.transform_tree)
        yield parser, "ast", types.SimpleNamespace(parse=trees.parse)
        yield parser, "transform_tree", trees.transform
        yield walker.Builder, "__call__", _visit
        functions = engine.part(engine.decorators).Func
        yield functions, "do_compile", _forgetting(functions.do_compile)
        yield engine.settings, "src_info_stack", [""]  # the current line of expressions, which no message shows


def watch_decorators(engine: Engine) -> None:
    """Spare the engine's decorators their search for a class around a function, wherever this library has one.

    They read the source of the code that runs the decorator, for each function; no kernel here is a method.
    """
    decorators = engine.part(engine.decorators)
    search = getattr(decorators, "_inside_class", None)
    if search is None:
        return

    def is_inside_class(level_of_class_stackframe: int) -> bool:
        # The frame below the one that the engine looks at: the body of the class or module, or a function in it.
        if sys._getframe(level_of_class_stackframe - 1).f_globals.get("__name__", "").startswith("tikv."):
            return False
        return bool(search(level_of_class_stackframe + 1))

    decorators._inside_class = is_inside_class


def _lines_of(read: Callable[[Any], tuple[list[str], int]], function: Any) -> tuple[list[str], int]:
    """(lines, the number of the first) of a function, as `inspect.getsourcelines` says; `read` is the engine's own."""
    code = function.__code__
    lines, first = linecache.getlines(code.co_filename, function.__globals__), code.co_firstlineno
    last = max(line for _, _, line in code.co_lines() if line is not None)
    if not first < last <= len(lines):
        return read(function)
    # Behind its last instruction, a function goes on as long as lines are indented: with a bracket, or a comment.
    indent = _indent_of(lines[first - 1])
    end = last
    for number in range(last, len(lines)):
        if lines[number].strip():
            if _indent_of(lines[number]) <= indent:
                break
            end = number + 1
    return lines[first - 1 : end], first


def _indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def _file_of(read: Callable[[Any], Any], function: Any) -> str:
    """The file of a function, for messages; `read` is the engine's own."""
    file: str = function.__code__.co_filename
    return file if linecache.getlines(file, function.__globals__) else read(function)


def _line_of(context: Any, node: Any) -> str:
    """The position of an expression; the engine would also format its source line."""
    return f'File "{context.file}", line {node.lineno + context.lineno_offset}, in {context.func.func.__name__}:\n'


def _forgetting(compiles: Callable[..., None]) -> Callable[..., None]:
    """The engine's compilation of a real function; the engine would keep its syntax tree and arguments for good."""

    def do_compile(function: Any, key: Any, *args: Any, **kwargs: Any) -> None:
        compiles(function, key, *args, **kwargs)
        function.compiled[key.instance_id] = None  # that there is an entry says that it is compiled

    return do_compile


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
