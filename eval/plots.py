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


def band_plot(
    series: Mapping[str, Sequence[tuple[float, float, float, float]]],
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    level: float = 0.0,
) -> None:
    """One line with its band per name through (x, y, low, high), x logarithmic, y logarithmic beyond 1 around 0; a
    dashed line at `level`. Written to `path`; its suffix gives the format.

    Raises ValueError if matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib; install it with: pip install 'mdlm-torch[eval]'") from error
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    styles = ("-", "--", ":", "-.")
    for number, (name, points) in enumerate(series.items()):
        x, y, low, high = (list(values) for values in zip(*sorted(points)))
        (line,) = axes.plot(x, y, label=name, marker="o", markersize=3, linestyle=styles[number // 10 % len(styles)])
        axes.fill_between(x, low, high, alpha=0.15, color=line.get_color())
    axes.axhline(level, color="black", linewidth=0.8, linestyle="--")
    axes.set_xscale("log", base=2)
    axes.set_yscale("symlog", linthresh=1.0)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize="small", ncols=2)
    with matplotlib.rc_context({"svg.hashsalt": "curves"}):
        figure.savefig(path)
