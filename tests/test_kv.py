"""Stored keys and values in the model: whatever was fed before and how, the answer is the plain forward's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from model_tools import VOCAB, make_model
from torch import Tensor

from mdlm.denoiser import CachedDenoiser, FunctionDenoiser, ModelDenoiser
from mdlm.emit import emit_log_probs
from mdlm.keyvalues import KeyValues
from mdlm.modeling import MDLMForMaskedLM

ROWS, SEQ = 3, 10


def tokens() -> Tensor:
    return torch.randint(0, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(3))


def feed(model: MDLMForMaskedLM, ids: Tensor, chosen: Tensor, kv: KeyValues, at: Tensor | None = None) -> Tensor:
    """Feed the chosen positions `[batch, seq]`, padded to the row that feeds most; logits `[batch, seq, vocab]`."""
    counts = chosen.sum(-1)
    positions = chosen.int().argsort(dim=-1, descending=True, stable=True)[:, : int(counts.max())]
    real = torch.arange(positions.shape[1]) < counts[:, None]
    positions = torch.where(real, positions, positions[:, :1])
    wanted = None if at is None else at.gather(1, positions) & real
    with torch.no_grad():
        out = model(ids.gather(1, positions), attention_mask=real, position_ids=positions, logits_at=wanted, kv=kv)
    logits = torch.full((*ids.shape, VOCAB), torch.nan, dtype=out.logits.dtype)
    row, column = (real if wanted is None else wanted).nonzero(as_tuple=True)
    logits[row, positions[row, column]] = out.logits if wanted is not None else out.logits[row, column]
    return logits


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("options", [{}, {"shift_logits": True}, {"block_size": 4}], ids=str)
def test_feeding_everything_is_the_plain_forward(implementation: str, options: dict[str, Any]) -> None:
    model = make_model(implementation, torch.float64, **options)
    ids = tokens()
    got = feed(model, ids, torch.ones_like(ids, dtype=torch.bool), KeyValues.empty(ROWS, SEQ))
    with torch.no_grad():
        torch.testing.assert_close(got, model(ids).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("shift", [False, True])
def test_feeding_a_part_again_answers_as_the_whole(implementation: str, shift: bool) -> None:
    """Nothing has changed, so stored keys and values are right, whichever positions each row feeds."""
    model = make_model(implementation, torch.float64, shift_logits=shift)
    ids, kv = tokens(), KeyValues.empty(ROWS, SEQ)
    with torch.no_grad():
        whole = model(ids).logits
    feed(model, ids, torch.ones_like(ids, dtype=torch.bool), kv)
    part = torch.zeros_like(ids, dtype=torch.bool)
    part[0, 2:5] = part[1, 7:] = part[2, 4] = part[2, 5] = part[2, 9] = part[2, 8] = True  # 3, 3 and 4 positions
    at = part.clone()
    at[:, 2] = at[:, 7] = at[:, 8] = at[2, 4] = False  # their predecessors are not fed
    got = feed(model, ids, part, kv, at)
    torch.testing.assert_close(got[at], whole[at], rtol=0, atol=1e-12)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_blocks_fed_one_after_the_other_answer_as_the_whole(implementation: str) -> None:
    model = make_model(implementation, torch.float64, block_size=4)
    ids, kv = tokens(), KeyValues.empty(ROWS, SEQ)
    with torch.no_grad():
        whole = model(ids).logits
    for start in (0, 4, 8):
        block = torch.zeros_like(ids, dtype=torch.bool)
        block[:, start : start + 4] = True
        got = feed(model, ids, block, kv)
        torch.testing.assert_close(got[block], whole[block], rtol=0, atol=1e-12)


def test_only_positions_that_were_fed_are_attended_to() -> None:
    model = make_model("sdpa", torch.float64)
    ids, kv = tokens(), KeyValues.empty(ROWS, SEQ)
    lengths = torch.tensor([10, 6, 3])
    real = torch.arange(SEQ) < lengths[:, None]
    got = feed(model, ids, real, kv)
    for row, length in enumerate(lengths.tolist()):
        with torch.no_grad():
            alone = model(ids[row : row + 1, :length]).logits[0]
        torch.testing.assert_close(got[row, :length], alone, rtol=0, atol=1e-12)
    assert torch.equal(kv.valid, real)


def test_what_is_stored_is_what_was_fed_last() -> None:
    """A partial feed changes the store in place: the next part sees the new token, not the old one."""
    model = make_model("sdpa", torch.float64, num_hidden_layers=1)  # of one layer keys depend on their own token only
    ids, kv = tokens(), KeyValues.empty(ROWS, SEQ)
    everything = torch.ones_like(ids, dtype=torch.bool)
    feed(model, ids, everything, kv)
    ids[:, 3] = (ids[:, 3] + 1) % VOCAB
    fourth = torch.arange(SEQ).expand(ROWS, -1) == 3
    feed(model, ids, fourth, kv)
    rest = ~fourth
    with torch.no_grad():
        torch.testing.assert_close(feed(model, ids, rest, kv)[rest], model(ids).logits[rest], rtol=0, atol=1e-12)


def test_some_rows_of_a_store() -> None:
    model = make_model("sdpa", torch.float64)
    ids, kv = tokens(), KeyValues.empty(ROWS, SEQ)
    everything = torch.ones_like(ids, dtype=torch.bool)
    feed(model, ids, everything, kv)
    before = [keys.clone() for keys, _ in kv.layers]
    changed = (ids + 1) % VOCAB
    rows = torch.tensor([2, 0])
    got = feed(model, changed[rows], everything[rows], kv.of(rows))
    with torch.no_grad():
        torch.testing.assert_close(got, model(changed[rows]).logits, rtol=0, atol=1e-12)
    for keys, old in zip((keys for keys, _ in kv.layers), before):
        assert torch.equal(keys[1], old[1]), "a row that was not fed keeps what it had"
        assert not torch.equal(keys[0], old[0])
    kept = kv.keep(torch.tensor([1]), 8)
    with torch.no_grad():
        part = everything[1:, :8][:1]
        torch.testing.assert_close(
            feed(model, ids[1:2, :8], part, kept), model(ids[1:2, :8]).logits, rtol=0, atol=1e-12
        )


def test_errors_say_what_is_missing() -> None:
    model = make_model("sdpa")
    ids, kv = tokens(), KeyValues.empty(ROWS, SEQ)
    with torch.no_grad(), pytest.raises(ValueError, match="kv needs position_ids"):
        model(ids, kv=kv)
    positions = torch.arange(SEQ).expand(ROWS, -1)
    with pytest.raises(ValueError, match="no_grad"):
        model(ids, position_ids=positions, kv=kv)
    with torch.no_grad(), pytest.raises(ValueError, match="the store has 3 rows of positions 0"):
        model(ids, position_ids=positions + 1, kv=kv)
    with torch.no_grad(), pytest.raises(ValueError, match="the store has 3 rows"):
        model(ids[:2], position_ids=positions[:2], kv=kv)
    flex = make_model("flex_attention")
    flex.config.mask_token_id = 0
    with pytest.raises(ValueError, match="flex_attention cannot attend to stored"):
        ModelDenoiser(flex).key_values(1, 4)
    shifted = make_model("sdpa", shift_logits=True)
    with torch.no_grad(), pytest.raises(ValueError, match="feed that one too"):
        shifted(ids[:, 4:6], position_ids=positions[:, 4:6], kv=kv)


def test_who_has_the_capability() -> None:
    model = make_model("sdpa", mask_token_id=0)
    assert isinstance(ModelDenoiser(model), CachedDenoiser)
    assert not isinstance(FunctionDenoiser(lambda t: torch.zeros(*t.shape, 4), 3, 4), CachedDenoiser)


@pytest.mark.parametrize("num_tokens", [VOCAB, VOCAB - 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_overwriting_logits_changes_nothing_but_them(dtype: torch.dtype, num_tokens: int) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[1, 7] = torch.inf  # one infinite token takes all
    plain = emit_log_probs(logits, 3, num_tokens)
    assert torch.equal(emit_log_probs(logits.clone(), 3, num_tokens, overwrite=True), plain)
    assert torch.equal(emit_log_probs(logits.clone(), 3, num_tokens, overwrite=True, again=logits.clone), plain)
    logits[2, 4] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        emit_log_probs(logits, 3, num_tokens, overwrite=True)
