"""Denoisers that err: noisy oracles by their formula, models trained on a source, and how much each errs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from training_runs import fresh_accelerate

from mdlm.config import MDLMConfig
from mdlm.eval import __main__ as command
from mdlm.eval import sources_zoo as zoo
from mdlm.eval.sources_noisy import NoisyOracle, canvas_noise, excess_nats
from mdlm.eval.sources_text import SYMBOLS, SourceModel, as_lines, symbol_tokenizer
from mdlm.modeling import MDLMForMaskedLM
from mdlm.training import layer_b as command_b

SOURCE = zoo.markov(10, vocab=4)


def states(seed: int = 0, rows: int = 5) -> torch.Tensor:
    x = SOURCE.sample(rows, torch.Generator().manual_seed(seed))
    return x.masked_fill(torch.rand(x.shape, generator=torch.Generator().manual_seed(seed + 1)) < 0.5, 4)


def test_the_noisy_oracle_is_the_formula() -> None:
    state = states()
    exact = SOURCE(state).exp()[..., :4]
    torch.testing.assert_close(NoisyOracle(SOURCE)(state).exp()[..., :4], exact)
    got = NoisyOracle(SOURCE, temperature=0.5, uniform=0.2)(state)
    sharp = exact**2 / (exact**2).sum(-1, keepdim=True)
    torch.testing.assert_close(got.exp()[..., :4], 0.8 * sharp + 0.2 / 4)
    assert bool((got[..., 4] == -math.inf).all())
    every = torch.ones_like(state, dtype=torch.bool)
    z = canvas_noise(state, every, 4, 0).view(5, 10, 4)
    tilted = exact * (0.7 * z).exp()
    expected = tilted / tilted.sum(-1, keepdim=True)
    torch.testing.assert_close(NoisyOracle(SOURCE, noise=0.7)(state).exp()[..., :4], expected)
    both = NoisyOracle(SOURCE, temperature=2.0, noise=0.7, uniform=0.1)(state).exp()[..., :4]
    flat = exact**0.5 * (0.7 * z).exp()
    torch.testing.assert_close(both, 0.9 * flat / flat.sum(-1, keepdim=True) + 0.1 / 4)


def test_values_out_of_range_are_named() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"temperature": 0.0}, "temperature"),
        ({"uniform": 1.5}, "uniform"),
        ({"noise": -0.1}, "noise"),
        ({"noise": math.inf}, "noise"),
    ]
    for options, message in wrong:
        with pytest.raises(ValueError, match=message):
            NoisyOracle(SOURCE, **options)


def test_noise_belongs_to_a_canvas_and_not_to_the_batch() -> None:
    """A canvas is judged alike whenever it comes up; one token more, and every judgement is new."""
    noisy, state = NoisyOracle(SOURCE, noise=1.0), states(3, 6)
    whole = noisy(state)
    at = torch.rand(state.shape, generator=torch.Generator().manual_seed(9)) < 0.5
    torch.testing.assert_close(noisy(state, at=at), whole[at])
    torch.testing.assert_close(noisy(state.flip(0)), whole.flip(0))
    torch.testing.assert_close(noisy(state[2:3]), whole[2:3])
    every = torch.ones(1, 10, dtype=torch.bool)
    blank = torch.full((1, 10), 4)
    one = blank.clone()
    one[0, 0] = 2
    a, b, other_seed = (
        canvas_noise(*what) for what in ((blank, every, 4, 0), (one, every, 4, 0), (blank, every, 4, 1))
    )
    assert not bool((a == b).any())
    assert not bool((a == other_seed).any())
    swapped = torch.tensor([[1, 2] + [4] * 8]), torch.tensor([[2, 1] + [4] * 8])
    assert not torch.equal(canvas_noise(swapped[0], every, 4, 0), canvas_noise(swapped[1], every, 4, 0))


def test_noise_is_standard_normal() -> None:
    x = torch.randint(0, 5, (500, 10), generator=torch.Generator().manual_seed(1))
    z = canvas_noise(x, torch.ones_like(x, dtype=torch.bool), 4, 7).flatten()
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-3


def test_what_is_impossible_stays_so_under_noise() -> None:
    source = zoo.parity(6, block=3)
    state = torch.tensor([[1, 0, 2, 2, 2, 2]])
    assert float(NoisyOracle(source, noise=2.0)(state)[0, 2, 0]) == -math.inf


def test_the_excess_is_the_divergence_of_the_predictions() -> None:
    assert excess_nats(SOURCE, SOURCE) == (0.0, 0.0)
    source = zoo.markov(1, vocab=4)  # one symbol: the NELBO is the cross-entropy with p
    noisy = NoisyOracle(source, temperature=0.5, uniform=0.1)
    blank = torch.tensor([[4]])
    p, q = source(blank)[0, 0, :4].exp(), noisy(blank)[0, 0, :4].exp()
    excess, error = excess_nats(source, noisy, sequences=4000, samples=1)
    assert abs(excess - float((p * (p / q).log()).sum())) < 4 * error < 0.1
    more = [excess_nats(SOURCE, NoisyOracle(SOURCE, noise=sigma))[0] for sigma in (0.2, 0.5, 1.0)]
    assert 0 < more[0] < more[1] < more[2]


# Layer B.


def test_text_and_symbols_are_one_to_one() -> None:
    source = zoo.json_objects(12)
    x = source.sample(20, torch.Generator().manual_seed(0))
    tokenizer = symbol_tokenizer(source)
    lines = as_lines(source, x)
    ids = tokenizer(lines, add_special_tokens=False)["input_ids"]
    assert torch.equal(torch.tensor(ids) - 3, x)
    assert tokenizer.decode(ids[0]) == lines[0]
    assert len(set(SYMBOLS)) == len(SYMBOLS)
    with pytest.raises(ValueError, match="cannot be written"):
        as_lines(zoo.markov(4, vocab=80), torch.zeros(1, 4, dtype=torch.int64))


def untrained(source: Any, length: int) -> SourceModel:
    torch.manual_seed(0)
    tokenizer = symbol_tokenizer(source)
    ids = {"mask_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    config = MDLMConfig(
        vocab_size=64,
        num_tokens=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=length,
        initializer_range=0.5,
        **ids,
    )
    return SourceModel(MDLMForMaskedLM(config).eval(), tokenizer, source)


def test_a_model_in_the_oracles_place_speaks_of_symbols() -> None:
    model = untrained(SOURCE, 11)
    state = states(4)
    whole = model(state)
    assert whole.shape == (5, 10, 5)
    torch.testing.assert_close(whole[..., :4].exp().sum(-1), torch.ones(5, 10))
    assert bool((whole[..., 4] == -math.inf).all())
    at = state == 4
    torch.testing.assert_close(model(state, at=at), whole[at])
    inputs = torch.cat([torch.where(at, 0, state + 3), torch.full((5, 1), 2)], dim=1)
    logits = model.model(inputs).logits[:, :10, 3:7]
    torch.testing.assert_close(whole[..., :4], logits.log_softmax(-1))
    with pytest.raises(ValueError, match="no padding"):
        model(state, attention_mask=torch.zeros(5, 10, dtype=torch.bool))


def test_a_model_of_another_source_is_refused() -> None:
    model = untrained(SOURCE, 11)
    with pytest.raises(ValueError, match="no token for e, f"):
        SourceModel(model.model, model.tokenizer, zoo.markov(10, vocab=6))
    with pytest.raises(ValueError, match=r"longer than the model takes \(11\)"):
        SourceModel(model.model, model.tokenizer, zoo.markov(11, vocab=4))


def test_a_model_is_trained_on_a_source_measured_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two commands of layer B, one after the other; few steps, but already far better than nothing."""
    output = tmp_path / "run"
    train = ["parity", str(output), "--length=8", "--steps=60", "--width=32", "--layers=1", "--batch=32"]
    with fresh_accelerate():
        assert command_b.main(train) == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert made["checkpoint"].endswith("checkpoint-60")
    assert len((output / "samples.txt").read_text().splitlines()) == 60 * 32
    with fresh_accelerate():
        assert command_b.main(train) == 0  # nothing to do
    assert "nothing to do" in capsys.readouterr().out
    assert command_b.main([*train[:-1], "--batch=16"]) == 1
    assert "other settings" in capsys.readouterr().err

    curves = ["curves", f"--output={tmp_path / 'curves'}", f"--model={output}", "--length=8", "--samples=4"]
    curves += ["--strategies=[random]", "--plots=false", "--resamples=5"]
    assert command.main([*curves, "--sources=[parity]"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "curves" / "points.jsonl").read_text().splitlines()]
    (truth,) = (line for line in lines if line["kind"] == "truth")
    assert 0 < truth["excess"] < 0.5 * math.log(2)
    assert {line["kind"] for line in lines[2:]} == {"point"}
    assert len(lines) == 2 + 6
    assert len(lines[0]["settings"]["weights"]) == 16
    assert command.main([*curves, "--sources=[markov]"]) == 1  # eight symbols, of which the model knows two
    assert "no token for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["markof"], "did you mean 'markov'"),
        (["markov", "--width=40"], "multiple of 32"),
        (["markov", "--steps=0"], "1"),
    ],
    ids=["source", "width", "steps"],
)
def test_bad_input_is_one_line_on_stderr(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_b.main([arguments[0], str(tmp_path), *arguments[1:]]) == 1
    assert message in capsys.readouterr().err
