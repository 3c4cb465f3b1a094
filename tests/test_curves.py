"""Quality against speed: measures by hand, gates that catch planted bugs, and the report's files."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mdlm.eval import __main__ as command
from mdlm.eval import curve_report, curves
from mdlm.eval import sources_zoo as zoo
from mdlm.eval.curves import SWEEPS, Counting, GateError, Sweep, Truth, curve_point, measure
from mdlm.eval.sources import ExactSource, MarkovSource
from mdlm.eval.sources_noisy import NoisyOracle
from mdlm.samplers import cache

SEEDS = [0, 1, 2]
SMALL: dict[str, ExactSource] = {
    "markov": zoo.markov(10, vocab=4),
    "noisy_copy": zoo.noisy_copy(10, vocab=4),
    "templates": zoo.templates(10, phrases=3, span=5, vocab=6),
}
TRUTHS = {name: Truth.of(source, 90, draws=2000) for name, source in SMALL.items()}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", [name for name, sweep in SWEEPS.items() if sweep.one_token is not None])
@pytest.mark.parametrize("source", SMALL)
def test_one_token_a_step_has_gap_zero_whatever_the_order(name: str, source: str) -> None:
    point = curve_point(TRUTHS[source], SMALL[source], name, SWEEPS[name].one_token, SEEDS, 60, resamples=20)
    assert abs(point["gap"]) <= 3 * point["gap_error"]
    assert abs(point["kl"]) < 1e-6
    assert point["possible"] == pytest.approx(1.0)
    assert point["one_token"]
    assert point["samples"] == 180
    assert point["nfe"] == 10
    assert point["tokens_fed"] == 100


def test_committing_neighbours_together_is_seen_as_a_gap() -> None:
    point = curve_point(TRUTHS["markov"], SMALL["markov"], "confidence", 8, SEEDS, 60)
    assert point["gap_low"] > 0.5
    assert point["gap_low"] < point["gap"] < point["gap_high"]
    assert point["nfe"] == point["nfe_low"] == point["nfe_high"] == 2
    assert point["pair_tv_low"] > TRUTHS["markov"].values["pair_tv"]
    assert not point["one_token"]


def test_a_sampler_that_prefers_likely_tokens_has_a_gap_below_zero() -> None:
    """Drawing before ranking is the distortion that generative perplexity rewards."""
    point = curve_point(TRUTHS["markov"], SMALL["markov"], "llada", 16, SEEDS, 60)
    assert point["gap_high"] < 0
    assert point["kl"] is None  # its tokens do not follow the law they are noted with


def test_the_divergence_of_two_tokens_at_once_is_that_of_independent_draws() -> None:
    """Both halves of a noisy copy at once: drawn independently of each other, against their joint law."""
    source = zoo.noisy_copy(2, vocab=3, error=0.2)
    joint = torch.zeros(3, 3).double()
    for a in range(3):
        for b in range(3):
            joint[a, b] = float(source.log_prob(torch.tensor([[a, b]])).exp())
    alone = joint.sum(1)[:, None] * joint.sum(0)[None]
    expected = float((alone * (alone / joint).log()).sum())
    point = curve_point(Truth.of(source, 900, draws=500), source, "random", 2, SEEDS, 1000)
    assert point["kl_low"] <= expected <= point["kl_high"]
    assert point["kl"] == pytest.approx(expected, rel=0.15)


def test_every_sweep_has_six_points_and_passes_the_gates() -> None:
    source = zoo.parity(6, block=3)
    truth = Truth.of(source, 8, draws=200)
    for name, sweep in SWEEPS.items():
        assert len(set(sweep.values)) >= 6, name
        for value in sweep.values:
            assert sweep.build(value).draw.temperature == 1
        middle = sweep.values[len(sweep.values) // 2]
        point = curve_point(truth, source, name, middle, [3], 8, resamples=5)
        assert point["nfe"] >= 1, name
    assert set(curves.CORE) <= set(SWEEPS)


def test_measures_of_given_sequences_by_hand() -> None:
    source = MarkovSource(
        torch.tensor([0.5, 0.5]).double(), torch.tensor([[1.0, 0.0], [0.005, 0.995]]).double(), 4, "uniform"
    )
    x = torch.tensor([[0, 0, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [1, 1, 1, 1]])
    truth = Truth(source, torch.tensor([0.5, 0, 0, 0.5]).double(), torch.tensor([1.0, 0, 0, 0]).double(), {})
    got = measure(truth, x, [4])
    nats = [math.log(2), math.log(2) - 2 * math.log(0.995) - math.log(0.005), math.log(2) - 3 * math.log(0.995)]
    entropy, here = math.log(2), 0.5
    for _ in range(3):
        entropy -= here * (0.005 * math.log(0.005) + 0.995 * math.log(0.995))
        here *= 0.995
    assert got["gap"] == pytest.approx(sum(nats) / 3 - entropy)
    assert got["possible"] == pytest.approx(3 / 4)  # 0 -> 1 cannot be
    assert got["rare"] == pytest.approx(2 / 16)  # 1 -> 0 once, 0 -> 1 once
    # 12 pairs: 00 three times, 01 once, 10 once, 11 seven times.
    assert got["pair_tv"] == pytest.approx((abs(3 / 12 - 0.5) + 1 / 12 + 1 / 12 + abs(7 / 12 - 0.5)) / 2)
    # Two apart: 00 00 | 11 10 | 01 11 | 11 11.
    assert got["far_pair_tv"] == pytest.approx((abs(2 / 8 - 1) + 1 / 8 + 1 / 8 + 4 / 8) / 2)
    assert got["distinct_4"] == 1.0
    assert measure(truth, x[[0, 0, 3, 3]], [2, 2])["distinct_4"] == 0.5
    drawn = torch.tensor([-1.0, -2.0, -3.0, -4.0]).double()
    assert measure(truth, x, [4], drawn=drawn)["kl"] is None  # a quarter cannot be
    often = [0] * 6 + [1, 3, 2, 0]  # one in ten
    some = measure(truth, x[often], [10], drawn=drawn[often])
    assert some["kl"] == pytest.approx(sum(float(drawn[i]) + nats[min(i, 2)] for i in often if i != 2) / 9)
    nothing = measure(truth, x[[2]], [1], resamples=10)
    assert (nothing["gap"], nothing["gap_low"], nothing["possible"]) == (None, None, 0.0)


def test_the_band_covers_the_truth_as_often_as_it_says() -> None:
    source, truth = SMALL["markov"], TRUTHS["markov"]
    inside = 0
    for seed in range(60):
        got = measure(truth, source.sample(80, seeded(seed)), [80], resamples=200)
        inside += got["gap_low"] <= 0 <= got["gap_high"]
    assert 51 <= inside <= 60  # 57 expected; fewer than 51 would have a chance below 1 in 100


def test_true_samples_measure_as_the_noise_floor() -> None:
    values = TRUTHS["noisy_copy"].values
    assert abs(values["gap"]) <= 4 * values["gap_error"]
    assert values["possible"] == pytest.approx(1.0)
    assert 0 < values["pair_tv"] < 0.2
    apart = Truth.of(
        SMALL["noisy_copy"], 30, 3, draws=500
    ).values  # the same 90 sequences in groups, as points have them
    assert apart["distinct_4"] > values["distinct_4"]


def test_rows_have_seeds_of_their_own_and_the_same_for_every_strategy() -> None:
    seeds = curves.row_seeds(SEEDS, 50)
    assert len(set(seeds)) == 150
    assert curves.row_seeds([1], 50) == seeds[50:100]


# Gates.


def planted(monkeypatch: pytest.MonkeyPatch, sweep: Sweep) -> None:
    monkeypatch.setitem(SWEEPS, "planted", sweep)


@pytest.mark.parametrize(
    "sweep",
    [
        Sweep("llada", "steps", (16,), one_token=16),  # draws before it ranks
        Sweep("confidence", "k", (2,), one_token=2),  # two tokens a step
    ],
)
def test_the_gate_of_exactness_catches_what_is_not(monkeypatch: pytest.MonkeyPatch, sweep: Sweep) -> None:
    planted(monkeypatch, sweep)
    with pytest.raises(GateError, match="one token a step must follow"):
        curve_point(TRUTHS["markov"], SMALL["markov"], "planted", sweep.values[0], SEEDS, 60)


def test_the_gate_of_exactness_catches_impossible_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    source = zoo.parity(6, block=3)
    planted(monkeypatch, Sweep("confidence", "k", (6,), one_token=6))
    with pytest.raises(GateError, match="sequences possible"):
        curve_point(Truth.of(source, 30, draws=200), source, "planted", 6, SEEDS, 10)


@pytest.mark.parametrize("counter", ["nfe", "tokens_fed"])
def test_the_gate_of_counts_catches_a_miscount(monkeypatch: pytest.MonkeyPatch, counter: str) -> None:
    original = cache.WholeCanvas.__call__

    def miscounting(self: Any, state: Any, tokens: Tensor, at: Tensor, window: Tensor) -> Tensor:
        setattr(state, counter, getattr(state, counter) + 1)
        return original(self, state, tokens, at, window)

    monkeypatch.setattr(cache.WholeCanvas, "__call__", miscounting)
    with pytest.raises(GateError, match="the denoiser saw"):
        curve_point(TRUTHS["markov"], SMALL["markov"], "random", 2, SEEDS, 4)


@dataclasses.dataclass(frozen=True)
class LooksAtTheBatch(NoisyOracle):
    """Answers by the number of rows it is asked about."""

    def __call__(self, tokens: Tensor, **options: Any) -> Tensor:
        uniform = 0.9 if len(tokens) > 8 else 0.0
        return NoisyOracle(self.source, 1.0, uniform)(tokens, **options)


def test_the_gate_of_batches_catches_rows_that_see_their_neighbours() -> None:
    denoiser = LooksAtTheBatch(SMALL["markov"])
    with pytest.raises(GateError, match="comes out differently"):
        curve_point(TRUTHS["markov"], denoiser, "random", 2, SEEDS, 8, exact=False)


def test_equal_predictions_tie_exactly_whatever_the_batch() -> None:
    source = zoo.markov(32)
    masked = torch.full((1, 32), source.mask_token_id)
    one, many = Counting(source)(masked), Counting(source)(masked.repeat(50, 1))
    assert torch.equal(many, one.expand_as(many))
    torch.testing.assert_close(one, source(masked), atol=1e-9, rtol=0)


def test_an_overconfident_oracle_writes_too_likely_text() -> None:
    sharp = NoisyOracle(SMALL["markov"], temperature=0.5)
    point = curve_point(TRUTHS["markov"], sharp, "random", 1, SEEDS, 40, exact=False)
    assert point["gap_high"] < 0


# The report.


JUDGES = {"markov": "kl", "parity": "impossible"}


def record(source: str, strategy: str, nfe: float, kl: float | None, possible: float = 1.0) -> dict[str, Any]:
    return {
        "kind": "point",
        "source": source,
        "strategy": strategy,
        "knob": "k",
        "value": nfe,
        "nfe": nfe,
        "kl": kl,
        "possible": possible,
        "entropy": 50.0,
        "judged_by": JUDGES[source],
    }


def test_strategies_are_compared_at_a_budget_and_per_source() -> None:
    records: list[dict[str, Any]] = [
        {"kind": "truth", "source": name, "length": 16, "entropy": 50.0, "judged_by": judge, "excess": 0.0}
        for name, judge in JUDGES.items()
    ]
    records += [record("markov", "a", 2, 9.0), record("markov", "a", 8, 0.5), record("markov", "b", 2, 3.0)]
    records += [record("parity", "a", 2, None, 0.0), record("parity", "a", 8, 0.0, 0.96)]
    points = curve_report.by_curve(records, "markov")
    assert curve_report.error_at(points["a"], 2) == 9.0
    assert curve_report.error_at(points["a"], 16) == 0.5
    assert curve_report.error_at(points["a"], 1) is None
    assert curve_report.tolerance(records[0]) == 1.0
    assert curve_report.cost_of_good(points["a"], 1.0) == 8
    assert curve_report.cost_of_good(points["b"], 1.0) is None
    table = curve_report.as_markdown(records)
    assert "| a | 9.00 | 9.00 | **0.50** | **0.50** | **8.0** |" in table
    assert "| b | **3.00** | **3.00** | 3.00 | 3.00 | – |" in table
    assert "| a | **1.000** | **1.000** | **0.040** | **0.040** | **8.0** |" in table
    assert table.count("###") == 2
    assert "NFE for ≤ 1.50 nats" in table  # 2 % of the entropy above the least error
    assert "NFE for ≤ 9.0%" in table
    assert "above it" not in table
    erring = curve_report.as_markdown([{**records[0], "excess": 0.02, "excess_error": 0.001}, *records[2:]])
    assert "denoiser 0.020 ± 0.001 nats per token above it" in erring
    rounded = curve_report.as_markdown([records[0], record("markov", "a", 2, -1e-10)])
    assert "**0.00**" in rounded
    assert "-0.00" not in rounded


ARGUMENTS = ["--sources", "[markov, parity]", "--strategies", "[random, dus]", "--samples", "4", "--resamples", "5"]


def run(output: Path, *extra: str) -> int:
    return command.main(["curves", "--output", str(output), "--length", "8", *ARGUMENTS, *extra])


def test_the_command_writes_points_tables_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path) == 0
    printed = json.loads(capsys.readouterr().out)
    lines = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    points = [line for line in lines if line["kind"] == "point"]
    assert len(points) == printed["points"] == 2 * (6 + 7)
    assert {"git_commit", "versions", "settings"} <= set(lines[0])
    assert all(point["samples"] == 12 and point["source"] in ("markov", "parity") for point in points)
    assert {"nfe", "tokens_fed", "seconds_per_sample", "gap", "possible", "rare", "pair_tv"} <= set(points[0])
    page = (tmp_path / "curves.html").read_text()
    assert page.count("<tr>") == 2 * (1 + 1 + 13)  # heading, the source itself, points
    assert page.count("<svg") == 2 * 3  # over evaluations, tokens fed and seconds
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl", "").replace(
        "https://matplotlib.org", ""
    ).replace("http://creativecommons.org", "")
    assert "### markov" in (tmp_path / "curves.md").read_text()
    for x in ("", "_tokens_fed", "_seconds_per_sample"):
        assert (tmp_path / f"parity{x}.svg").stat().st_size > 5000


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--plots", "false") == 0
    file = tmp_path / "points.jsonl"
    whole = file.read_text().splitlines(keepends=True)
    file.write_text("".join(whole[:9]) + whole[9][:40])  # stopped while writing
    capsys.readouterr()
    assert run(tmp_path, "--plots", "false") == 1
    assert "--resume true" in capsys.readouterr().err
    assert run(tmp_path, "--plots", "false", "--samples", "5", "--resume", "true") == 1
    assert "other settings" in capsys.readouterr().err
    assert run(tmp_path, "--plots", "false", "--resume", "true") == 0
    capsys.readouterr()

    def kept(lines: list[str]) -> list[dict[str, Any]]:
        records = [json.loads(line) for line in lines]
        return [{**r, "seconds_per_sample": 0} for r in records if r["kind"] != "curves"]

    assert kept(file.read_text().splitlines()) == kept(whole)


def broken(monkeypatch: pytest.MonkeyPatch, gate: str) -> None:
    """A bug that one gate exists for."""
    if gate == "exactness":
        monkeypatch.setitem(SWEEPS, "random", dataclasses.replace(SWEEPS["random"], values=(2,), one_token=2))
        return
    original = cache.WholeCanvas.__call__

    def miscounting(self: Any, state: Any, tokens: Tensor, at: Tensor, window: Tensor) -> Tensor:
        state.nfe = state.nfe + 1
        return original(self, state, tokens, at, window)

    def crowded(self: Any, state: Any, tokens: Tensor, at: Tensor, window: Tensor) -> Tensor:
        answer = original(self, state, tokens, at, window)
        rolled = torch.cat([answer[..., :-1].roll(1, dims=-1), answer[..., -1:]], dim=-1)
        return rolled if len(tokens) > 6 else answer

    monkeypatch.setattr(cache.WholeCanvas, "__call__", miscounting if gate == "counts" else crowded)


@pytest.mark.parametrize("options", [[], ["--noise", "0.3"]], ids=["oracle", "noisy"])
@pytest.mark.parametrize(
    ("gate", "message"),
    [
        ("exactness", "one token a step must follow"),
        ("counts", "the denoiser saw"),
        ("batches", "comes out differently"),
    ],
)
def test_a_run_fails_where_a_gate_does(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    gate: str,
    message: str,
    options: list[str],
) -> None:
    """Also with a model that errs, whose samples show nothing: the oracle is asked first."""
    if gate == "batches":  # where one token a step is tried, its gate would be the first to see it
        monkeypatch.setitem(SWEEPS, "random", dataclasses.replace(SWEEPS["random"], one_token=None))
    broken(monkeypatch, gate)
    assert run(tmp_path, "--strategies", "[random]", "--plots", "false", *options) == 1
    assert message in capsys.readouterr().err
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    assert "truth" in kinds  # what was measured stays


def test_noise_makes_the_run_that_of_a_model_that_errs(tmp_path: Path) -> None:
    assert run(tmp_path, "--noise", "0.5", "--plots", "false", "--sources", "[markov]", "--samples", "40") == 0
    lines = [json.loads(line) for line in (tmp_path / "points.jsonl").read_text().splitlines()]
    (truth,) = (line for line in lines if line["kind"] == "truth")
    assert truth["excess"] > 5 * truth["excess_error"] > 0
    single = [line for line in lines if line.get("one_token")]
    assert single
    for line in single:  # one token a step is as wrong as the predictions are, not exact
        assert line["kl_low"] > 0
        assert abs(line["kl"] - truth["excess"] * 8) < 0.4 * line["kl"] + 0.1
    assert "above it" in (tmp_path / "curves.md").read_text()
    assert lines[0]["settings"]["noise"] == 0.5


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--noise", "-1"], "noise is -1"),
        (["--model", "nowhere"], "one source"),
        (["--model", "nowhere", "--sources", "[markov]"], "no such folder"),
        (["--sources", "[]"], "name one source"),
        (["--strategies", "[]"], "one strategy or more"),
        (["--sources", "[markof]"], "did you mean 'markov'"),
        (["--strategies", "[clad]"], "no sweep is defined for clad"),
        (["--samples", "1"], "2 or more samples"),
        (["--seeds", "[1, 1]"], "different seeds"),
        (["--temperature", "0"], "temperature is 0"),
        (["--length", "7", "--sources", "[noisy_copy]"], "even length"),
    ],
)
def test_bad_input_is_one_line_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: list[str], message: str
) -> None:
    assert run(tmp_path / "out", *extra) == 1
    error = capsys.readouterr().err
    assert error.startswith("mdlm eval curves: ")
    assert message in error


def test_a_file_that_is_not_of_points_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "points.jsonl").write_text("no JSON\n")
    assert run(tmp_path, "--resume", "true") == 1
    assert "points.jsonl was not written by this command" in capsys.readouterr().err
    assert (tmp_path / "points.jsonl").read_text() == "no JSON\n"
