"""`benchmarks/gpu.py` on a CPU at toy size: each part runs, what cannot be says so, an error costs one line."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
import gpu
import gpu_parts
import lines
import page

CPU = torch.device("cpu")
FOREVER = time.monotonic() + 1e9


def _case(**wanted: Any) -> dict[str, Any]:
    """The first case with these items."""
    return next(case for case in gpu.cases("CPU", True) if lines.holds(case, wanted))


def test_documents_fill_the_row() -> None:
    assert gpu_parts.document_lengths(64, 32) == [32, 8, 2, 22]
    full = gpu_parts.document_lengths(16384, 4096)
    assert sum(full) == 16384
    assert set(full[:6]) == {4096, 1024, 256}


def test_attention_keeps_documents_apart() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 10, 2, 4, dtype=torch.float64)
    attend = gpu_parts.Machine(CPU, gpu_parts.TOY).attend("sdpa", [6, 1, 3])
    parts = []
    for start, end in ((0, 6), (6, 7), (7, 10)):
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key[start:end]) / 2
        parts.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[start:end]))
    assert torch.allclose(attend(query, key, value), torch.cat(parts))


@pytest.mark.gpu
@pytest.mark.parametrize("name", gpu_parts.ATTENTION)
def test_every_attention_says_what_sdpa_says(name: str) -> None:
    machine = gpu_parts.Machine(torch.device("cuda"), gpu_parts.TOY)
    try:
        found = machine.attention({"implementation": name})
    except gpu_parts.Skip as reason:
        pytest.skip(str(reason))
    assert found["difference_from_sdpa"] < 0.05


def test_each_part_is_measured_and_reported(tmp_path: Path) -> None:
    machine = gpu_parts.Machine(CPU, gpu_parts.TOY)
    chosen = [
        _case(measurement="attention", implementation="sdpa"),
        _case(measurement="attention", implementation="flash_attn"),
        _case(measurement="train", compiled=False),
        {**_case(measurement="train", compiled=False), "packed": True, "fused_head": False},
        _case(measurement="train", attention="flash_attention_2"),
        *(case for case in gpu.cases("CPU", True, ["sampling"]) if case["batch"] == 2),
    ]
    path = tmp_path / "gpu.jsonl"
    lines.measure_missing(path, chosen, lambda case: gpu.measure(machine, case, FOREVER))
    found = lines.measured(path)
    sdpa, flash, step, packed, flash_step, *caches = found
    assert sdpa["difference_from_sdpa"] == 0
    assert "CUDA" in flash["skipped"] or "flash-attn" in flash["skipped"]
    assert "skipped" in flash_step
    # 2 layers of projections, MLP and attention to as many keys as a document holds, half the head; times 2, times 3
    for line, keys in ((step, 32), (packed, (16**2 + 4**2 + 1 + 11**2) / 32)):
        a_token = 6 * (2 * (4 * 32**2 + 3 * 32 * 128 + 2 * 32 * keys) + 32 * 128 / 2)
        assert line["mfu"] * line["seconds"] * line["matmul_peak_flops"] == pytest.approx(64 * a_token)
    assert packed["tokens_per_s"] == pytest.approx(64 / packed["seconds"])
    assert [line["cache"] for line in caches] == ["plain loop", *gpu_parts.CACHES]
    fed = {line["cache"]: line.get("tokens_fed") for line in caches}
    assert fed["none"] == 8 * 16
    assert fed["dual"] == 2 * (16 + 3 * 4)
    assert all(line["forwards"] == 8 for line in caches[1:])
    report = gpu.report(found)
    assert report.count("skipped: ") == 2
    for table in report.split("\n\n")[1:]:
        assert len({line.count("|") for line in table.split("\n")}) == 1
    assert f"CPU: yes, {sum(line.get('wall_s', 0) for line in found):.0f} s" == page._gpu_reached(found)


def test_an_error_or_a_lack_of_time_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: gpu_parts.Machine, case: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("no kernel\nfor this | device")

    monkeypatch.setattr(gpu_parts.Machine, "attention", broken)
    path = tmp_path / "gpu.jsonl"
    command = [f"--file={path}", "--toy", "--only", "attention"]
    assert gpu.main([*command, "--seconds=-1"]) == 0
    assert all("no time was left" in line["skipped"] for line in lines.measured(path))
    assert gpu.main(command) == 1
    assert "4 cases failed" in capsys.readouterr().err
    report = gpu.report(lines.measured(path))
    assert report.count("failed: RuntimeError: no kernel for this / device") == 4
    assert "skipped" not in report, "it has been tried again"


def test_without_a_gpu_only_the_toy_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert gpu.main([f"--file={tmp_path / 'gpu.jsonl'}"]) == 1
    assert "--toy" in capsys.readouterr().err


def test_the_shapes_are_what_they_are_called() -> None:
    with torch.device("meta"):
        for name, least, most in (("100M", 1.0e8, 1.2e8), ("1B", 1.0e9, 1.2e9)):
            model = gpu_parts.MDLMForMaskedLM(gpu_parts.FULL.shapes[name].config())
            assert least < sum(weight.numel() for weight in model.parameters()) < most
        large = gpu_parts.MDLMForMaskedLM(gpu_parts.FULL.large.config())
    # LLaDA-8B: 32 layers of 4 * 4096^2 + 3 * 4096 * 12288 and two norms, embedding and head of 126464 rows
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 12288 + 2 * 4096)
    assert sum(weight.numel() for weight in large.parameters()) == layers + 4096 + 2 * 126464 * 4096


@pytest.mark.slow
def test_the_whole_script_runs_at_toy_size(tmp_path: Path) -> None:
    """Compiled steps too."""
    path = tmp_path / "gpu.jsonl"
    assert gpu.main(["--toy", f"--file={path}"]) == 0
    found = lines.measured(path)
    assert len(found) == len(list(gpu.cases("CPU", True)))
    assert any(line.get("compiled") and line["tokens_per_s"] > 0 for line in found if lines.measures(line))
