"""Arguments of the wrong type, and values that would hang or mislead, are named before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pytest
import torch
from sampler_tools import MASK, HashDenoiser, tiny_model

from mdlm.samplers import Canvas, Strategy, generate
from mdlm.samplers.arguments import conform
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.state import State


@pytest.mark.parametrize(
    ("value", "hint", "result"),
    [
        (3, int, 3),
        (np.int64(3), int, 3),
        (torch.tensor(3), int, 3),
        (3, float, 3.0),
        (np.float32(0.5), float, 0.5),
        (None, int | None, None),
        (4, int | None, 4),
        ("a", Literal["a", "b"], "a"),
        ([1, 2], Sequence[int], (1, 2)),
        (torch.tensor([1, 2]), int | Sequence[int], (1, 2)),
        ((), Sequence[int], ()),
        ("x", Any, "x"),
    ],
)
def test_what_fits_is_taken(value: Any, hint: Any, result: Any) -> None:
    taken = conform("knob", value, hint)
    assert taken == result
    assert type(taken) is type(result)


@pytest.mark.parametrize(
    ("value", "hint", "allowed"),
    [
        ("3", int, "an integer"),
        (1.5, int, "an integer"),
        (3.0, int, "an integer"),
        (True, int, "an integer"),
        (True, float, "a number"),
        ("0.5", float | None, "a number or None"),
        (3, Literal["a", "b"], "'a', 'b'"),
        ("12", Sequence[int], "a sequence of an integer"),
        ([1.5], Sequence[int], "a sequence of an integer"),
        (5, str | Strategy | None, "a string or Strategy or None"),
    ],
)
def test_what_does_not_fit_is_named(value: Any, hint: Any, allowed: str) -> None:
    with pytest.raises(ValueError, match=r"knob is .*; it must be ") as caught:
        conform("knob", value, hint)
    assert str(caught.value).endswith(allowed)


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": "8"},
        {"max_new_tokens": True},
        {"max_new_tokens": 3.0},
        {"temperature": "1"},
        {"top_k": 2.5},
        {"top_p": "0.9"},
        {"repetition_penalty": "1"},
        {"guidance": "1"},
        {"batch_size": "1"},
        {"seed": "a"},
        {"seed": 1.5},
        {"seed": [1.5]},
        {"seed": None},
        {"eos_token_id": "x"},
        {"suppress_tokens": 5},
        {"suppress_tokens": [1.5]},
        {"strategy": 5},
        {"regex": 5},
        {"strategy": "confidence", "k": 1.5},
        {"strategy": "confidence", "steps": True},
        {"strategy": "threshold", "threshold": "0.9"},
        {"strategy": "threshold", "block_length": float("nan")},
    ],
    ids=str,
)
def test_wrong_types_are_errors_that_name_the_argument(options: dict[str, Any]) -> None:
    name = list(options)[-1]
    with pytest.raises(ValueError, match=f"^{name} is "):
        generate(HashDenoiser(8.0), None, [[3, 4]], **{"max_new_tokens": 4, **options})


def test_integers_of_other_libraries_are_integers() -> None:
    plain = generate(
        HashDenoiser(8.0), None, [[3, 4]], strategy="confidence", k=2, max_new_tokens=4, seed=3, eos_token_id=1
    )
    numpy = generate(
        HashDenoiser(8.0),
        None,
        [[np.int64(3), np.int64(4)]],
        strategy="confidence",
        k=np.int64(2),
        max_new_tokens=np.int64(4),
        seed=torch.tensor(3),
        eos_token_id=np.int64(1),
    )
    assert torch.equal(plain.tokens[0], numpy.tokens[0])


def test_a_window_without_an_undecided_position_is_an_error_not_an_endless_loop() -> None:
    def nothing(state: State) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(state.editable), torch.zeros_like(state.rows)

    with pytest.raises(ValueError, match="holds no undecided position"):
        generate(HashDenoiser(8.0), None, [[3]], strategy=Strategy(window=nothing), max_new_tokens=4)


@pytest.mark.parametrize("temperature", [1e-40, 1e308, -1.0, float("nan")])
def test_temperatures_beyond_float32_are_refused(temperature: float) -> None:
    with pytest.raises(ValueError, match=r"temperature is .*between 1e-06 and 1e\+06"):
        generate(HashDenoiser(8.0), None, [[3]], max_new_tokens=4, temperature=temperature)


@pytest.mark.parametrize("temperature", [1e-6, 1e6])
def test_temperatures_at_the_ends_of_the_range_work(temperature: float) -> None:
    out = generate(HashDenoiser(8.0), None, [[3]], max_new_tokens=4, temperature=temperature, eos="ignore")
    assert int((out.tokens[0] == MASK).sum()) == 0


@pytest.mark.parametrize(("name", "options"), [("p2", {"eos": "defer"}), ("t2t", {"eos": "defer"})])
def test_policies_that_a_strategy_cannot_keep_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="eos='defer'"):
        generate(tiny_model(), None, [[3]], strategy=name, max_new_tokens=4, eos_token_id=1, **options)
    with pytest.raises(ValueError, match="repetition_penalty"):
        generate(tiny_model(), None, [[3]], strategy="t2t", max_new_tokens=4, repetition_penalty=1.5)


def test_another_models_tokenizer_is_refused() -> None:
    class Other:
        mask_token_id = MASK + 5
        eos_token_id = None

    with pytest.raises(ValueError, match="the tokenizer's mask token has id"):
        generate(tiny_model(), Other(), [[3]], max_new_tokens=4)  # type: ignore[arg-type]


@pytest.mark.parametrize("piece", [-3, True, 3.0, None])
def test_a_piece_is_text_or_a_number_of_holes(piece: Any) -> None:
    with pytest.raises(ValueError, match="a piece is"):
        Canvas.from_pieces(None, [piece])  # type: ignore[arg-type]


def test_knobs_of_a_strategy_keep_their_own_messages() -> None:
    with pytest.raises(ValueError, match="must be 1 or more"):
        build_strategy("confidence", k=0)
