"""MAUVE: against the definition worked out by hand, through the judge's features, and without the package."""

from __future__ import annotations

import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_generative import WORDS, tiny_judge, word_tokenizer

from mdlm.eval import __main__ as command
from mdlm.eval.mauve_score import features, mauve_of, mauve_texts


def area(p: list[float], q: list[float], scale: float = 5.0, points: int = 25) -> float:
    """The area under the divergence curve of two histograms (2102.01454, section 2), averaged over both axes."""

    def divergence(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b) if x > 0)

    curve = [(1.0, 0.0)]
    for i in range(points):
        w = 1e-6 + (1 - 2e-6) * i / (points - 1)
        mixed = [w * x + (1 - w) * y for x, y in zip(p, q)]
        curve.append((math.exp(-scale * divergence(q, mixed)), math.exp(-scale * divergence(p, mixed))))
    curve.append((0.0, 1.0))
    steps = list(itertools.pairwise(curve))
    over_x = sum((a[0] - b[0]) * (a[1] + b[1]) / 2 for a, b in steps)
    over_y = sum((b[1] - a[1]) * (a[0] + b[0]) / 2 for a, b in steps)
    return (over_x + over_y) / 2


def two_clusters(left: int, right: int, seed: int) -> torch.Tensor:
    """Unit vectors close to two axes."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.cat([torch.tensor([[1.0, 0.0]]).expand(left, 2), torch.tensor([[0.0, 1.0]]).expand(right, 2)])
    return centres + 1e-3 * torch.randn(left + right, 2, generator=generator)


@pytest.mark.parametrize(("samples", "references"), [((16, 4), (6, 14)), ((10, 10), (10, 10)), ((19, 1), (1, 19))])
def test_two_clear_clusters_give_the_area_under_the_curve_of_their_shares(
    samples: tuple[int, int], references: tuple[int, int]
) -> None:
    found = mauve_of(two_clusters(*samples, seed=1), two_clusters(*references, seed=2))
    shares = [[count / 20 for count in side] for side in (references, samples)]
    assert found == pytest.approx(area(*shares), abs=1e-6)


def test_texts_that_nothing_tells_apart_have_one_and_others_little() -> None:
    """Also where both histograms are the same to the last digit, which the package scores 0.75."""
    for shares in ((12, 18), (10, 10)):
        rows = two_clusters(*shares, seed=0)
        assert mauve_of(rows, rows) == pytest.approx(1.0)
    assert mauve_of(two_clusters(20, 0, seed=1), two_clusters(0, 20, seed=2)) < 0.02


def test_features_are_the_states_at_the_last_token_whatever_the_batch() -> None:
    judge = tiny_judge()
    rows = [[0, 1, 2], [0, 3], [0, 1, 2, 4], [0, 2]]
    for batch in (1, 3):
        found = features(judge, rows, batch)
        for row, state in zip(rows, found):
            with torch.no_grad():
                expected = judge.model(input_ids=torch.tensor([row])).last_hidden_state[0, -1]
            assert torch.allclose(state, expected, atol=1e-6)


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_the_command_prints_mauve_beside_perplexity_where_references_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge, tokenizer = tiny_judge(), word_tokenizer()
    judge.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    samples = [f"{WORDS[1 + i % 2]} {WORDS[1 + i % 3]} c" for i in range(20)]
    references = [f"{WORDS[1 + i % 4]} b {WORDS[3 + i % 2]}" for i in range(24)]
    arguments = ["text", "--file", write(tmp_path / "s.jsonl", samples), "--judge", str(tmp_path / "judge")]
    capsys.readouterr()
    assert command.main([*arguments, "--references", write(tmp_path / "r.jsonl", references), "--seed", "3"]) == 0
    printed = capsys.readouterr()
    record = json.loads(printed.out)
    expected = mauve_texts(judge, tokenizer, samples, references, seed=3)
    assert record["mauve"]["mauve"] == pytest.approx(expected.mauve)
    counts = {name: record["mauve"][name] for name in ("samples", "references", "buckets", "max_length", "seed")}
    assert counts == {"samples": 20, "references": 24, "buckets": 2, "max_length": 64, "seed": 3}
    assert "MAUVE" in printed.err
    assert command.main(arguments) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["mauve"] is None
    assert "MAUVE" not in printed.err


def test_texts_without_a_token_are_seen_by_the_start_token_or_left_out() -> None:
    texts = ["a b", "c", ""] * 10
    assert mauve_texts(tiny_judge(), word_tokenizer(), texts, texts).samples == 30
    assert mauve_texts(tiny_judge(), word_tokenizer(bos=False), texts, texts).samples == 20


def test_what_mauve_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at least 20 texts"):
        mauve_of(two_clusters(5, 5, 0), two_clusters(20, 20, 0))
    with pytest.raises(ValueError, match="at least 20 texts"):
        mauve_texts(tiny_judge(), word_tokenizer(bos=False), [""], ["a"])
    broken: Any = two_clusters(10, 10, 0)
    broken[3, 1] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        mauve_of(broken, two_clusters(10, 10, 0))
    monkeypatch.setitem(sys.modules, "mauve", None)
    with pytest.raises(ValueError, match=r"mdlm-torch\[mauve\]"):
        mauve_of(two_clusters(10, 10, 0), two_clusters(10, 10, 0))
