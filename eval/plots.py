"""Line plots of measured or predicted numbers, as image files. `matplotlib` is imported only when one is drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def line_plot(
    series: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_log: bool = False,
) -> None:
    """One line per name through its (x, y) points, written to `path`; its suffix (.png, .svg, .pdf) gives the format.

    Raises ValueError if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib; install it with: pip install matplotlib") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, points in series.items():
        axes.plot([x for x, _ in points], [y for _, y in points], label=name)
    if x_log:
        axes.set_xscale("log")
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(True, alpha=0.3)
    axes.legend()
    figure.savefig(path)
