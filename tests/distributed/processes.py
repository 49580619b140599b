"""Processes of a gloo group that stay for many tests: all of them, or the first two, run the function they are sent."""

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import traceback

SECONDS = 60  # a collective waits so long for a rank that failed
PATIENCE = 1200


class Pair:
    """The first two of some processes, as a group of their own."""

    def __init__(self, processes):
        self.processes = processes

    def run(self, function, *args):
        return self.processes.run(function, *args, world=2)


class Processes:
    """`world` processes, each with a rank, torch.distributed on gloo and tikv on `arch`."""

    def __init__(self, world, arch="cpu", seconds=SECONDS, debug=False):
        self.world = world
        self.folder = tempfile.TemporaryDirectory(prefix="tikv-ranks-")
        spawn = multiprocessing.get_context("spawn")
        self.pipes, self.children = [], []
        for rank in range(world):
            ours, theirs = spawn.Pipe()
            settings = {"file": os.path.join(self.folder.name, "store"), "arch": arch, "seconds": seconds}
            child = spawn.Process(target=_serve, args=(theirs, rank, world, settings, debug), daemon=True)
            child.start()
            theirs.close()
            self.pipes.append(ours)
            self.children.append(child)

    def run(self, function, *args, world=None):
        """What the function returns on each rank, given its rank, the number of ranks and the arguments."""
        found = self.try_run(function, *args, world=world)
        wrong = [f"rank {rank}: {result}" for rank, (ok, result) in enumerate(found) if not ok]
        assert wrong == [], "\n".join(wrong)
        return [result for _, result in found]

    def try_run(self, function, *args, world=None):
        """Of each rank (True, what it returned) or (False, how it failed); `world`: the first two alone, as a group."""
        for pipe in self.pipes[:world]:
            with contextlib.suppress(OSError):  # of a process that has ended
                pipe.send((function, args, world))
        found = []
        for pipe in self.pipes[:world]:
            try:
                found.append(pipe.recv() if pipe.poll(PATIENCE) else (False, "no answer"))
            except (EOFError, OSError):
                found.append((False, "the process has ended"))
        return found

    def end(self):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for child in self.children:
            child.join(10)
            if child.is_alive():
                child.kill()
        self.folder.cleanup()


def _serve(pipe, rank, world, settings, debug):
    import torch
    import torch.distributed as dist

    import tikv

    torch.set_num_threads(1)
    tikv.init(arch=settings["arch"], cpu_max_num_threads=1, debug=debug)
    timeout = datetime.timedelta(seconds=settings["seconds"])
    where = f"file://{settings['file']}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world, timeout=timeout)
    pair = dist.new_group([0, 1])
    while (order := pipe.recv()) is not None:
        function, args, some = order
        try:
            pipe.send((True, function(rank, some or world, pair if some else None, *args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()
