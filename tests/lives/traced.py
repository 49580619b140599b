"""Compiled steps without a compiler: code that asks whether it is being traced is told so, and everything is called.

What torch's compiler traces are calls of operators and views; here the same calls are made at once. Functions that
are marked for the compiler to leave out run untraced, as they do there.
"""

import contextlib
import functools
import sys
from typing import Any

import torch
import torch._dynamo

_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_traced = [False]
_known: set[str] = set()


def _is_traced() -> bool:
    return _traced[0]


def _outside(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        before, _traced[0] = _traced[0], False
        try:
            return function(*args, **kwargs)
        finally:
            _traced[0] = before

    call.lives_outside = True  # type: ignore[attr-defined]
    return call


def install() -> None:
    """Have the library's modules ask here; to be called again when more of them are imported."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("tikv.integrations") or name in _known:
            continue
        _known.add(name)
        for attribute, value in list(vars(module).items()):
            if value is _is_dynamo_compiling:
                setattr(module, attribute, _is_traced)
            elif callable(value) and getattr(value, "_torchdynamo_disable", False):
                setattr(module, attribute, _outside(value))
    torch.compiler.is_dynamo_compiling = _is_traced


def uninstall() -> None:
    """Undo `install`."""
    for name in _known:
        for attribute, value in list(vars(sys.modules[name]).items()):
            if value is _is_traced:
                setattr(sys.modules[name], attribute, _is_dynamo_compiling)
            elif getattr(value, "lives_outside", False):
                setattr(sys.modules[name], attribute, value.__wrapped__)
    _known.clear()
    torch.compiler.is_dynamo_compiling = _is_dynamo_compiling


@contextlib.contextmanager
def traced() -> Any:
    """What runs within counts as traced."""
    _traced[0] = True
    flag = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        _traced[0], torch.compiler._is_compiling_flag = False, flag
