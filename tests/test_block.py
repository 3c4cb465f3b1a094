"""Block diffusion: one forward over [x_t ; x_0] is every block alone behind its clean past; and its laws."""

from __future__ import annotations

from typing import Any

import pytest
import reference_block as rb
import reference_model as ref
import torch
from block_tools import MASK, SIZES, layout_batch, loss_and_gradient, objective, predictor, rows_batch
from model_tools import VOCAB, make_model
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import flex_attention as flex_utils

from mdlm.attention import document_ids, flex_block_mask, token_positions, visible_twice
from mdlm.data import Batch
from mdlm.flops import forward_flops_per_token, train_flops_per_token

# --- the model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ref.LAYOUTS)
@pytest.mark.parametrize("block_size", SIZES)
@pytest.mark.parametrize("shift", [False, True], ids=["aligned", "shifted"])
def test_the_loss_is_that_of_every_block_alone_in_float64(layout: str, block_size: int, shift: bool) -> None:
    """Weights from their formula, losses from one run of the reference model per block."""
    model = make_model("sdpa", torch.float64, block_size=block_size, shift_logits=shift)
    clean = layout_batch(layout, prompt=2)
    loss = objective(block_size, eps=0.0)
    noised = loss.noise(clean, 0)
    expected, times = 0.0, iter(noised.times.tolist())
    for r, (positions, documents) in enumerate(ref.LAYOUTS[layout].rows()):
        masked, tokens = noised.masked[r].tolist(), clean.input_ids[r].tolist()
        nll = rb.block_nll(predictor(model), tokens, positions, documents, masked, MASK, block_size)
        assert not any(masked[:2]), "the prompt is never noised"
        for block in rb.blocks(positions, documents, block_size):
            t, n = next(times), sum(clean.maskable[r].tolist()[i] for i in block)
            k = sum(masked[i] for i in block)
            assert (k > 0) == (n > 0), "a block that may be noised has a mask"
            expected += rb.linear_weight(t, n, k) * sum(nll[i] for i in block if masked[i])
    assert next(times, None) is None
    terms = loss.numerator(model, noised)
    assert float(terms.loss.detach()) == pytest.approx(expected, rel=2e-7)  # weights are stored in float32
    assert float(loss.denominator(noised)) == int(clean.maskable.sum())


