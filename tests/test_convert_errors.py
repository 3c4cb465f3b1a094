"""What is refused when a public checkpoint is read, and that the message lists all of it; complaints about loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import public_folders as pf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2Tokenizer

from mdlm.cli import main
from mdlm.convert import convert, load_public
from mdlm.load import load_model
from mdlm.modeling import MDLMForMaskedLM
from mdlm.samplers.generate import generate

UNHOSTED = [
    ("llada", {"alibi": True}),
    ("llada", {"rope": False}),
    ("llada", {"rope_full_precision": False}),
    ("llada", {"block_type": "sequential"}),
    ("llada", {"block_group_size": 2}),
    ("llada", {"activation_type": "swiglu"}),
    ("llada", {"layer_norm_type": "default"}),
    ("llada", {"layer_norm_with_affine": False}),
    ("llada", {"bias_for_layer_norm": True}),
    ("llada", {"attention_layer_norm": True}),
    ("llada", {"multi_query_attention": True}),
    ("llada", {"include_bias": True}),
    ("llada", {"input_emb_norm": True}),
    ("llada", {"scale_logits": True}),
    ("llada", {"clip_qkv": 8.0}),
    ("dream", {"use_sliding_window": True}),
    ("dream", {"use_mrope": True}),
    ("dream", {"hidden_act": "gelu"}),
    ("dream", {"quantization_config": {"bits": 4}}),
    ("dream", {"block_size": 32}),
    ("dream", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    ("dream", {"rope_scaling": {"type": "default", "mrope_section": [16, 24, 24]}}),
    ("fast_dllm", {"layer_types": ["full_attention", "sliding_attention"]}),
    ("fast_dllm", {"use_cab": True}),
    ("sdar", {"attention_bias": True}),
    ("a2d-llama", {"mlp_bias": True}),
    ("a2d-llama", {"partial_rotary_factor": 0.5}),
]


def folder(tmp_path: Path, name: str = "llada", drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """A checkpoint whose configuration was changed after the weights were made."""
    path = tmp_path / "src"
    public, _ = pf.make_folder(path, name)
    public = {key: value for key, value in {**public, **changes}.items() if key not in drop}
    (path / "config.json").write_text(json.dumps(public))
    return path


def refusal(path: Path, **options: Any) -> str:
    target = path.parent / "out"
    with pytest.raises(ValueError) as caught:
        convert(str(path), str(target), **options)
    assert not target.exists()
    return str(caught.value)


@pytest.mark.parametrize(("name", "change"), UNHOSTED, ids=lambda value: str(value)[:40])
def test_a_feature_our_model_cannot_host_is_named(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    (key,) = change
    assert key in refusal(folder(tmp_path, name, **change))


def test_all_that_is_wrong_in_a_configuration_is_listed_at_once(tmp_path: Path) -> None:
    path = folder(tmp_path, drop=("d_model", "n_heads"), alibi=True, soft_cap=30, extra_norm=True)
    message = refusal(path)
    for part in ("d_model is missing", "n_heads is missing", "alibi=True", "soft_cap=30", "extra_norm=True"):
        assert part in message


@pytest.mark.parametrize("key", ["rope", "include_bias", "block_type", "activation_type", "layer_norm_type"])
def test_a_missing_key_means_what_the_library_of_the_format_assumes(key: str, tmp_path: Path) -> None:
    """LLaDA's library defaults are not those of its checkpoints."""
    assert f"{key}=" in refusal(folder(tmp_path, drop=(key,)))


def test_a_missing_weight_tying_key_means_tied_for_llada(tmp_path: Path) -> None:
    assert "ff_out.weight differs from the embedding" in refusal(folder(tmp_path, drop=("weight_tying",)))


def test_missing_unknown_and_misshapen_tensors_are_all_listed(tmp_path: Path) -> None:
    path = folder(tmp_path)
    weights = load_file(path / "model.safetensors")
    at = "model.transformer.blocks."
    for n in range(2):
        del weights[f"{at}{n}.q_proj.weight"]
        weights[f"{at}{n}.ff_norm.weight"] = torch.ones(7)
        weights[f"{at}{n}.gate.weight"] = torch.ones(3)
    save_file(weights, path / "model.safetensors")
    message = refusal(path)
    for n in range(2):
        assert f"{at}{n}.q_proj.weight [32, 32] is missing" in message
        assert f"{at}{n}.ff_norm.weight has shape [7]; the configuration says [32]" in message
        assert f"{at}{n}.gate.weight [3] is not a tensor of this format" in message


def test_half_downloaded_shards_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    path = tmp_path / "src"
    pf.make_folder(path, "dream", files=3)
    first, second, third = sorted(path.glob("*.safetensors"))
    first.write_bytes(first.read_bytes()[:-10])
    third.unlink()
    message = refusal(path)
    assert f"{first.name} is damaged or was not copied to its end" in message
    assert f"{third.name} is missing" in message
    assert second.name not in message


