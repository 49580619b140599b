"""Try `TikvCache` in a tiny random model of every family of the installed transformers that generates.

    python tests/families/survey.py                      all of them, in one process
    python tests/families/survey.py llama t5 --fresh     these, whether or not they are known already
    python tests/families/survey.py --write docs/families.md

What is found is kept in a file as it comes, so a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent


def main() -> int:
    import transformers

    default = pathlib.Path(tempfile.gettempdir()) / f"tikv-families-{transformers.__version__}.jsonl"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="names of model folders; default: all")
    parser.add_argument("--processes", type=int, default=1, help="at once (1)")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB of addresses that each process may have (8)")
    parser.add_argument("--seconds", type=int, default=300, help="that a family may take (300)")
    parser.add_argument("--results", type=pathlib.Path, default=default, help=f"where they are kept ({default})")
    parser.add_argument("--fresh", action="store_true", help="try again what is in the results")
    parser.add_argument("--write", type=pathlib.Path, help="write the table of all results there, in Markdown")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options)
    from tiny_models import folders

    chosen = options.families or folders()
    if unknown := set(chosen) - set(folders()):
        parser.error(f"no families that generate: {', '.join(sorted(unknown))}")
    known = {} if options.fresh and not options.families else read(options.results)
    todo = [name for name in chosen if options.fresh or name not in known]
    results = gather(todo, options, known)
    if options.write:
        from family_page import page

        options.write.write_text(page(results), encoding="utf-8")
    return report(results, chosen)


def read(path: pathlib.Path) -> dict[str, list[dict[str, Any]]]:
    """What is known of each family; the last line of a family counts."""
    found = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found[entry["family"]] = entry["classes"]
    return found


def gather(todo: list[str], options: Any, known: dict[str, Any]) -> dict[str, Any]:
    """Have each family tried by one of a few processes; `known` with what they find."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    results = dict(known)
    waiting: queue.Queue[str] = queue.Queue()
    for name in todo:
        waiting.put(name)
    columns = TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    lock = threading.Lock()
    with open(options.results, "w", encoding="utf-8") as file:
        for name, classes in results.items():
            print(json.dumps({"family": name, "classes": classes}), file=file, flush=True)
        with Progress(*columns, disable=not todo) as progress:
            task = progress.add_task("", total=len(todo))

            def work() -> None:
                process = Child(options)
                try:
                    while True:
                        try:
                            name = waiting.get_nowait()
                        except queue.Empty:
                            return
                        progress.update(task, description=name)
                        classes = process.survey(name)
                        with lock:
                            results[name] = classes
                            print(json.dumps({"family": name, "classes": classes}), file=file, flush=True)
                        progress.advance(task)
                finally:
                    process.end()

            threads = [threading.Thread(target=work) for _ in range(options.processes)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    return dict(sorted(results.items()))


class Child:
    """A process that tries families, one after the other; a new one where it ends or takes too long."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.process: Any = None

    def survey(self, name: str) -> list[dict[str, Any]]:
        if self.process is None:
            self.start()
        timer = threading.Timer(self.options.seconds, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(name + "\n")
            self.process.stdin.flush()
            answer = self.process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        timer.cancel()
        if answer:
            return list(json.loads(answer))
        code = self.process.wait()
        self.process = None
        slow = f"more than {self.options.seconds} seconds" if code == -signal.SIGKILL else f"exit status {code}"
        return [{"class": "", "not run": f"the process ended: {slow}"}]

    def start(self) -> None:
        arguments = [sys.executable, __file__, "--child", f"--memory={self.options.memory}"]
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def end(self) -> None:
        if self.process is not None:
            self.process.stdin.close()
            self.process.wait()


def child(options: Any) -> int:
    """Try the families that are named line by line."""
    import resource
    import warnings

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    bytes_ = int(options.memory * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (bytes_, bytes_))
    warnings.simplefilter("ignore")
    import family_verdicts
    import tiny_models
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for name in sys.stdin:
        try:
            found = [family_verdicts.survey(cls) for cls in tiny_models.generators(name.strip())]
        except Exception as error:
            found = [{"class": "", "not built": family_verdicts.told(error)}]
        if not found:
            found = [{"class": "", "not run": "it generates with a function of its own"}]
        print(json.dumps(found), file=answers, flush=True)
    return 0


def report(results: dict[str, Any], chosen: list[str]) -> int:
    """Say what is not right; the exit status is 1 where something differs."""
    from collections import Counter

    from family_verdicts import outcome

    counts: Counter[str] = Counter()
    for name in chosen:
        for found in results[name]:
            word, notes = outcome(found)
            counts[word] += 1
            if word != "yes":
                print(f"{name} {found['class']}: {word}: {'; '.join(notes)}")
    print(", ".join(f"{n} {word}" for word, n in counts.items()))
    return 1 if counts["differs"] else 0


if __name__ == "__main__":
    sys.exit(main())
