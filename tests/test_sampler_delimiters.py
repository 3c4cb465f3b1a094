"""Tokens that end a piece of text are those of the tokenizer in use, not those of the model a paper used."""

from __future__ import annotations

import pytest
import torch
from sampler_tools import HashDenoiser, ragged_canvas, unmask
from transformers import PreTrainedTokenizerBase

from mdlm.denoiser import FunctionDenoiser
from mdlm.samplers.delimiters import with_token_ids
from mdlm.samplers.generate import generate
from mdlm.samplers.phases import Relay
from mdlm.samplers.presets import build_strategy
from mdlm.samplers.select import Threshold
from mdlm.samplers.spans import Clusters, Delimited
from mdlm.samplers.strategy import Strategy
from mdlm.samplers.windows_planned import AdaBlock
from mdlm.tokenization import train_bpe


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_bpe(["one line, then\nanother line.\n" * 4], 300)


def test_the_default_is_the_line_end_of_the_tokenizer(tokenizer: PreTrainedTokenizerBase) -> None:
    window = with_token_ids(build_strategy("adablock"), tokenizer).window
    assert isinstance(window, AdaBlock)
    assert window.delimiters != (198,), "LLaDA's"
    assert tokenizer.decode(window.delimiters) == "\n"


def test_texts_are_found_wherever_they_are_said(tokenizer: PreTrainedTokenizerBase) -> None:
    selector = Relay(Threshold(), Clusters(units=Delimited((",", 7, "."))))
    changed = with_token_ids(Strategy(select=selector), tokenizer)
    comma, seven, stop = changed.select.late.units.delimiters  # type: ignore[attr-defined]
    assert (tokenizer.decode([comma]), seven, tokenizer.decode([stop])) == (",", 7, ".")
    plain = build_strategy("threshold")
    assert with_token_ids(plain, tokenizer) is plain


def test_generate_uses_them(tokenizer: PreTrainedTokenizerBase) -> None:
    """A model sure of a line end at the third position: the first block is three long, so the fourth waits."""
    newline, other = (tokenizer.encode(text, add_special_tokens=False)[-1] for text in ("\n", ","))
    mask = tokenizer.mask_token_id

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(*tokens.shape, len(tokenizer))
        out[..., other] = 20.0
        out[:, 2, other], out[:, 2, newline] = 0.0, 20.0
        return out

    model = FunctionDenoiser(logits, mask, len(tokenizer))
    out = generate(model, tokenizer, [[]], strategy="adablock", max_new_tokens=8, share=1.0)
    assert out.step_map[0].tolist() == [0, 0, 0, 1, 1, 1, 1, 1]
    by_id = generate(model, None, [[]], strategy="adablock", max_new_tokens=8, share=1.0, delimiters=(newline,))
    assert torch.equal(by_id.step_map[0], out.step_map[0])


def test_texts_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match=r"AdaBlock ends pieces at '\\n', whose token ids only a tokenizer knows"):
        generate(HashDenoiser(), None, [[3]], strategy="adablock", max_new_tokens=4)
    with pytest.raises(ValueError, match="give delimiters as token ids"):
        unmask(HashDenoiser(), ragged_canvas(), build_strategy("adablock"))


def test_a_text_that_is_no_token_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ValueError, match=r"delimiter 'Zyx' is not one token of this tokenizer .* give token ids"):
        with_token_ids(build_strategy("adablock", delimiters=("Zyx",)), tokenizer)
