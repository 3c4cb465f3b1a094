"""Causal Llama, Qwen2 and Qwen3, as `transformers` writes them, become models that can be adapted to diffusion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import public_folders as pf
import pytest
import torch
import transformers
from safetensors.torch import load_file

from mdlm.convert import convert, load_public
from mdlm.load import load_model
from mdlm.tokenization import num_tokens

SIZES: dict[str, Any] = {
    "vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.4, "eos_token_id": 0,
    "bos_token_id": None, "pad_token_id": None,
}  # fmt: skip
CAUSAL = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"head_dim": 8}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 12}),
}


def make_causal(folder: Path, name: str, **changes: Any) -> transformers.PreTrainedModel:
    """A random causal model of `transformers`, saved by it, with a tokenizer that has no mask."""
    config, model_class, own = CAUSAL[name]
    torch.manual_seed(0)
    model = model_class(config(**{**SIZES, **own, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    pf.maskless().save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("name", CAUSAL)
def test_blocks_of_one_token_and_shifted_logits_are_the_causal_model(name: str, tmp_path: Path) -> None:
    causal = make_causal(tmp_path / "src", name).double()
    model, _ = load_public(tmp_path / "src", torch.float64, mask_token_id=1, block_size=1)
    assert model.config.shift_logits
    ids = torch.randint(0, 280, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        raw = causal(input_ids=ids).logits
        ours = model(ids).logits
    assert float((ours[:, 1:] - raw[:, :-1]).abs().max()) < 2e-5
    with torch.no_grad():
        both = load_public(tmp_path / "src", torch.float64, mask_token_id=1)[0](ids).logits
    assert float((both[:, 1:] - raw[:, :-1]).abs().max()) > 0.1, "bidirectional attention is another function"


@pytest.mark.parametrize("name", CAUSAL)
def test_the_mask_of_a_causal_model_must_be_said(name: str, tmp_path: Path) -> None:
    make_causal(tmp_path / "src", name)
    with pytest.raises(ValueError, match=r"causal model .*--mask_token_id ID, or add one with --add_mask_token"):
        load_model(tmp_path / "src")
    with pytest.raises(ValueError, match="an ordinary token of text"):
        convert(str(tmp_path / "src"), str(tmp_path / "out"), mask_token_id=100)
    with pytest.raises(ValueError, match=r"mask_token_id and eos_token_id are both 0"):
        convert(str(tmp_path / "src"), str(tmp_path / "out"), mask_token_id=0)
    with pytest.raises(ValueError, match=r"mask_token_id=280 is not an id of the vocabulary"):
        convert(str(tmp_path / "src"), str(tmp_path / "out"), mask_token_id=280)
    convert(str(tmp_path / "src"), str(tmp_path / "out"), mask_token_id=1, shift_logits=False)
    model, tokenizer = load_model(tmp_path / "out", device="cpu")
    assert (tokenizer.mask_token, tokenizer.mask_token_id) == ("<|spare|>", 1)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == model.config.pad_token_id == 0
    assert not model.config.shift_logits


@pytest.mark.parametrize("tied", [True, False])
def test_a_mask_token_is_added_with_mean_rows_and_ties_survive(tied: bool, tmp_path: Path) -> None:
    source = make_causal(tmp_path / "src", "qwen2", tie_word_embeddings=tied)
    notes = convert(str(tmp_path / "src"), str(tmp_path / "out"), add_mask_token=True)
    assert any("grew from 280 to 320 rows" in note for note in notes)
    model, tokenizer = load_model(tmp_path / "out", device="cpu")
    assert tokenizer.mask_token == "<|mask|>"
    assert model.config.mask_token_id == tokenizer.mask_token_id == 280
    assert (model.config.num_tokens, model.config.vocab_size) == (281, 320) == (num_tokens(tokenizer), 320)
    pairs = [(model.model.embed_tokens.weight, source.get_input_embeddings().weight)]
    pairs += [] if tied else [(model.lm_head.weight, source.get_output_embeddings().weight)]
    for new, old in pairs:
        assert torch.equal(new[:280], old)
        torch.testing.assert_close(new[280:], old.mean(dim=0, keepdim=True).expand(40, -1))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in load_file(tmp_path / "out" / "model.safetensors")) != tied
    assert tokenizer.decode(tokenizer("the cat")["input_ids"]) == "the cat"
    tokenizer.save_pretrained(tmp_path / "src")
    with pytest.raises(ValueError, match=r"has a token '<\|mask\|>' already; name it with --mask_token_id 280"):
        convert(str(tmp_path / "src"), str(tmp_path / "other"), add_mask_token=True)


def test_rows_beyond_the_tokenizer_are_used_before_the_embedding_grows(tmp_path: Path) -> None:
    source = make_causal(tmp_path / "src", "qwen3", vocab_size=300)
    convert(str(tmp_path / "src"), str(tmp_path / "out"), add_mask_token=True)
    model, _ = load_model(tmp_path / "out", device="cpu")
    assert (model.config.mask_token_id, model.config.num_tokens, model.config.vocab_size) == (280, 281, 300)
    assert torch.equal(model.model.embed_tokens.weight, source.get_input_embeddings().weight)


def test_a_causal_model_is_no_target(tmp_path: Path) -> None:
    make_causal(tmp_path / "src", "llama")
    with pytest.raises(ValueError, match=r"--to llama: it must be one of mdlm, llada"):
        convert(str(tmp_path / "src"), str(tmp_path / "out"), to="llama")
    convert(str(tmp_path / "src"), str(tmp_path / "a2d"), to="a2d-llama", mask_token_id=1, shift_logits=False)
    assert json.loads((tmp_path / "a2d" / "config.json").read_text())["mask_token_id"] == 1
    assert load_model(tmp_path / "a2d", device="cpu")[0].config.mask_token_id == 1
