"""Attention of public networks, through `output_attentions`: what it is, and what happens where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_tools import batch, make_model
from sampler_tools import ragged_canvas, tiny_model, unmask
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM

from mdlm.attention_rows import slots
from mdlm.denoiser import LogitsModelDenoiser, ModelDenoiser
from mdlm.samplers.generate import generate
from mdlm.samplers.presets import build_strategy

VOCAB = 40


def bert(implementation: str = "eager") -> BertForMaskedLM:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        attn_implementation=implementation,
    )
    return BertForMaskedLM(config).eval()


def public(model: Any, **options: Any) -> LogitsModelDenoiser:
    return LogitsModelDenoiser(model, mask_token_id=0, num_tokens=VOCAB, **options)


@pytest.mark.parametrize("layout", ["dense", "right padding"])
@pytest.mark.parametrize("layers", [1, 2, 0.5])
def test_a_public_network_gives_what_ours_recomputes(layout: str, layers: float) -> None:
    """The same weights by both routes: our transformer as itself, and as anybody's network."""
    model = make_model("eager", torch.float64)
    model.config.mask_token_id = 0
    inputs, real = batch(layout)
    at = real & (torch.rand(real.shape, generator=torch.Generator().manual_seed(1)) < 0.7)
    given = {"at": at, "layers": layers, "attention_mask": inputs["attention_mask"]}
    ours, ask_ours = ModelDenoiser(model).with_attention(inputs["input_ids"], **given)
    wrapped = LogitsModelDenoiser(model, 0, model.config.num_tokens)
    theirs, ask_theirs = wrapped.with_attention(inputs["input_ids"], **given)
    torch.testing.assert_close(theirs, ours, rtol=0, atol=1e-10)
    for asked in (at, at & (at.cumsum(dim=1) % 2 == 0)):
        torch.testing.assert_close(ask_theirs(asked), ask_ours(asked), rtol=0, atol=1e-10)


def test_rows_are_those_of_the_token_a_shifted_prediction_is_read_from() -> None:
    model = bert()
    ids = torch.randint(1, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :2] = False  # left padding: the first real token has no other
    at = mask.clone()
    at[:, 4] = False
    _, ask = public(model, shift=True).with_attention(ids, layers=2, at=at, attention_mask=mask)
    weights = model(input_ids=ids, attention_mask=mask.long(), output_attentions=True).attentions
    mean = (weights[-1].mean(dim=1) + weights[-2].mean(dim=1)).detach() / 2
    found, (index, used) = ask(at), slots(at)
    for row in range(2):
        first = int(mask[row].int().argmax())
        for a, i in enumerate(index[row].tolist()):
            for b, j in enumerate(index[row].tolist()):
                expected = mean[row, max(i - 1, first), j] if used[row, a] and used[row, b] else torch.tensor(0.0)
                assert float(found[row, a, b]) == pytest.approx(float(expected), abs=1e-7)


@pytest.mark.parametrize("name", ["clad", "dapd"])
def test_a_public_model_runs_the_strategies_that_read_attention(name: str) -> None:
    model = bert()
    out = generate(public(model), None, [[5, 6], [7, 8, 9]], strategy=name, max_new_tokens=12, eos="ignore")
    assert [len(row) for row in out.tokens] == [14, 15]
    assert torch.equal(out.nfe, out.forwards), "the attention is of the same forwards"
    for alone, together in zip(([5, 6], [7, 8, 9]), out.tokens):
        single = generate(public(model), None, [alone], strategy=name, max_new_tokens=12, eos="ignore")
        assert torch.equal(single.tokens[0], together)


def test_ours_wrapped_as_a_public_model_writes_the_same_with_clad() -> None:
    own, canvas = tiny_model(), ragged_canvas(nothing_given=False)
    own.model.config._attn_implementation = "eager"
    wrapped = LogitsModelDenoiser(own.model, own.mask_token_id, own.num_tokens)
    strategy = build_strategy("clad", threshold=0.2)
    assert torch.equal(unmask(wrapped, canvas, strategy).last.tokens, unmask(own, canvas, strategy).last.tokens)


class Silent(torch.nn.Module):
    """A network that knows nothing of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(VOCAB, VOCAB))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return type("Output", (), {"logits": self.table[input_ids]})()


class Refusing(Silent):
    """As LLaDA's own code does."""

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, attention_mask: Tensor | None = None, output_attentions: bool = False
    ) -> Any:
        if output_attentions:
            raise ValueError("output_attentions is not yet supported")
        return super().forward(input_ids)


@pytest.mark.parametrize("model", [Silent(), Refusing(), bert("sdpa")], ids=["unknown", "refused", "sdpa"])
@pytest.mark.filterwarnings("ignore:.*output_attentions.*")
def test_a_model_that_returns_no_weights_says_so_and_what_to_do(model: torch.nn.Module) -> None:
    generate(public(model), None, [[5]], strategy="depcap", max_new_tokens=3)
    with pytest.raises(ValueError, match=r"does not return attention weights.* attn_implementation='eager'.*depcap"):
        generate(public(model), None, [[5]], strategy="clad", max_new_tokens=3)
