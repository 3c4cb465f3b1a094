"""GPT-2 becomes a model of ours: exact logits, every shape of its files, and everything our models can do."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import public_folders as pf
import pytest
import reference_gpt2 as ref
import torch
from model_tools import batch, make_model
from safetensors.torch import load_file
from training_runs import arguments, fresh_accelerate, write_texts
from transformers import GPT2Config, GPT2LMHeadModel

from mdlm.adapter import AdapterConfig, attach
from mdlm.config import MDLMConfig
from mdlm.convert import convert, load_public
from mdlm.denoiser import ModelDenoiser
from mdlm.flops import forward_flops_per_token
from mdlm.load import load_model
from mdlm.modeling import MDLMForMaskedLM
from mdlm.samplers import generate
from mdlm.training.config import parse_config
from mdlm.training.loop import train
from mdlm.training.optim import OptimConfig, parameter_groups

LIKE_GPT2: dict[str, Any] = {
    "position_embedding": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True, "qkv_bias": True,
    "max_position_embeddings": 16, "num_key_value_heads": 4,
}  # fmt: skip


def make_gpt2(folder: Path, **changes: Any) -> GPT2LMHeadModel:
    """A random GPT-2 of `transformers`, saved by it, with a tokenizer that has no mask."""
    sizes: dict[str, Any] = {
        "vocab_size": 280, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.4,
        "bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    }  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**{**sizes, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    pf.maskless().save_pretrained(folder)
    return model.eval()


@pytest.mark.parametrize("untied", [False, True])
def test_blocks_of_one_token_and_shifted_logits_are_gpt2(untied: bool, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"tie_word_embeddings": not untied, "n_inner": 48 if untied else None}
    causal = make_gpt2(tmp_path / "src", layer_norm_epsilon=1e-3, **changes).double()
    weights = {name: value.double().numpy() for name, value in load_file(tmp_path / "src/model.safetensors").items()}
    ids = torch.randint(0, 280, (2, 17), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        raw = causal(input_ids=ids).logits
    for block_size in (1, None):
        model, _ = load_public(tmp_path / "src", torch.float64, mask_token_id=1, block_size=block_size)
        assert model.config.shift_logits
        with torch.no_grad():
            ours = model(ids).logits[:, 1:, :280]
        for row, answer in zip(ids.tolist(), ours):
            expected = ref.logits(weights, 2, 4, row, 1e-3, causal=block_size == 1)
            torch.testing.assert_close(answer, torch.from_numpy(expected[:-1]), rtol=1e-10, atol=1e-10)
        difference = float((ours - raw[:, :-1]).abs().max())
        assert difference < 1e-10 if block_size == 1 else difference > 0.1


def test_the_hubs_files_have_short_names_and_stored_masks(tmp_path: Path) -> None:
    make_gpt2(tmp_path / "long")
    weights = load_file(tmp_path / "long/model.safetensors")
    assert all(name.startswith("transformer.") for name in weights)
    make_gpt2(tmp_path / "short")
    short = {name.removeprefix("transformer."): value for name, value in weights.items()}
    short |= {f"h.{n}.attn.bias": torch.tril(torch.ones(64, 64))[None, None] for n in range(2)}
    short |= {f"h.{n}.attn.masked_bias": torch.tensor(-1e4) for n in range(2)}
    pf.save_weights(tmp_path / "short", short, files=3)
    one, other = (MDLMForMaskedLM.from_pretrained(tmp_path / name, mask_token_id=1) for name in ("long", "short"))
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values()))


def test_a_converted_folder_is_an_ordinary_checkpoint(tmp_path: Path) -> None:
    make_gpt2(tmp_path / "src")
    notes = convert(str(tmp_path / "src"), str(tmp_path / "ours"), add_mask_token=True, shift_logits=False)
    assert any("grew from 280 to 320 rows" in note for note in notes)
    model, tokenizer = load_model(tmp_path / "ours", device="cpu")
    assert model.config.mask_token_id == 280
    source = load_file(tmp_path / "src/model.safetensors")
    ours = load_file(tmp_path / "ours/model.safetensors")
    assert torch.equal(
        ours["model.layers.1.self_attn.k_proj.weight"].T, source["transformer.h.1.attn.c_attn.weight"][:, 32:64]
    )
    assert torch.equal(ours["model.embed_tokens.weight"][:280], source["transformer.wte.weight"])
    out = generate(model, tokenizer, ["the cat"], strategy="confidence", max_new_tokens=6, seed=0)
    assert 280 not in out.tokens[0].tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, "activation_function='relu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"scale_attn_weights": False}, "scale_attn_weights=False"),
        ({"n_embd": 64}, r"c_attn\.weight:q has shape \[32, 32\]; the configuration says \[64, 64\]"),
        ({"n_layer": 3}, r"transformer\.h\.2\.mlp\.c_proj\.bias \[32\] is missing"),
        ({"n_positions": 65}, r"transformer\.wpe\.weight has shape \[64, 32\]"),
        ({"rotary_dim": 8}, "rotary_dim=8 is not a key"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_our_model_cannot_follow_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_gpt2(tmp_path / "src")
    path = tmp_path / "src" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ValueError, match=message):
        load_public(tmp_path / "src", mask_token_id=1)


def test_gpt2_is_no_target_and_other_formats_refuse_its_parts(tmp_path: Path) -> None:
    make_model("sdpa", mask_token_id=0, eos_token_id=1, pad_token_id=1, **LIKE_GPT2).save_pretrained(tmp_path / "m")
    with pytest.raises(ValueError, match="--to gpt2: it must be one of"):
        convert(str(tmp_path / "m"), str(tmp_path / "out"), to="gpt2")
    with pytest.raises(ValueError, match=r"no place for .*position_embedding='learned'.*norm='layernorm'.*mlp='gelu'"):
        convert(str(tmp_path / "m"), str(tmp_path / "out"), to="a2d-qwen2")


# --- what every model of ours does


def test_packed_and_padded_rows_answer_as_they_do_alone() -> None:
    model = make_model("sdpa", **LIKE_GPT2)
    lengths = [4, 1, 3, 6]
    documents = [torch.randint(0, 24, (1, n)) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(torch.cat(documents, 1), position_ids=positions).logits[0].split(lengths)
    for together, document in zip(packed, documents):
        torch.testing.assert_close(together, model(document).logits[0], rtol=1e-4, atol=1e-4)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), documents[3]], 1)
    mask = torch.tensor([[0] * 5 + [1] * 6])
    alone = model(documents[3]).logits
    torch.testing.assert_close(model(padded, attention_mask=mask).logits[:, 5:], alone, rtol=1e-4, atol=1e-4)


def test_order_matters() -> None:
    model = make_model("sdpa", **LIKE_GPT2)
    ids = torch.tensor([[3, 4, 5, 6]])
    assert not torch.allclose(model(ids).logits.flip(1), model(ids.flip(1)).logits, atol=1e-2)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_save_load_and_gradients(implementation: str, tmp_path: Path) -> None:
    model = make_model(implementation, **LIKE_GPT2)
    arguments, _ = batch("packed and padded")
    model(**arguments).logits.sin().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.save_pretrained(tmp_path)
    again = MDLMForMaskedLM.from_pretrained(tmp_path, attn_implementation=implementation)
    assert again.config == model.config
    assert torch.equal(again(**arguments).logits, model(**arguments).logits)


def test_stored_keys_and_values_of_blocks_are_exact() -> None:
    model = make_model("sdpa", torch.float64, block_size=4, mask_token_id=0, eos_token_id=1, **LIKE_GPT2).eval()
    outs = [
        generate(
            ModelDenoiser(model),
            None,
            torch.tensor([[5, 6, 7]]),
            strategy="sdar",
            max_new_tokens=9,
            cache=cache,
            seed=3,
        )
        for cache in ("none", "block")
    ]
    assert torch.equal(outs[0].tokens[0], outs[1].tokens[0])


def test_initial_weights_and_groups() -> None:
    torch.manual_seed(0)
    options = {**LIKE_GPT2, "max_position_embeddings": 512, "hidden_size": 64, "vocab_size": 512}
    model = MDLMForMaskedLM(MDLMConfig(num_hidden_layers=2, num_attention_heads=4, **options))
    weights = dict(model.named_parameters())
    assert weights["model.layers.0.mlp.up_proj.weight"].shape == (256, 64)
    assert float(weights["model.embed_positions.weight"].detach().std()) == pytest.approx(0.02, rel=0.05)
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            assert (weight == 1).all(), name
        elif name.endswith("bias"):
            assert (weight == 0).all(), name
    groups = {g["name"]: {id(p) for p in g["params"]} for g in parameter_groups(model, OptimConfig(name="muon"))}
    assert id(weights["model.embed_positions.weight"]) in groups["decay"]
    assert len(groups["muon"]) == 2 * 6
    attach(model, AdapterConfig(r=2))  # the default targets name a gate, which this MLP has not
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 2 * 6


def test_flops_follow_the_mlp() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 64}
    gated, plain = (forward_flops_per_token(MDLMConfig(mlp=mlp, **sizes), 8) for mlp in ("swiglu", "gelu"))
    assert gated - plain == 2 * 32 * 64


@pytest.fixture
def _fresh_accelerate() -> Iterator[None]:
    with fresh_accelerate():
        yield


@pytest.mark.usefixtures("_fresh_accelerate")
def test_a_run_starts_from_it(tmp_path: Path) -> None:
    make_gpt2(tmp_path / "src")
    convert(str(tmp_path / "src"), str(tmp_path / "ours"), add_mask_token=True)
    texts = write_texts(tmp_path / "texts", documents=4)
    flags = arguments(texts, tmp_path / "run", model__init_from=tmp_path / "ours", train__steps=2)
    sizes = ("--model.hidden_size", "--model.num_hidden_layers", "--tokenizer.vocab_size")
    checkpoint = train(parse_config([flag for flag in flags if not flag.startswith(sizes)]))
    assert checkpoint is not None
    assert MDLMForMaskedLM.from_pretrained(checkpoint).config.position_embedding == "learned"