@pytest.mark.parametrize("layout", ["dense", "left padding", "packed", "packed and padded"])
@pytest.mark.parametrize("shift", [False, True], ids=["aligned", "shifted"])
def test_the_gradient_is_that_of_every_block_alone(layout: str, shift: bool) -> None:
    block_size = 2
    model = make_model("sdpa", torch.float64, block_size=block_size, shift_logits=shift)
    loss = objective(block_size)
    noised = loss.noise(layout_batch(layout, prompt=1), 0)
    total, gradient = loss_and_gradient(model, [noised], loss)
    model.zero_grad()
    brute = torch.zeros((), dtype=torch.float64)
    for r, (positions, documents) in enumerate(ref.LAYOUTS[layout].rows()):
        for block in rb.blocks(positions, documents, block_size):
            before = rb.past(block, positions, documents, block_size)
            ids = torch.cat([noised.targets[r, before], noised.input_ids[r, block]])[None]
            at = torch.tensor([[False] * len(before) + noised.masked[r, block].tolist()])
            log_probs = model(ids).logits[at][:, 1:].log_softmax(-1)  # column 0 is the mask
            nll = -log_probs.gather(1, noised.targets[r, block][at[0, len(before) :]][:, None] - 1)[:, 0]
            brute = brute + (noised.weight[r, block][noised.masked[r, block]] * nll).sum()
    brute = brute / loss.denominator(noised)
    brute.backward()
    assert total == pytest.approx(brute.item(), rel=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradient[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_logits_of_masked_rows_are_the_rows_of_all_logits() -> None:
    for shift in (False, True):
        model = make_model("sdpa", torch.float64, block_size=3, shift_logits=shift)
        clean = layout_batch("packed and padded")
        noised = objective(3).noise(clean, 0)
        inputs = {
            "input_ids": noised.input_ids, "clean_ids": noised.targets,
            "attention_mask": clean.attention_mask, "position_ids": clean.position_ids,
        }  # fmt: skip
        with torch.no_grad():
            whole = model(**inputs).logits
            some = model(**inputs, logits_at=noised.masked).logits
        assert whole.shape == (2, 9, VOCAB)
        torch.testing.assert_close(some, whole[noised.masked], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ref.LAYOUTS)
@pytest.mark.parametrize("block_size", SIZES)
def test_the_mask_is_the_rule_token_by_token(layout: str, block_size: int) -> None:
    """BD3-LM issues 23 and 27: what the parts of the mask are, and which sizes they have."""
    clean = layout_batch(layout)
    positions = token_positions(clean.input_ids, clean.attention_mask, clean.position_ids)
    documents = document_ids(clean.attention_mask, clean.position_ids)
    mask = visible_twice(positions, documents, block_size).expand(2, 1, 18, 18)[:, 0]
    from_rule = flex_block_mask(positions.expand(2, 9), documents, block_size, twice=True)
    assert from_rule is not None
    assert from_rule.seq_lengths == (18, 18)
    for r, (places, owners) in enumerate(ref.LAYOUTS[layout].rows()):
        for query in range(18):
            for key in range(18):
                q, k = query % 9, key % 9
                if owners[q] is None or owners[k] is None:
                    expected = None if owners[q] == owners[k] else False
                else:
                    a, b = places[q] // block_size, places[k] // block_size
                    together = owners[q] == owners[k]
                    if query < 9:
                        expected = together and (a == b if key < 9 else a > b)
                    else:
                        expected = together and key >= 9 and a >= b
                if expected is not None:
                    assert bool(mask[r, query, key]) == expected, (r, query, key)
                    by_flex = from_rule.mask_mod(*(torch.tensor(x) for x in (r, 0, query, key)))
                    assert bool(by_flex) == expected, (r, query, key)
        assert mask[r].any(dim=1).all(), "no query sees nothing, not even padding"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("layout", ref.LAYOUTS)
def test_flex_attention_equals_eager_in_the_forward(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(*arguments: Any, training: bool, **options: Any) -> Any:
        return flex_utils.flex_attention(*arguments, **options)

    monkeypatch.setattr(flex_utils, "compile_friendly_flex_attention", plain)
    clean = layout_batch(layout)
    logits = []
    for implementation in ("eager", "flex_attention"):
        model = make_model(implementation, block_size=2, shift_logits=True)
        with torch.no_grad():
            out = model(
                torch.where(clean.input_ids % 2 == 0, MASK, clean.input_ids), clean_ids=clean.input_ids,
                attention_mask=clean.attention_mask, position_ids=clean.position_ids,
            )  # fmt: skip
        logits.append(out.logits[clean.maskable])
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_flex_attention_on_a_gpu_gives_the_loss_and_gradient_of_sdpa(precision: torch.dtype) -> None:
    clean = rows_batch(4, 256, packed=True)
    loss = objective(16, 4)
    noised = loss.noise(clean, 0).to("cuda")
    results = []
    for implementation in ("sdpa", "flex_attention"):
        model = make_model(implementation, precision, block_size=16, head_dim=16).cuda()
        results.append(loss_and_gradient(model, [noised], loss))
    tolerance = 1e-3 if precision == torch.float32 else 5e-2
    assert results[1][0] == pytest.approx(results[0][0], rel=tolerance)
    for name, gradient in results[0][1].items():
        scale = float(gradient.float().abs().max())
        torch.testing.assert_close(results[1][1][name] / scale, gradient / scale, rtol=0, atol=tolerance, msg=name)


def test_a_document_does_not_see_its_neighbours_in_the_row() -> None:
    """maxtext #4743: packed rows leak attention between documents, here into the clean past of another's blocks."""
    model = make_model("sdpa", torch.float64, block_size=2)
    clean = layout_batch("packed")
    noised = objective(2).noise(clean, 0)
    first = (clean.position_ids == 0).cumsum(1) == 1
    other = clean.input_ids.where(~first, clean.input_ids % (VOCAB - 1) + 1)
    inputs = {"position_ids": clean.position_ids, "logits_at": ~first}
    with torch.no_grad():
        before = model(noised.input_ids, clean_ids=clean.input_ids, **inputs).logits
        after = model(torch.where(noised.masked, MASK, other), clean_ids=other, **inputs).logits
    assert torch.equal(before, after)


def test_a_compiled_backbone_takes_clean_ids_in_one_graph() -> None:
    loss = objective(4, 8)
    noised = loss.noise(rows_batch(8, 12, packed=True), 0)
    model = make_model("sdpa", block_size=4, initializer_range=0.1)
    expected, gradient = loss_and_gradient(model, [noised], loss)
    model.model.compile(dynamic=False, fullgraph=True, backend="eager")
    found, compiled = loss_and_gradient(model, [noised], loss)
    assert found == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(compiled, gradient, rtol=1e-4, atol=1e-5)


def test_the_flops_of_a_training_step_are_those_of_both_halves_and_the_keys_they_see() -> None:
    config = make_model(block_size=4).config
    seq = 12
    seen = visible_twice(torch.arange(seq)[None], None, 4).sum(dim=-1).double().mean()
    body = 2 * forward_flops_per_token(config, float(seen), 0.0)
    head = forward_flops_per_token(config, 1, 1.0) - forward_flops_per_token(config, 1, 0.0)
    assert train_flops_per_token(config, seq, 0.5) == pytest.approx(3 * (body + 0.5 * head))


def test_clean_ids_that_mean_nothing_are_refused() -> None:
    ids = torch.ones(1, 4, dtype=torch.long)
    with pytest.raises(ValueError, match="this model has no blocks"):
        make_model()(ids, clean_ids=ids)
    model = make_model(block_size=2)
    with pytest.raises(ValueError, match=r"clean_ids has shape \[1, 3\]"):
        model(ids, clean_ids=ids[:, :3])
    with pytest.raises(ValueError, match="clean_ids holds 24"):
        model(ids, clean_ids=ids + 23)
    with pytest.raises(ValueError, match="no block-causal mask"):
        make_model("flash_attention_2", block_size=2)(ids, clean_ids=ids)


# --- laws ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masking", ["independent", "count"])
def test_blocks_of_one_token_give_the_exact_likelihood_of_a_causal_model(masking: Any) -> None:
    """A Llama's own cross entropy, in every draw: no noise is left. (Its first token has no past: it is not scored.)"""
    torch.manual_seed(0)
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=24, tie_word_embeddings=True, initializer_range=0.4, rms_norm_eps=1e-6,
        )
    ).double()  # fmt: skip
    model = make_model("sdpa", torch.float64, block_size=1, shift_logits=True)
    model.load_state_dict(llama.state_dict())
    clean = rows_batch(3, 12)
    clean = Batch(clean.input_ids, torch.ones(3, 12, dtype=torch.bool), clean.rows)
    clean.maskable[:, 0] = False
    with torch.no_grad():
        logits = llama(clean.input_ids).logits[:, :-1, 1:]  # without the mask's column
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), clean.input_ids[:, 1:].flatten() - 1)
    for seed in range(3):
        loss = objective(1, 3, seed, masking=masking)
        noised = loss.noise(clean, 0)
        assert torch.equal(noised.masked, clean.maskable)
        got = float(loss.numerator(model, noised).loss.detach()) / float(loss.denominator(noised))
        assert got == pytest.approx(float(expected), rel=1e-6)  # weights in float32, which are 1


@pytest.mark.parametrize("size", [12, 40])
@pytest.mark.parametrize("options", [{}, {"masking": "count"}, {"weighting": "none"}], ids=str)
def test_a_block_as_long_as_the_row_is_mdlm_with_the_same_noise(options: dict[str, Any], size: int) -> None:
    """Bit for bit in the noise and its weights; loss and gradient to rounding (the forward has twice the keys)."""
    clean = rows_batch(4, 12)
    mdlm, blocks = objective(None, 4, **options), objective(size, 4, **options)
    one, other = mdlm.noise(clean, 0), blocks.noise(clean, 0)
    assert torch.equal(one.masked, other.masked)
    assert torch.equal(one.weight, other.weight)
    assert torch.equal(one.times, other.times)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        loss, gradient = loss_and_gradient(make_model("sdpa", dtype), [one], mdlm)
        same, again = loss_and_gradient(make_model("sdpa", dtype, block_size=size), [other], blocks)
        assert same == pytest.approx(loss, rel=tolerance)
        for name, value in gradient.items():
            scale = float(value.abs().max())
            torch.testing.assert_close(again[name], value, rtol=0, atol=10 * tolerance * scale, msg=name)
