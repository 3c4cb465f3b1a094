"""The sampling benchmark measures the same work on both sides, and every strategy it can run."""

from __future__ import annotations

import json

import pytest
import torch

from mdlm.eval.speed_sampling import main, overhead, plain_loop, random_model, random_prompts, tokens
from mdlm.samplers.generate import generate

SIZES = {"vocab": 64, "layers": 2, "width": 64, "prompt": 5, "new_tokens": 8, "block": 4, "batch": 2, "rounds": 1}


def test_the_plain_loop_writes_what_our_sampler_writes() -> None:
    model, prompts = random_model(64, 2, 64, 13), random_prompts(2, 5, 64)
    ours = generate(model, None, prompts, strategy="confidence", block_length=4, max_new_tokens=8, eos="ignore")
    assert torch.equal(plain_loop(model, prompts, 8, 4), torch.stack(ours.tokens))


def test_tokens_reports_every_cache_at_both_batch_sizes() -> None:
    result = tokens(**SIZES)
    names = {f"{cache} x{rows}" for cache in ("none", "prefix", "dual") for rows in (1, 2)}
    assert set(result["tokens_per_s"]) == {"plain", *names}
    assert all(rate > 0 for rate in result["tokens_per_s"].values())
    rates = result["tokens_per_s"]
    assert result["ratio_to_plain"]["dual"] == pytest.approx(rates["dual x1"] / rates["plain"])
    assert result["batch_gain"]["none"] == pytest.approx(rates["none x2"] / rates["none x1"])


def test_tokens_refuses_what_the_plain_loop_cannot_do() -> None:
    with pytest.raises(ValueError, match="new_tokens=9 is not a multiple of block=4"):
        tokens(**{**SIZES, "new_tokens": 9})


def test_overhead_is_a_share_of_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ["--strategies=[threshold,ancestral,clad]", "--steps=2", "--block=4", "--prompt=5", "--new_tokens=8"]
    assert main(["overhead", *chosen, "--vocab=64", "--layers=2", "--width=64", "--rounds=1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["share"]) == {"threshold", "ancestral", "clad"}
    assert all(0 < share < 1 for share in result["share"].values())
    assert result["machine"]["cpus"] >= 1


def test_overhead_runs_every_strategy_that_is_not_speculative() -> None:
    result = overhead(vocab=64, layers=1, width=64, prompt=5, new_tokens=16, block=8, steps=1, rounds=1)
    assert {"threshold", "llada", "fast_dllm", "eb"} < set(result["share"])
    assert not {"freedave", "lopa"} & set(result["share"])
