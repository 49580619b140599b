"""What the pictures of the benches have in common: colours, numbers, and a light and a dark file of each."""

import pathlib
import sys

from tikv import extras

INK = {"light": "#1f2328", "dark": "#e6edf3"}
COLOURS = {"tikv": "#2da44e", "torch": "#e36209", "numpy": "#6e7781"}


def number(value) -> str:
    """A measured number, its last digits only where they tell something."""
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def plain(axes):
    """No box around a panel and nothing behind it, so that it serves on any page."""
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)


def save(make, stem):
    """STEM-light.svg and STEM-dark.svg of the figure that `make` draws for a theme; the same bytes each time."""
    matplotlib = extras.need("matplotlib", "a picture")
    matplotlib.use("svg")
    matplotlib.rcdefaults()
    matplotlib.rcParams.update({"svg.hashsalt": "tikv", "font.size": 8})
    from matplotlib import pyplot

    for theme, ink in INK.items():
        matplotlib.rcParams.update({f"{at}color": ink for at in ("axes.label", "axes.edge", "xtick.", "ytick.")})
        matplotlib.rcParams.update({"text.color": ink, "axes.titlecolor": ink})
        figure = make(theme)
        target = pathlib.Path(f"{stem}-{theme}.svg")
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, transparent=True, metadata={"Date": None}, bbox_inches="tight")
        pyplot.close(figure)
        print(f"drew {target}", file=sys.stderr)
