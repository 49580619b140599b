"""Counting the launches of kernels, whatever the launcher; and refusing new plans."""

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


def refuse_plans(monkeypatch):
    """From now on a call fails that checks the forms of its arrays, which makes a plan, or binds a kernel to them."""

    def refuse(self, *given):
        raise AssertionError(f"a {type(self).__name__} is made or bound again")

    monkeypatch.setattr(launch.Kernel, "bind", refuse)
    monkeypatch.setattr(Plan, "__init__", refuse)
