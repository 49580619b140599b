"""Counting the launches of kernels, whatever the launcher; letting them fail, and refusing new plans."""

import contextlib

from tikv import arrays, launch, runtime
from tikv.ops.plan import Plan


def classes_below(kind):
    """A class and all that inherit from it."""
    return [kind, *(found for below in kind.__subclasses__() for found in classes_below(below))]


def count_launches(monkeypatch):
    """A list that grows by the kernel's name with each launch, from now on."""
    counted, inside = [], []

    def counting(original):
        def launch_one(self):
            if not inside:  # a launcher that calls the one it is made of launches once
                counted.append(self.kernel.name)
            inside.append(self)
            try:
                return original(self)
            finally:
                inside.pop()

        return launch_one

    for kind in classes_below(launch.Bound):
        if "launch" in vars(kind):
            monkeypatch.setattr(kind, "launch", counting(kind.launch))
        if "launcher" in vars(kind):  # a shorter way past `launch`
            monkeypatch.setattr(kind, "launcher", lambda self: self.launch)
    if runtime.is_started():
        arrays.runtime_of().plans.clear()  # which hold such ways already
    return counted


@contextlib.contextmanager
def failing_launches(monkeypatch, after, error):
    """A context in which every launch raises this error, but for the first `after`."""
    inside = [True]  # plans that are made here keep what launches them

    def failing(original):
        def launch_or_fail(self):
            if inside and len(counted) >= after:
                raise error
            return original(self)

        return launch_or_fail

    with monkeypatch.context() as patch:
        counted = count_launches(patch)
        for kind in classes_below(launch.Bound):
            if "launch" in vars(kind):
                patch.setattr(kind, "launch", failing(kind.launch))
        try:
            yield
        finally:
            inside.clear()


def refuse_plans(monkeypatch):
    """From now on a call fails that checks the forms of its arrays, which makes a plan, or binds a kernel to them."""

    def refuse(self, *given):
        raise AssertionError(f"a {type(self).__name__} is made or bound again")

    monkeypatch.setattr(launch.Kernel, "bind", refuse)
    monkeypatch.setattr(Plan, "__init__", refuse)
