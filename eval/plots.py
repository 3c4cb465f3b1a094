"""How numbers become pictures: panels of lines, with bands or error bars, as image files.

`panels` draws what it is given; which numbers those are, other files say: `plot_kinds.py`, `calibration.py`, `mdlm
plan`. `matplotlib` is imported only when a picture is drawn, and without its global state: no window, no style of the
user's, the same picture everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Point = tuple[float, float] | tuple[float, float, float, float]
"""(x, y), or (x, y, low, high)."""
Scale = Literal["linear", "log", "log2", "symlog"]
SCALES: dict[Scale, tuple[str, dict[str, Any]]] = {
    "linear": ("linear", {}),
    "log": ("log", {}),
    "log2": ("log", {"base": 2}),
    "symlog": ("symlog", {"linthresh": 1.0}),
}
STYLES = ("-", "--", ":", "-.")


@dataclass(frozen=True)
class Panel:
    """One pair of axes: one line per name through its points, in their order."""

    series: Mapping[str, Sequence[Point]]
    title: str
    x_label: str
    y_label: str
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    """`log2` has ticks at powers of 2; `symlog` is linear between -1 and 1."""
    spread: Literal["band", "bars"] = "band"
    """How low and high are drawn."""
    level: float | None = None
    """Height of a dashed line, e.g. of what would be perfect."""
    diagonal: bool = False
    """A dashed line through (0, 0) and (1, 1)."""
    markers: bool = False
    steps: bool = False
    """Horizontal from each point to the next."""
    from_zero: bool = False
    """The y axis begins at 0."""


def panels(parts: Sequence[Panel], path: str | Path, columns: int = 2, title: str | None = None) -> Path:
    """Draw panels side by side, `columns` in a row, into `path`, whose suffix (.png, .svg, .pdf) gives the format and
    whose folder is made if need be.

    Raises ValueError if matplotlib is not installed, for no panels, and for a suffix that is no picture.
    """
    if not parts or not any(points for panel in parts for points in panel.series.values()):
        raise ValueError("there is nothing to draw: no panel has a point")
    file = Path(path)
    across = min(columns, len(parts))
    down = -(-len(parts) // across)
    figure = _figure(file, (8.5, 5.2) if len(parts) == 1 else (6.0 * across, 4.0 * down))
    for number, panel in enumerate(parts, start=1):
        _draw(figure.add_subplot(down, across, number), panel)
    if title is not None:
        figure.suptitle(title)
    return _save(figure, file)


def line_plot(
    series: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_log: bool = False,
    y_log: bool = False,
) -> None:
    """One line per name through its (x, y) points. Raises as `panels` does."""
    scales: tuple[Scale, Scale] = ("log" if x_log else "linear", "log" if y_log else "linear")
    panels([Panel(series, title, x_label, y_label, *scales)], path)


def band_plot(
    series: Mapping[str, Sequence[tuple[float, float, float, float]]],
    path: Path,
    *,
    title: str,
    x_label: str,
    y_label: str,
    level: float = 0.0,
) -> None:
    """One line with its band per name through (x, y, low, high), x logarithmic, y as `scale_around` says; a dashed line
    at `level`. Raises as `panels` does."""
    ordered = {name: sorted(points) for name, points in series.items()}
    panels([Panel(ordered, title, x_label, y_label, "log2", scale_around(level), level=level, markers=True)], path)


def scale_around(level: float) -> Scale:
    """Logarithmic beyond 1 around a level of 0, for gaps of any size; linear around another, for shares."""
    return "linear" if level else "symlog"


def _figure(file: Path, size: tuple[float, float]) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError("plots need matplotlib; install it with: pip install 'mdlm-torch[eval]'") from error
    allowed = FigureCanvasAgg.get_supported_filetypes()
    if file.suffix[1:].lower() not in allowed:
        raise ValueError(f"{file} does not end like a picture; give a name that ends in {', '.join(sorted(allowed))}")
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw(axes: Any, panel: Panel) -> None:
    drawn = {name: points for name, points in panel.series.items() if points}
    for number, (name, points) in enumerate(drawn.items()):
        x, y, *spread = (list(values) for values in zip(*points, strict=True))
        look = {
            "label": name,
            "linestyle": STYLES[number // 10 % len(STYLES)],
            "marker": "o" if panel.markers or len(points) == 1 else None,
            "markersize": 3.5,
            "drawstyle": "steps-post" if panel.steps else "default",
        }
        if spread and panel.spread == "bars":
            low, high = ([abs(value - edge) for value, edge in zip(y, edges)] for edges in spread)
            axes.errorbar(x, y, yerr=[low, high], capsize=2, **look)
            continue
        (line,) = axes.plot(x, y, **look)
        if spread:
            axes.fill_between(x, *spread, alpha=0.15, color=line.get_color(), linewidth=0)
    dashed = {"color": "gray", "linewidth": 0.9, "linestyle": "--"}
    if panel.level is not None:
        axes.axhline(panel.level, **dashed)
    if panel.diagonal:
        axes.plot([0, 1], [0, 1], **dashed)
    for set_scale, scale in ((axes.set_xscale, panel.x_scale), (axes.set_yscale, panel.y_scale)):
        name, options = SCALES[scale]
        set_scale(name, **options)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
    axes.grid(True, alpha=0.3)
    if drawn and (len(drawn) > 1 or next(iter(drawn))):
        axes.legend(fontsize="small", ncols=2 if len(drawn) > 6 else 1)


def _save(figure: Any, file: Path) -> Path:
    import matplotlib

    file.parent.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context({"svg.hashsalt": "mdlm"}):  # else every drawing of the same numbers is another file
        figure.savefig(file, dpi=110, metadata={"Date": None} if file.suffix == ".svg" else None)
    return file
