"""The wall-clock model against published tables, measured runs, simulation and its own limits; and `mdlm plan`."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from mdlm.training import plan as plan_module
from mdlm.training.compress import codec
from mdlm.training.netsim import (
    DATA_PARALLEL,
    REALISTIC,
    SCENARIOS,
    Method,
    Setting,
    bandwidth_for,
    bits_per_value,
    forecast,
    largest_of,
    method_of,
)
from mdlm.training.outer_config import PRESETS
from mdlm.training.plan import amount, duration, main

TARGETS = (0.5, 0.8, 0.9, 0.95, 0.99)
# Streaming DiLoCo (2501.18512): Gbit/s needed for a utilisation of 50, 80, 90, 95, 99 %; H = 100, 3 layers per fragment
TABLE = {
    (1e9, 24, 0.1): {
        "data parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
        "diloco": (1.4, 6.2, 13.3, 23.3, 86.8),
        "streaming": (1.4, 5.2, 9.1, 16.0, 28.1),
        "overlap": (1.4, 4.3, 6.2, 9.1, 11.0),
        "fp4": (0.4, 0.9, 1.7, 2.0, 3.0),
    },
    (1e10, 48, 0.8): {
        "data parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
        "diloco": (1.7, 7.5, 16.0, 33.9, 104.8),
        "streaming": (1.7, 5.2, 9.1, 13.3, 19.3),
        "overlap": (1.7, 3.6, 5.2, 6.2, 7.5),
        "fp4": (0.4, 0.9, 1.4, 1.4, 1.7),
    },
    (1e11, 108, 4.9): {
        "data parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
        "diloco": (3.0, 11.0, 23.3, 49.4, 184.2),
        "streaming": (2.4, 6.2, 9.1, 11.0, 19.3),
        "overlap": (1.7, 3.6, 4.3, 5.2, 5.2),
        "fp4": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}


def published(layers: int, kind: str) -> Method:
    hidden: Any = 2 / 3
    route: Any = "paper"
    return {
        "data parallel": Method("", 1, 1, 0, 16, hidden, route),
        "diloco": Method("", 100, 1, 0, 16, hidden, route),
        "streaming": Method("", 100, layers // 3, 0, 16, hidden, route),
        "overlap": Method("", 100, layers // 3, 1, 16, hidden, route),
        "fp4": Method("", 100, layers // 3, 1, 4, hidden, route),
    }[kind]


def ideal(parameters: float, layers: int, seconds: float) -> Setting:
    return Setting(parameters, 2, layers=layers, step_seconds=seconds, overhead=1.0, rtt=0.0)


def test_the_utilisation_table_of_streaming_diloco() -> None:
    """75 cells within a factor of 1.21, one step of the paper's grid of bandwidths; one of them within 1.5."""
    cells, far = 0, []
    for (parameters, layers, seconds), rows in TABLE.items():
        for kind, needed in rows.items():
            for target, gbit in zip(TARGETS, needed):
                got = bandwidth_for(ideal(parameters, layers, seconds), published(layers, kind), target) / 1e9
                cells += 1
                if max(got / gbit, gbit / got) > 1.21:
                    far.append((parameters, kind, target, max(got / gbit, gbit / got)))
    assert cells == 75
    assert [cell[:3] for cell in far] == [(1e11, "streaming", 0.99)]
    assert far[0][3] < 1.5


# 1.8137 M parameters on two cores, links shaped by tc: (islands, Mbit/s, step), then per method seconds per step
SMALL = 1_813_696
DDP = Method("ddp", bits=32, route="ring")
DILOCO = Method("diloco", 20, bits=32)
INT8 = Method("int8", 20, bits=8.25)
STREAMING4 = Method("streaming", 20, 4, 2, 4.25)
MEASURED = [
    (4, 100, 0.157, DDP, 1.080),
    (4, 100, 0.157, DILOCO, 0.220),
    (4, 100, 0.157, INT8, 0.174),
    (4, 100, 0.157, dataclasses.replace(STREAMING4, bits=8.25), 0.161),
    (4, 100, 0.157, STREAMING4, 0.166),
    (2, 20, 0.070, DDP, 3.33),
    (2, 20, 0.070, DILOCO, 0.241),
    (2, 20, 0.070, STREAMING4, 0.070),
    # to a validation loss of 2.6: seconds / steps
    (4, 100, 0.157, DDP, 216 / 200),
    (4, 100, 0.157, DILOCO, 103 / 440),
    (4, 100, 0.157, INT8, 79 / 420),
    (4, 100, 0.157, dataclasses.replace(INT8, every=60), 86 / 480),
    (4, 100, 0.157, STREAMING4, 56 / 340),
]