def test_an_index_that_contradicts_the_files_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "src"
    pf.make_folder(path, "dream", files=2)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    names = list(index["weight_map"])
    index["weight_map"][names[0]] = index["weight_map"][names[-1]]
    del index["weight_map"][names[2]]
    index["weight_map"]["ghost"] = index["weight_map"][names[3]]
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    message = refusal(path)
    assert f"{names[0]} is not in" in message
    assert "ghost is not in" in message
    assert f"{names[2]} stands in" in message


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert "pytorch_model.bin, a format that can run code" in refusal(path)


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.transformer.ln_f.weight"] = weights["model.transformer.ln_f.weight"].to(torch.int8)
    save_file(weights, path / "model.safetensors")
    assert "model.transformer.ln_f.weight has type I8" in refusal(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_broken_weights_are_refused(value: float, tmp_path: Path) -> None:
    path = folder(tmp_path)
    weights = load_file(path / "model.safetensors")
    weights["model.transformer.blocks.1.up_proj.weight"][3, 4] = value
    save_file(weights, path / "model.safetensors")
    message = "model.transformer.blocks.1.up_proj.weight holds 1 values that are NaN or infinite"
    assert message in refusal(path)
    with pytest.raises(ValueError, match=message):
        load_public(path)


def test_the_mask_id_is_checked(tmp_path: Path) -> None:
    told = refusal(folder(tmp_path / "a", mask_token_id=100))
    assert "the mask token is 0 in the tokenizer and 100 for the model" in told
    assert "mask_token_id=300 " in refusal(folder(tmp_path / "b", mask_token_id=300, vocab_size=290))
    assert "asked for, but the checkpoint says mask_token_id=0" in refusal(folder(tmp_path / "c"), mask_token_id=1)
    assert "says mask_token_id=0 already" in refusal(tmp_path / "c" / "src", add_mask_token=True)


def test_a_mask_that_neither_configuration_nor_tokenizer_name_must_be_said(tmp_path: Path) -> None:
    """Fast-dLLM v2: the mask is a token of the vocabulary that is called mask nowhere."""
    pf.make_folder(tmp_path / "src", "fast_dllm", mask=False)
    assert "say its id with --mask_token_id" in refusal(tmp_path / "src")
    convert(str(tmp_path / "src"), str(tmp_path / "ours"), mask_token_id=pf.MASK)
    model, tokenizer = load_model(tmp_path / "ours", device="cpu")
    assert tokenizer.mask_token_id == model.config.mask_token_id == pf.MASK
    convert(str(tmp_path / "ours"), str(tmp_path / "back"), to="fast_dllm")
    for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        was, now = (json.loads((tmp_path / f / file).read_text()) for f in ("src", "back"))
        assert was == now, file


@pytest.mark.parametrize(("name", "key"), [("sdar", "block_size"), ("fast_dllm", "bd_size")])
def test_a_block_size_that_config_json_leaves_out_is_asked_for(name: str, key: str, tmp_path: Path) -> None:
    """Some SDAR-style checkpoints leave it out, as a matter of training; without it attention would be another."""
    path = folder(tmp_path, name, drop=(key,))
    assert f"{key} is missing; say it with --block_size" in refusal(path)
    convert(str(path), str(tmp_path / "ours"), block_size=8)
    assert load_model(tmp_path / "ours", device="cpu")[0].config.block_size == 8
    notes = convert(str(tmp_path / "ours"), str(tmp_path / "back"), to=name)
    assert any("say it when reading: block_size=8" in note for note in notes)
    convert(str(tmp_path / "ours"), str(tmp_path / "like"), to=name, like=str(path))
    assert key not in json.loads((tmp_path / "like" / "config.json").read_text())
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads((path / "config.json").read_text())


def test_options_that_contradict_the_checkpoint_are_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, "dream")
    assert "shift_logits=False was asked for, but" in refusal(path, shift_logits=False)
    assert "block_size=4 was asked for, but" in refusal(path, block_size=4)
    convert(str(path), str(tmp_path / "ours"))
    assert "a checkpoint of ours, whose config.json says block_size" in refusal(tmp_path / "ours", block_size=4)


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "src"
    pf.make_folder(path, "dream", vocab_size=200)
    assert "embedding 200 rows; this is the tokenizer of another model" in refusal(path)


def test_a_folder_without_tokenizer_is_converted_and_says_so(tmp_path: Path) -> None:
    path = folder(tmp_path)
    for file in path.glob("tokenizer*"):
        file.unlink()
    assert any("no tokenizer" in note for note in convert(str(path), str(tmp_path / "ours")))
    with pytest.raises(FileNotFoundError, match="no tokenizer"):
        load_model(path)


def test_the_tokenizers_end_token_wins_and_the_way_back_restores_the_configuration(tmp_path: Path) -> None:
    """SDAR: <|endoftext|> in config.json, <|im_end|> in the chat tokenizer. Llama 3: a list of ends."""
    for eos in (5, [7, 5]):
        path = folder(tmp_path / str(eos), "sdar", eos_token_id=eos)
        notes = convert(str(path), str(path.parent / "ours"))
        assert any(note.startswith("eos_token_id: 2 (the tokenizer's) instead of") for note in notes)
        assert load_model(path, device="cpu")[0].config.eos_token_id == 2
        convert(str(path.parent / "ours"), str(path.parent / "back"), to="sdar")
        assert json.loads((path.parent / "back" / "config.json").read_text())["eos_token_id"] == eos


