"""The emulated slow network: pure parts everywhere, the network itself where namespaces are allowed (root on Linux)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from training_runs import write_texts

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import island_runs
import network as net
import slow_network as bench

_problem = net.unavailable()
needs_network = pytest.mark.skipif(_problem is not None, reason=f"no emulated network: {_problem}")
SCRIPT = Path(bench.__file__)


def left_over() -> list[str]:
    """Names of namespaces and interfaces that exist because of the benchmark."""
    found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in [*found, *os.listdir("/sys/class/net")] if name.startswith(net.PREFIX)]


def test_a_target_is_reached_where_the_curve_crosses_it() -> None:
    curve = [[10, 2.0, 1.0, 3.0], [20, 4.0, 3.0, 2.0], [30, 6.0, 9.0, 2.5], [40, 8.0, 10.0, 1.0]]
    assert bench.reach(curve, 2.25) == pytest.approx((17.5, 3.5, 2.5))
    assert bench.reach(curve, 3.5) == (10, 2.0, 1.0)
    assert bench.reach(curve, 0.5) is None


def _row(method: str, seed: int, seconds: float, mbit: float | None = 100.0, target: float | None = 2.0) -> dict:
    case = bench.Case(4, mbit, method, 1e-3, seed, 20, target)
    curve = [[10, seconds / 2, 5.0, 3.0], [20, seconds, 10.0, 2.0]]
    return {"key": case.key, **case.__dict__, "curve": curve, "measured_mbit": [95.0] * 4, "load": 0.0}


def test_speed_up_is_the_ratio_of_median_times_and_failures_are_counted() -> None:
    rows = [_row("ddp", s, t) for s, t in ((0, 100.0), (1, 90.0), (2, 300.0))]
    rows += [_row("ddp_bf16", 0, 50.0)]
    rows += [_row("other", s, t) for s, t in ((0, 20.0), (1, 30.0))]
    rows += [{**_row("other", 2, 1.0), "curve": [[20, 1.0, 1.0, 2.5]]}]  # did not reach 2.0
    base, _, other = bench.summarise(rows)
    assert (base["seconds"], base["fastest"], base["slowest"], base["over_ddp"]) == (100.0, 90.0, 300.0, 1.0)
    assert (other["seconds"], other["reached"], other["seeds"]) == (25.0, 2, 3)
    assert (other["over_ddp"], other["over_ddp_bf16"]) == (4.0, 2.0)
    assert other["mb_per_step"] == 0.5
    assert bench.summarise([_row("ddp", 0, 1.0, target=None)]) == []  # tuning runs are not measurements


def test_a_run_is_made_once_and_a_half_written_line_is_made_again(tmp_path: Path) -> None:
    results = bench.Results(tmp_path / "results.jsonl")
    results.add({"key": "a"})
    with results.path.open("a") as file:
        file.write('{"key": "b", "cur')
    again = bench.Results(results.path)
    assert again.find("a") == {"key": "a"}
    assert again.find("b") is None
    again.add({"key": "c"})
    assert bench.Results(results.path).find("c") == {"key": "c"}


def test_the_estimate_is_steps_times_computation_and_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bench.METHODS, "sum", island_runs.Method({}, bits=32))
    monkeypatch.setitem(bench.METHODS, "hidden", island_runs.Method({}, bits=32, every=10, overlapped=True))
    exchange = 2 * bench.PARAMETERS * 32 * 0.75 / 95e6
    case = bench.Case(4, 100.0, "sum", 1e-3, 0, 50, None)
    assert bench.estimate([case, case], 0.16) == pytest.approx(2 * (50 * (0.16 + exchange) + 25))
    hidden = bench.Case(4, 100.0, "hidden", 1e-3, 0, 50, None)
    assert bench.estimate([hidden], 0.16) == pytest.approx(50 * max(0.16, exchange / 10) + 25)


@needs_network
def test_a_link_carries_no_more_than_was_asked_for_and_nothing_is_left() -> None:
    with net.only_one(), net.Network(2, 50.0) as network:
        before = network.sent_bytes(0)
        rates = network.measure(seconds=0.5)
        sent = network.sent_bytes(0) - before
        assert len(left_over()) >= 5
        with pytest.raises(RuntimeError, match="stop it first"), net.only_one():
            pass
    assert all(0 < rate <= 1.02 * 50 for rate in rates)  # how much less depends on what else the machine does
    payload = 50e6 / 8 * 0.5 // 65536 * 65536
    assert payload <= sent <= 1.06 * payload
    assert left_over() == []


def test_a_link_of_another_rate_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    network = net.Network(2, 50.0)
    for measured in ([47.0, 30.0], [47.0, 60.0]):
        monkeypatch.setattr(network, "measure", lambda seconds, measured=measured: measured)
        with pytest.raises(RuntimeError, match=r"shaped to 50\.0 Mbit/s"):
            network.verified()


@needs_network
def test_ctrl_c_and_sigterm_take_the_network_down_and_clean_does_after_a_kill() -> None:
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1]); import network as net\n"
        "with net.only_one(), net.stoppable(), net.Network(2, 10.0) as n:\n"
        "    n.start(0, ['sleep', '600'])\n"
        "    print('up', flush=True); time.sleep(600)\n"
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(SCRIPT.parent)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        process.communicate(timeout=60)
        if number == signal.SIGKILL:
            assert left_over()
            done = subprocess.run([sys.executable, str(SCRIPT), "clean"], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            assert "mdlmnet0" in done.stdout
        for _ in range(100):  # the kernel takes down interfaces of a removed namespace in its own time
            if not left_over():
                break
            time.sleep(0.05)
        assert left_over() == []


@needs_network
@pytest.mark.slow
@pytest.mark.parametrize(("method", "exchanges"), [("ddp_bf16", 40.0), ("streaming_int4", 2.75)])
def test_two_islands_on_a_slow_link_send_what_the_formula_says(
    method: str, exchanges: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training processes in their namespaces, for seconds: 2 N bits (1 - 1 / islands) per exchange of N values.

    Streaming: two rounds, and at the end once more the three fragments of four that have begun another.
    """
    write_texts(tmp_path / "texts")
    small = {"data.source": tmp_path / "texts", "data.validation_rows": 8, "tokenizer.vocab_size": 270}
    monkeypatch.setattr(island_runs, "BASE", {**island_runs.BASE, **small, "data.seq_len": 24})
    with net.only_one():
        start = island_runs.prepare(tmp_path / "start", 2)
        case = bench.Case(2, 100.0, method, 1e-3, 0, 40, None)
        found = island_runs.measure(case, start, tmp_path / "logs", 20)
    assert [point[0] for point in found["curve"]] == [20, 40]
    assert found["curve"][0][1] < found["curve"][1][1]
    values = sum(t.numel() for t in load_file(start / "model.safetensors").values())
    expected = 2 * values * bench.METHODS[method].bits / 8 * exchanges / 2 / 1e6
    assert 0.97 * expected < found["curve"][-1][2] < 1.15 * expected
    assert left_over() == []