@pytest.mark.parametrize(("islands", "mbit", "seconds", "method", "measured"), MEASURED)
def test_measured_runs_within_20_percent(
    islands: int, mbit: float, seconds: float, method: Method, measured: float
) -> None:
    s = Setting(SMALL, islands, 1, 4, step_seconds=seconds, up=1e6 * mbit, rtt=5e-5, overhead=1.046)
    assert forecast(s, method, 1e6).step_seconds == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(("method", "per_step"), [(DDP, 10.916e6), (INT8, 0.1410e6), (STREAMING4, 0.0739e6)])
def test_measured_bytes_within_5_percent(method: Method, per_step: float) -> None:
    s = Setting(SMALL, 4, 1, 4, step_seconds=0.157)
    assert forecast(s, method, 1e6).bytes_per_step == pytest.approx(per_step, rel=0.05)


@pytest.mark.parametrize("parameters", [1.3e8, 1e9, 7e9])
def test_expected_utilisations_at_one_gbit(parameters: float) -> None:
    """Eight H100 at 40 %, half a million tokens per step, eight islands; the parameters cancel."""
    s = Setting(parameters, 8, 8, tokens_per_step=5e5, flops=4e14, up=1e9, rtt=0.0)
    got = [
        forecast(s, m, 1e9).utilisation
        for m in (Method("", 1, bits=16), Method("", 100, bits=32), Method("", 100, bits=8), Method("", 100, 8, 2, 4))
    ]
    assert got == pytest.approx([0.033, 0.63, 0.87, 1.0], abs=0.02)


def test_400_times_fewer_bytes_and_the_runs_of_covenant() -> None:
    s = SCENARIOS["sites"]
    dense = forecast(s, DATA_PARALLEL, 1e9)
    sparse = forecast(s, Method("", 100, bits=4), 1e9)
    assert dense.bytes_per_step / sparse.bytes_per_step == pytest.approx(400)
    # Covenant-72B: 20 minutes of computing, 70 seconds of exchange
    there = Setting(72.7e9, 2, step_seconds=40.0, up=228e6, rtt=0, overhead=1.0)
    assert forecast(there, Method("", 30, bits=0.219, route="paper"), 1e9).utilisation == pytest.approx(0.945, abs=5e-3)


# Limits -------------------------------------------------------------------------------------------------------------


def test_one_island_and_an_endless_link_are_pure_computing() -> None:
    s = SCENARIOS["homes"]
    alone = forecast(dataclasses.replace(s, islands=1), DATA_PARALLEL, 1e9)
    assert (alone.utilisation, alone.bytes_per_round) == (1.0, 0.0)
    fast = dataclasses.replace(s, up=1e18, down=None, rtt=0.0)
    assert forecast(fast, Method("", 10, bits=32), 1e9).utilisation == pytest.approx(1.0, abs=1e-6)
    steps = 1e9 / (s.tokens_per_step * s.islands)
    assert forecast(fast, Method("", 10, bits=32), 1e9).hours == pytest.approx(steps * s.seconds / 3600, rel=1e-6)


def test_the_link_limits_even_what_is_fully_overlapped() -> None:
    """An exchange that takes longer than a round cannot be hidden, however long it may take: they queue."""
    s = Setting(1e9, 2, step_seconds=1.0, up=1e8, rtt=0.0, overhead=1.0)
    for fragments in (1, 5):
        f = forecast(s, Method("", 10, fragments, 10, 16), 1e9)
        assert f.exchange_seconds == pytest.approx(160 / fragments)
        assert f.utilisation == pytest.approx(10 / 160)


def test_utilisation_grows_with_the_link_and_with_every_saving() -> None:
    s = dataclasses.replace(SCENARIOS["sites"], up=2e8)
    base = Method("", 50, 4, 1, 16)
    better = [
        (dataclasses.replace(s, up=4e8), base),
        (dataclasses.replace(s, rtt=0.0), base),
        (s, dataclasses.replace(base, every=100)),
        (s, dataclasses.replace(base, bits=4.25)),
        (s, dataclasses.replace(base, tau=3)),
    ]
    reference = forecast(s, base, 1e9)
    assert all(forecast(*case, 1e9).utilisation > reference.utilisation for case in better)
    assert reference.realistic_utilisation < reference.utilisation
    assert reference.realistic_hours > reference.hours


def test_the_slower_direction_and_the_number_of_tcp_streams_limit_the_rate() -> None:
    s = Setting(1e9, 2, up=2e7, down=1e8)
    assert s.rate == 2e7
    long_and_fat = Setting(1e9, 2, up=1e10, stream_rate=1.2e8)
    assert long_and_fat.rate == 1.2e8
    assert dataclasses.replace(long_and_fat, streams=8).rate == pytest.approx(9.6e8)


def test_bandwidth_for_a_target_reaches_it_and_latency_can_forbid_it() -> None:
    s, m = SCENARIOS["sites"], Method("", 100, bits=8.25)
    rate = bandwidth_for(s, m, 0.9)
    assert forecast(dataclasses.replace(s, up=rate), m, 1e9).utilisation == pytest.approx(0.9, rel=1e-6)
    assert bandwidth_for(dataclasses.replace(s, rtt=10.0), DATA_PARALLEL, 0.9) == math.inf
    with pytest.raises(ValueError, match="utilisation"):
        bandwidth_for(s, m, 1.0)


