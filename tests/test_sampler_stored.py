"""The strategy that a `generation_config.json` stores."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transform_tools import same
from transformers import AutoModelForMaskedLM

from mdlm.config import MDLMConfig
from mdlm.modeling import MDLMForMaskedLM
from mdlm.samplers import Strategy
from mdlm.samplers.cache import NoCache

# The stored strategy


@pytest.mark.parametrize("load", [MDLMForMaskedLM.from_pretrained, AutoModelForMaskedLM.from_pretrained])
def test_a_stored_strategy_survives_saving_and_is_what_generate_uses(
    tmp_path: Path, tiny_config: MDLMConfig, load: Callable[[Path], Any]
) -> None:
    torch.manual_seed(0)
    model = MDLMForMaskedLM(tiny_config).eval()
    model.generation_config.strategy = {"name": "confidence", "knobs": {"k": 3, "score": "entropy"}}
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.generation_config.eos_token_id == tiny_config.eos_token_id
    named = model.generate([[5, 6]], strategy="confidence", k=3, score="entropy", max_new_tokens=9, eos="ignore")
    assert same(named, loaded.generate([[5, 6]], max_new_tokens=9, eos="ignore"))
    assert named.nfe.tolist() == [3]
    assert loaded.generate([[5, 6]], max_new_tokens=9, eos="ignore", k=9).nfe.tolist() == [1], "knobs of the call win"
    other = loaded.generate([[5, 6]], strategy="first_hitting", max_new_tokens=9, eos="ignore")
    assert other.nfe.tolist() == [9]


def test_a_model_without_a_stored_strategy_uses_the_default(tmp_path: Path, tiny_config: MDLMConfig) -> None:
    model = MDLMForMaskedLM(tiny_config).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    loaded = MDLMForMaskedLM.from_pretrained(tmp_path)
    plain = model.generate([[5, 6]], strategy="threshold", max_new_tokens=4)
    assert same(plain, loaded.generate([[5, 6]], max_new_tokens=4))


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        ("confidence", 'must be {"name": NAME}'),
        ({"knobs": {}}, 'must be {"name": NAME}'),
        ({"name": "confidence", "k": 3}, 'must be {"name": NAME}'),
        ({"name": "confidence", "knobs": [3]}, 'must be {"name": NAME}'),
        ({"name": "confidense"}, "did you mean 'confidence'"),
        ({"name": 7}, "there is no strategy '7'"),
        ({"name": "confidence", "knobs": {"kk": 3}}, "does not take kk"),
        ({"name": "confidence", "knobs": {"k": 0}}, "must be 1 or more"),
        ({"name": "confidence", "knobs": {"k": "many"}}, "stored in the model's generation_config"),
    ],
)
def test_a_stored_strategy_that_makes_no_sense_says_what_is_allowed(
    tiny_config: MDLMConfig, stored: Any, message: str
) -> None:
    model = MDLMForMaskedLM(tiny_config).eval()
    model.generation_config.strategy = stored
    with pytest.raises(ValueError) as caught:
        model.generate([[5, 6]], max_new_tokens=4)
    assert message in str(caught.value)
    assert "generation_config" in str(caught.value)
    model.generate([[5, 6]], max_new_tokens=4, strategy=Strategy(cache=NoCache()))
