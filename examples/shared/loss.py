"""Shared by the examples that measure the likelihood of a text: options, texts, likelihood, and a picture."""

import argparse
import json.decoder
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np

import tikv
from shared.model import Memory, Model
from tikv import extras

Line = tuple[str, list[tuple[float, float]]]  # its label, and its points


def add_options(parser: argparse.ArgumentParser) -> None:
    """`--excerpts`, `--text` and `--plot`."""
    parser.add_argument("--excerpts", type=int, default=2, help="number of excerpts to average over")
    parser.add_argument("--text", type=Path, default=Path(json.decoder.__file__), help="a file of Python source")
    parser.add_argument("--plot", type=Path, help="write a picture to this file")


def excerpts(parser: argparse.ArgumentParser, given: argparse.Namespace, model: Model, length: int) -> list[list[int]]:
    """The stretches of the text, `length` tokens each; the program ends with a message where something is missing."""
    if given.plot:
        try:
            extras.need("matplotlib", "--plot")
        except tikv.MissingPackageError as error:
            parser.error(str(error))
    try:
        return model.excerpts(given.text.read_text(encoding="utf-8"), given.excerpts, length)
    except ValueError as error:
        parser.error(f"--text {error}")


def log_likelihood(
    model: Model, memory: Memory, logits: np.ndarray, ids: list[int], position: int
) -> tuple[float, float]:
    """(nats per token, median seconds per token) of a text that is read token by token."""
    total, times = 0.0, []
    for i, token in enumerate(ids):
        row = logits.astype(np.float64)
        total += row[token] - row.max() - np.log(np.exp(row - row.max()).sum())
        start = time.perf_counter()
        logits = model.forward([token], position + i, memory)[-1]
        times.append(time.perf_counter() - start)
    return total / len(ids), float(np.median(times))


def plot(path: Path, lines: Iterable[Line], xlabel: str, title: str, **axis: str) -> None:
    """Write a picture of the loss, a line for each way, and a name beside a single point.

    `axis` is what else matplotlib's axes are set to.
    """
    matplotlib = extras.need("matplotlib", "--plot")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for label, points in lines:
        if len(points) == 1:
            axes.plot(*points[0], marker="o", color="C0")
            axes.annotate(label, points[0], xytext=(4, 4), textcoords="offset points", fontsize=8)
        else:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set(xlabel=xlabel, ylabel="loss, nats per token", title=title, **axis)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    figure.savefig(path, dpi=120)
    print(f"{path} written", file=sys.stderr)
