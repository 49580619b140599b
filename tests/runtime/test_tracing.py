"""How the source of kernels is read: the same lines as `inspect` gives, without its searches."""

import ast
import gc
import importlib
import inspect
import linecache
import pathlib
import pkgutil
import textwrap
import types

import numpy as np
import pytest

import tikv
import tikv.kernels
from tikv import runtime
from tikv.runtime import tracing

MODULES = sorted(module.name for module in pkgutil.walk_packages(tikv.kernels.__path__, "tikv.kernels."))


def codes_in(code):
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from codes_in(constant)


def functions_of(module):
    """Every function in a module's source, those within others too, as a function object that cannot be called."""
    path = pathlib.Path(module.__file__)
    classes = {name for name, value in vars(module).items() if isinstance(value, type)}
    for code in codes_in(compile(path.read_text(encoding="utf-8"), str(path), "exec")):
        if not code.co_name.startswith("<") and code.co_name not in classes:
            cells = tuple(types.CellType() for _ in code.co_freevars)
            yield types.FunctionType(code, vars(module), closure=cells)


@pytest.mark.parametrize("name", MODULES)
def test_the_lines_of_each_function_are_those_that_inspect_gives(name):
    runtime.ti  # noqa: B018  the engine, which the modules of kernels need
    for function in functions_of(importlib.import_module(name)):
        lines, first = tracing._lines_of(inspect.getsourcelines, function)
        expected, number = inspect.getsourcelines(function)
        assert first == number
        assert "".join(lines).rstrip() == "".join(expected).rstrip()
        for line in lines:
            assert tracing._filled(line) == textwrap.fill(line, tabsize=4, width=9999)


@pytest.mark.parametrize("line", ["", " \t \n", "\tx\t= 1  \n", "    a\x0b b\x0c\r\n", "x" * 9999, "a b " * 4000])
def test_a_line_is_filled_as_by_textwrap(line):
    assert tracing._filled(line) == textwrap.fill(line, tabsize=4, width=9999)


def test_a_function_without_lines_is_read_by_the_engine():
    function = eval("lambda: 1")
    assert tracing._lines_of(lambda function: (["read"], 1), function) == (["read"], 1)
    assert tracing._file_of(lambda function: "its file", function) == "its file"


def test_decorators_in_this_library_read_no_source():
    scope = {"__name__": "tikv.kernels.example", "ti": runtime.ti}
    linecache.clearcache()
    exec("@ti.func\ndef f(x):\n    return x\n", scope)
    assert not linecache.cache
    assert not scope["f"].func.classfunc


def test_decorators_elsewhere_still_see_a_class():
    ti = runtime.ti

    @ti.data_oriented
    class Example:
        @ti.kernel
        def method(self):
            pass

    assert Example.__dict__["method"]._is_classkernel


@pytest.mark.archs("cpu")
def test_a_compiled_kernel_keeps_no_syntax_trees(arch, rng):
    """Of attention's real functions an engine would keep them all, which is most of what a kernel takes in Python."""

    def trees():
        gc.collect()
        return sum(issubclass(type(each), ast.AST) for each in gc.get_objects())

    def attend(width):
        q, k = rng.standard_normal((1, 4, width), np.float32), rng.standard_normal((1, 2, 8, width), np.float32)
        tikv.decode_attention(q, k, k, 8)

    attend(40)
    live, before = runtime.current(), trees()
    kernels = len(live.kernels)
    attend(44)
    assert len(live.kernels) > kernels
    assert trees() <= before
