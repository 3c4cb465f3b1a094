"""Pictures: what is drawn is what was measured; reliability by hand and by law; refusals that help."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from mdlm.eval import __main__ as command
from mdlm.eval import sources_zoo as zoo
from mdlm.eval.calibration import bin_commits, calibration, reliability, wilson
from mdlm.eval.plot_kinds import curve_panels, main, plot, schedule_panels, traffic_panels, training_panels
from mdlm.eval.plots import Panel, band_plot, line_plot, panels
from mdlm.eval.sources_noisy import NoisyOracle


def ink(path: Path) -> float:
    """Share of pixels that are not white."""
    return float((np.asarray(Image.open(path).convert("L")) < 250).mean())


# Drawing.


def test_a_picture_holds_its_lines_and_differs_where_they_differ(tmp_path: Path) -> None:
    one = Panel({"a": [(0, 0), (1, 1)]}, "t", "x", "y")
    two = Panel({"a": [(0, 0), (1, 1)], "b": [(0, 1), (1, 0)]}, "t", "x", "y")
    first, second = panels([one], tmp_path / "one.png"), panels([two], tmp_path / "new" / "two.png")
    assert 0.005 < ink(first) < ink(second)
    svg = panels([two, one], tmp_path / "both.svg").read_text()
    assert svg == panels([two, one], tmp_path / "again.svg").read_text(), "the same numbers give the same file"


def test_every_point_of_a_line_is_drawn_where_it_belongs(tmp_path: Path) -> None:
    """A flat line at the top of the axes and one at the bottom: ink in the rows where they must be."""
    rows = []
    for y in (0.0, 1.0):
        frame = {"frame": [(0, -0.2), (0, 1.2)]}
        path = panels([Panel({**frame, "line": [(0, y), (1, y)]}, "", "", "")], tmp_path / f"{y}.png")
        image = np.asarray(Image.open(path).convert("RGB"), dtype=int)
        orange = (image[..., 0] > 230) & (abs(image[..., 1] - 127) < 40) & (image[..., 2] < 80)
        rows.append(float(np.median(orange.nonzero()[0])))
    assert rows[0] > rows[1] + 100


@pytest.mark.parametrize("spread", ["band", "bars"])
def test_spread_is_drawn(tmp_path: Path, spread: str) -> None:
    thin = {"a": [(0.0, 1.0), (1.0, 1.0)]}
    wide = {"a": [(x, y, 0.0, 2.0) for x, y in thin["a"]]}
    paths = [
        panels([Panel(series, "", "", "", spread=spread)], tmp_path / f"{n}.png")  # type: ignore[arg-type]
        for n, series in enumerate((thin, wide))
    ]
    assert ink(paths[1]) > ink(paths[0])


def test_lines_and_bands_of_other_commands(tmp_path: Path) -> None:
    line_plot({"a": [(1, 1), (10, 3)]}, tmp_path / "l.png", title="t", x_label="x", y_label="y", x_log=True, y_log=True)
    band_plot({"a": [(4, 2, 1, 3), (1, 1, 0, 2)]}, tmp_path / "b.png", title="t", x_label="x", y_label="y", level=1.0)
    assert ink(tmp_path / "l.png") > 0.005
    assert ink(tmp_path / "b.png") > 0.02


def test_what_cannot_be_drawn_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    panel = Panel({"a": [(0, 0)]}, "", "", "")
    with pytest.raises(ValueError, match="nothing to draw"):
        panels([Panel({"a": []}, "", "", "")], tmp_path / "a.png")
    with pytest.raises(ValueError, match="does not end like a picture"):
        panels([panel], tmp_path / "a.txt")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"mdlm-torch\[eval\]"):
        panels([panel], tmp_path / "a.png")


# Calibration.


def test_bins_counts_and_error_by_hand() -> None:
    confidence = torch.tensor([0.05, 0.1, 0.3, 0.9, 1.0, 0.95], dtype=torch.float64)
    right = torch.tensor([False, True, True, True, True, False])
    found = bin_commits(confidence, right, bins=5, nfe=3.0)
    assert [(b.low, b.high, b.count) for b in found.bins] == [(0.0, 0.2, 2), (0.2, 0.4, 1), (0.8, 1.0, 3)]
    assert [b.confidence for b in found.bins] == pytest.approx([0.075, 0.3, 0.95])
    assert [b.right for b in found.bins] == pytest.approx([0.5, 1.0, 2 / 3])
    assert found.error == pytest.approx((2 * 0.425 + 1 * 0.7 + 3 * (0.95 - 2 / 3)) / 6)
    assert (found.commits, found.nfe) == (6, 3.0)
    assert found.right == pytest.approx(4 / 6)


def test_a_confidence_on_an_edge_belongs_below_it() -> None:
    found = bin_commits(torch.tensor([0.5, 0.0, 1.0], dtype=torch.float64), torch.tensor([True, True, True]), bins=2)
    assert [(b.low, b.count) for b in found.bins] == [(0.0, 2), (0.5, 1)]


@pytest.mark.parametrize(("right", "count"), [(0, 5), (5, 5), (3, 10), (50, 100)])
def test_wilson_bounds_are_the_shares_at_which_what_was_seen_is_two_sigma_away(right: int, count: int) -> None:
    low, high = wilson(right, count)
    for edge in (low, high):
        distance = abs(right / count - edge)
        sigma = 1.96 * math.sqrt(edge * (1 - edge) / count)
        assert distance == pytest.approx(sigma, abs=1e-12)
    assert 0 <= low < high <= 1


ALL_AT_ONCE = {"strategy": "llada", "steps": 1}
SOURCE = zoo.markov(16, vocab=4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_exact_conditionals_committed_at_once_are_calibrated(temperature: float) -> None:
    """Given true tokens only, P(the hidden token is c) is what the source says of c, whether c is drawn or the best."""
    found = reliability(SOURCE, SOURCE, sequences=3000, temperature=temperature, **ALL_AT_ONCE)
    assert found.commits == 3000 * 12
    for b in found.bins:
        error = math.sqrt(max(b.right * (1 - b.right), 0.01) / b.count)
        assert abs(b.right - b.confidence) < 5 * error, b  # commits of one row hang together a little
    assert found.error < 0.01
    assert found.nfe == 1


def test_an_overconfident_model_lies_below_the_diagonal_and_an_unsure_one_above() -> None:
    over = reliability(SOURCE, NoisyOracle(SOURCE, temperature=0.5), sequences=1000, **ALL_AT_ONCE)
    under = reliability(SOURCE, NoisyOracle(SOURCE, uniform=0.5), sequences=1000, **ALL_AT_ONCE)
    assert over.confidence > over.right + 0.05
    assert under.confidence < under.right - 0.05
    assert min(over.error, under.error) > 0.05


def test_going_on_from_ones_own_draws_costs_calibration() -> None:
    """One token after the other at temperature 1: each draw may be wrong, and the next is sure given the wrong one."""
    chain = reliability(SOURCE, SOURCE, "first_hitting", sequences=1000, given=0.0)
    assert chain.confidence > chain.right + 0.05
    assert chain.nfe == 16


def test_the_command_appends_a_line_per_strategy_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, picture = tmp_path / "new" / "c.jsonl", tmp_path / "c.png"
    options = {"length": 12, "sequences": 20, "output": str(output)}
    calibration("markov", ["dus", "eb"], plot=str(picture), **options)
    calibration("templates", ["threshold"], **options)
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [(r["source"], r["strategy"]) for r in records] == [
        ("markov", "dus"),
        ("markov", "eb"),
        ("templates", "threshold"),
    ]
    assert all(r["commits"] == 20 * 9 == sum(b["count"] for b in r["bins"]) for r in records)
    assert ink(picture) > 0.01
    again = tmp_path / "again.svg"
    assert main(["calibration", "--paths", f"[{output}]", "--out", str(again)]) == 0
    assert capsys.readouterr().out.strip() == str(again)
    drawn = again.read_text()
    assert all(f"<!-- {r['strategy']}: error {r['error']:.3f}, NFE {r['nfe']:.1f} -->" in drawn for r in records)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"given": 1.0}, "given 1.0"),
        ({"given": 0.99}, "leaves none to write"),
        ({"sequences": 0}, "sequences is 0"),
        ({"bins": 0}, "1 or more bins"),
        ({"strategies": ["tresholt"]}, "did you mean 'threshold'"),
        ({"source": "marcov"}, "did you mean 'markov'"),
        ({"uniform": 2.0}, "uniform is 2.0"),
    ],
)
def test_wrong_values_are_named(tmp_path: Path, options: dict, message: str) -> None:
    output = tmp_path / "c.jsonl"
    with pytest.raises(ValueError, match=message):
        calibration(**{"length": 12, "sequences": 2, "output": str(output), **options})
    assert not output.exists()


# Training curves, schedules, curves.

RUN = [
    {"kind": "start", "step": 0, "config": {}},
    {"kind": "train", "step": 10, "loss": 3.0, "lr": 0.1, "tokens_per_second": 5.0},
    {"kind": "train", "step": 20, "loss": None, "lr": 0.2, "tokens_per_second": 6.0},
    {"kind": "validation", "step": 20, "nats_per_token": 2.5, "standard_error": 0.1},
    {"kind": "train", "step": 30, "loss": 2.0, "lr": 0.1, "tokens_per_second": 7.0},
    {"kind": "validation", "step": 30, "nats_per_token": 2.0, "standard_error": None},
]


def write_run(folder: Path, records: list[dict]) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_training_curves_are_the_records_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "mine", RUN)
    loss, validation, rate, speed = training_panels([run])
    assert loss.series == {"mine": [(10, 3.0), (30, 2.0)]}, "a step without a finite loss is a gap"
    assert validation.series == {"mine": [(20, 2.5, pytest.approx(2.3), pytest.approx(2.7)), (30, 2.0, 2.0, 2.0)]}
    assert rate.series == {"mine": [(10, 0.1), (20, 0.2), (30, 0.1)]}
    assert speed.series == {"mine": [(10, 5.0), (20, 6.0), (30, 7.0)]}


def test_runs_called_alike_stay_apart_and_files_may_be_named(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "a" / "run", RUN), write_run(tmp_path / "b" / "run", RUN[:2])
    assert set(training_panels([one, two])[0].series) == {str(one), str(two)}
    assert set(training_panels([two / "metrics.jsonl"])[0].series) == {"run"}
    assert len(training_panels([two])) == 3, "no panel for validations that there are none of"
    assert ink(Path(plot("training", [str(one), str(two)], str(tmp_path / "t.png")))) > 0.01


def test_traffic_is_what_the_exchanges_say(tmp_path: Path) -> None:
    outer = [
        {"kind": "outer", "step": 4, "bytes_sent": 3_000_000, "bytes_total": 8_000_000, "cosine_between_islands": 0.5},
        {
            "kind": "outer",
            "step": 8,
            "bytes_sent": 4_000_000,
            "bytes_total": 12_000_000,
            "cosine_between_islands": None,
        },
    ]
    run, plain = write_run(tmp_path / "mine", RUN[:2] + outer), write_run(tmp_path / "plain", RUN)
    total, rate, cosine = traffic_panels([run])
    assert total.series == {"mine": [(4, 8.0), (8, 12.0)]}
    assert rate.series == {"mine": [(4, 2.0), (8, 1.5)]}
    assert cosine.series == {"mine": [(4, 0.5)]}
    assert ink(Path(plot("traffic", [str(run)], str(tmp_path / "t.png")))) > 0.01
    with pytest.raises(ValueError, match="plain: no exchange between islands"):
        traffic_panels([run, plain])


def test_schedules_are_the_formulas() -> None:
    masked, weight = schedule_panels(points=3)
    half = {name: points[1] for name, points in masked.series.items()}
    assert half["linear"] == pytest.approx((0.5, 0.5))
    assert half["cosine"] == pytest.approx((0.5, math.sin(math.pi / 4)))
    assert half["polynomial, power 2"] == pytest.approx((0.5, 0.25))
    weights = {name: points[1][1] for name, points in weight.series.items()}
    assert weights["linear"] == pytest.approx(2.0)
    assert weights["cosine"] == pytest.approx(math.pi / 2)
    assert weights["polynomial, power 0.5"] == pytest.approx(1.0)


def test_curves_are_drawn_again_from_their_points(tmp_path: Path) -> None:
    def point(source: str, strategy: str, nfe: float, value: float | None) -> dict:
        key = "gap" if source == "markov" else "possible"
        band = {f"{key}_low": value and value - 0.1, f"{key}_high": value and value + 0.1}
        return {"kind": "point", "source": source, "strategy": strategy, "nfe": nfe, key: value, **band}

    records = [
        {"kind": "truth", "source": "markov", "length": 64, "entropy": 61.52},
        {"kind": "truth", "source": "sudoku", "length": 16, "entropy": 5.66},
        *(point("markov", "eb", nfe, value) for nfe, value in ((8.0, 0.5), (2.0, 3.0), (4.0, None))),
        point("sudoku", "dus", 4.0, 0.25),
    ]
    folder = tmp_path / "curves"
    folder.mkdir()
    (folder / "points.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    markov, sudoku = curve_panels([folder])
    assert markov.series == {"eb": [(2.0, 3.0, 2.9, 3.1), (8.0, 0.5, 0.4, 0.6)]}
    assert sudoku.series == {"dus": [(4.0, 0.25, 0.15, 0.35)]}
    assert (markov.level, sudoku.level) == (0.0, 1.0)
    assert (markov.y_scale, sudoku.y_scale) == ("symlog", "linear")
    assert markov.title == "markov, length 64, 61.5 nats"
    assert ink(Path(plot("curves", [str(folder)], str(tmp_path / "c.png")))) > 0.01


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("training", '{"kind": "start", "step": 0}\n', "no training record with a loss"),
        ("training", "not json\n", "line 1 is not JSON"),
        ("training", "[1]\n", "no JSON object"),
        ("curves", '{"kind": "train"}\n', "no points of `mdlm eval curves`"),
        ("calibration", '{"kind": "train"}\n', "no records of `mdlm eval calibration`"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    tmp_path: Path, kind: str, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "some.jsonl", tmp_path / "x.png"
    file.write_text(content)
    assert main([kind, "--paths", f"[{file}]", "--out", str(out)]) == 1
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_paths_where_they_belong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give at least one with --paths"):
        plot("training")
    with pytest.raises(ValueError, match="give no paths"):
        plot("schedules", ["a"])
    with pytest.raises(FileNotFoundError):
        plot("training", [str(tmp_path / "none")], str(tmp_path / "x.png"))


def test_the_command_knows_both() -> None:
    assert {"plot", "calibration"} <= set(command.SUBCOMMANDS)