def test_the_largest_of_normals_and_stragglers_against_simulation() -> None:
    assert largest_of(2)[0] == pytest.approx(1 / math.sqrt(math.pi), abs=1e-3)
    assert largest_of(2)[1] == pytest.approx(math.sqrt(1 - 1 / math.pi), abs=1e-3)
    assert largest_of(100_000)[0] == pytest.approx(4.38, abs=0.02)
    rng = random.Random(0)
    islands, accelerators, every, spread, rounds = 4, 3, 10, 0.1, 3000
    total = 0.0
    for _ in range(rounds):
        total += max(
            sum(max(rng.gauss(1, spread) for _ in range(accelerators)) for _ in range(every)) for _ in range(islands)
        )
    s = Setting(1e6, islands, accelerators, step_seconds=1.0, up=1e18, rtt=0, straggler=spread)
    assert forecast(s, Method("", every), 1e6).straggling == pytest.approx(total / rounds / every, rel=0.01)
    assert forecast(s, Method("", 100), 1e6).straggling < forecast(s, Method("", 1), 1e6).straggling


def test_failures_against_simulation_and_elastic_islands_lose_less() -> None:
    s = Setting(1e9, 8, 100, step_seconds=1.0, up=1e18, rtt=0, mtbf_hours=2000.0, restart_seconds=300.0)
    m = Method("", 100)
    rng, clock, useful = random.Random(1), 0.0, 0.0
    rate = 800 / (2000 * 3600)
    for _ in range(4000):
        work = rng.expovariate(rate)
        clock += work + 300 + 900
        useful += work
    assert forecast(s, m, 1e9).goodput == pytest.approx(useful / clock, rel=0.02)
    assert forecast(dataclasses.replace(s, elastic=True), m, 1e9).goodput > 0.99 > forecast(s, m, 1e9).goodput


def test_numbers_out_of_range_are_refused() -> None:
    for wrong in ({"islands": 0}, {"up": -1.0}, {"rtt": -1.0}, {"mtbf_hours": 0.0}, {"step_seconds": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            dataclasses.replace(SCENARIOS["sites"], **wrong)


# Presets and the command --------------------------------------------------------------------------------------------


def test_bits_of_the_presets_are_those_of_their_codecs() -> None:
    s = SCENARIOS["sites"]
    bits = {name: bits_per_value(config, s) for name, config in PRESETS.items()}
    assert bits["diloco"] == 32 and bits["streaming"] == 4.25 and bits["noloco"] == 64  # noqa: PT018
    c = PRESETS["sparse_loco"].compress
    assert bits["sparse_loco"] == 8 * codec("topk", c).wire_bytes(4096 * 1024) / (4096 * 1024)
    assert 0 < bits["diloco_x"] < 4.25
    assert method_of("eager", PRESETS["eager"], s).tau == 30


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_every_scenario_from_laptops_to_a_hundred_thousand_accelerators(
    scenario: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--scenario", scenario, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["method"] for row in rows] == ["data parallel, bf16", *(name for name in PRESETS if name != "gpa")]
    for row in rows:
        assert 0 < row["realistic_utilisation"] <= row["utilisation"] <= 1
        assert 0 < row["goodput"] <= 1 <= row["straggling"]
        assert 0 < row["hours"] <= row["realistic_hours"] < math.inf
        assert row is rows[0] or row["bytes_per_step"] < rows[0]["bytes_per_step"]
    assert scenario != "planet" or rows[0]["setting"]["islands"] * rows[0]["setting"]["accelerators"] == 100_000


def test_plan_prints_a_table_with_the_users_own_method(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--parameters 2e8 --islands 3 --mbit 50 --step_seconds 2 --every 40 --fragments 4 --tau 2 --bits 4.25"
    assert main(command.split()) == 0
    out = capsys.readouterr().out
    assert "200 M parameters, 3 islands" in out
    assert "your own" in out
    assert f"{REALISTIC} times" in out


def test_plan_refuses_what_makes_no_sense(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--every", "10", "--fragments", "11"]) == 1
    assert "--fragments 11" in capsys.readouterr().err
    assert main(["--islands", "0"]) == 1
    with pytest.raises(SystemExit):
        main(["--isands", "3"])


def test_plan_draws_a_picture_where_matplotlib_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.png"
    monkeypatch.setattr(plan_module, "print_json", lambda *_: None)
    pytest.importorskip("matplotlib")
    assert main(["--json", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_units() -> None:
    assert [amount(x, "B") for x in (0, 3, 2.5e6, 1e17)] == ["0 B", "3 B", "2.5 MB", "100 PB"]
    assert [duration(h) for h in (0.01, 0.5, 5, 100)] == ["36 s", "30 min", "5 h", "4.17 days"]