def test_a_tokenizer_that_is_code_is_not_run_but_dreams_is_known(tmp_path: Path) -> None:
    path = folder(tmp_path, "dream")
    for file in path.glob("tokenizer*"):
        file.unlink()
    backend = pf.tokenizer().backend_tokenizer
    backend.model.save(str(path))
    special = {"0": "<|mask|>", "1": "<|pad|>", "2": "<|eos|>"}
    added = {
        i: {"content": t, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
        for i, t in special.items()
    }
    settings = {
        "added_tokens_decoder": added, "auto_map": {"AutoTokenizer": ["tokenization_dream.DreamTokenizer", None]},
        "eos_token": "<|eos|>", "pad_token": "<|eos|>", "mask_token": "<|mask|>", "tokenizer_class": "DreamTokenizer",
    }  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "tokenization_dream.py").write_text("raise SystemExit('code of a checkpoint was run')")
    convert(str(path), str(tmp_path / "ours"))
    assert not list((tmp_path / "ours").glob("*.py"))
    _, tokenizer = load_model(tmp_path / "ours", device="cpu")
    assert isinstance(tokenizer, Qwen2Tokenizer)
    text = "the cat sat"
    assert tokenizer(text)["input_ids"] == pf.tokenizer()(text)["input_ids"]
    convert(str(tmp_path / "ours"), str(tmp_path / "back"), to="dream")
    assert json.loads((tmp_path / "back" / "tokenizer_config.json").read_text()) == settings
    other = folder(tmp_path / "other", "dream")
    (other / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "OtherTokenizer"}))
    assert "OtherTokenizer comes as code" in refusal(other)


def test_llada_moe_that_says_model_type_llada_is_recognised(tmp_path: Path) -> None:
    """dllm asks its users to edit config.json by hand."""
    assert "a mixture of experts (num_experts=64)" in refusal(folder(tmp_path, num_experts=64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llada2_moe"}, "a mixture of experts"),
        ({"model_type": "mdlm", "cond_dim": 128}, "LayerNorm and a time input"),
        ({"model_type": "bert"}, r"'bert' is not a format known here; known: mdlm, llada"),
        ({"model_type": None}, "None is not a format known here"),
    ],
)
def test_other_architectures_are_refused_with_a_reason(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert message in refusal(folder(tmp_path, **changes))


def test_a_head_stored_beside_a_tied_embedding(tmp_path: Path) -> None:
    """LLaDA #130, and Qwen2 checkpoints that store both."""
    path = tmp_path / "src"
    _, weights = pf.make_folder(path, "a2d-qwen2", tie_word_embeddings=True)
    embedding = weights["model.embed_tokens.weight"]
    save_file({**weights, "lm_head.weight": embedding.clone()}, path / "model.safetensors")
    model, _ = load_public(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    save_file({**weights, "lm_head.weight": embedding + 1}, path / "model.safetensors")
    assert "lm_head.weight differs from the embedding, but the configuration says they are one" in refusal(path)


def test_stored_rotary_frequencies_of_old_files_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "src"
    _, weights = pf.make_folder(path, "a2d-llama")
    frequencies = {f"model.layers.{n}.self_attn.rotary_emb.inv_freq": torch.ones(4) for n in range(2)}
    save_file({**weights, **frequencies}, path / "model.safetensors")
    convert(str(path), str(tmp_path / "ours"))
    assert "rotary" not in "".join(load_file(tmp_path / "ours" / "model.safetensors"))


@pytest.mark.parametrize("name", pf.CONFIGS)
def test_no_mask_is_left_in_the_output_of_a_converted_model(name: str, tmp_path: Path) -> None:
    """Diffulex #39 (all-mask output with LLaDA 1.5), SDAR (mask sampled: IndexError)."""
    pf.make_folder(tmp_path / "src", name)
    model, tokenizer = load_model(tmp_path / "src", device="cpu")
    out = generate(model, tokenizer, ["the cat", "a"], max_new_tokens=8, temperature=1.0)
    ids = torch.cat(out.tokens)
    assert int(out.new_tokens.min()) > 0
    assert 0 <= int(ids.min()) <= int(ids.max()) < model.config.num_tokens
    assert not bool((ids == model.config.mask_token_id).any())
    assert bool(torch.cat(out.log_probs)[torch.cat(out.step_map) >= 0].isfinite().all())


def test_the_commands_take_public_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pf.make_folder(tmp_path / "src", "dream")
    assert main(["sample", str(tmp_path / "src"), "--prompt", "the", "--max_new_tokens", "4", "--device", "cpu"]) == 0
    assert main(["convert", str(tmp_path / "src"), str(tmp_path / "ours")]) == 0
    assert "27 tensors, Dream -> mdlm" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "src"), str(tmp_path / "ours")]) == 1
    assert "exists already" in capsys.readouterr().err
    assert isinstance(load_model(tmp_path / "ours", device="cpu")[0], MDLMForMaskedLM)
