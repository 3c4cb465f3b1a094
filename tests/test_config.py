"""The configuration, and the model as a `transformers` model: saving, Auto classes, resizing, adapters."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from model_tools import VOCAB, make_model
from safetensors import safe_open
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM
from transformers.models.auto import configuration_auto, modeling_auto

import mdlm
from mdlm import auto
from mdlm.config import MDLMConfig
from mdlm.modeling import MDLMForMaskedLM, MDLMModel

IDS = torch.arange(8).view(1, 8)


def test_what_is_left_out_is_filled_in() -> None:
    config = MDLMConfig(vocab_size=64, hidden_size=192, num_attention_heads=6)
    assert (config.num_tokens, config.num_key_value_heads, config.head_dim) == (64, 6, 32)
    assert config.intermediate_size == 512, "8/3 of 192"
    assert MDLMConfig(hidden_size=96, num_attention_heads=2).intermediate_size == 256, "8/3 of 96 is 256 exactly"
    assert MDLMConfig(hidden_size=100, num_attention_heads=2).intermediate_size == 320, "266.7 rounded up"
    assert config.rope_theta == 10000.0


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "misspelt": ({"num_layers": 3}, "no option 'num_layers'; did you mean 'num_hidden_layers'"),
    "zero width": ({"hidden_size": 0}, "hidden_size is 0; it must be a positive integer"),
    "true for a number": ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    "text for a number": ({"vocab_size": "32"}, "vocab_size is '32'"),
    "heads that do not divide": ({"hidden_size": 30, "num_attention_heads": 4}, "not a multiple.*give head_dim"),
    "key heads that do not divide": ({"num_attention_heads": 4, "num_key_value_heads": 3}, "does not divide"),
    "odd heads": ({"head_dim": 5}, "head_dim=5 is odd"),
    "more tokens than rows": ({"vocab_size": 64, "num_tokens": 65}, "num_tokens=65 ids do not fit.*64 rows"),
    "norm placement": ({"norm_placement": "sandwitch"}, "norm_placement='sandwitch' is unknown; allowed: pre, post"),
    "rope type": (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "'dynamic' is unknown; allowed: default",
    ),
    "rope base": ({"rope_theta": 0.0}, "rope_theta is 0.0"),
    "epsilon": ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    "a word for a switch": ({"qk_norm": "no"}, "qk_norm is 'no'; it must be True or False"),
    "blocks of nothing": ({"block_size": 0}, "block_size is 0"),
    "a mask that is padding": ({"num_tokens": 60, "mask_token_id": 60}, "mask_token_id=60 is not an id.*0 .. 59"),
    "a negative id": ({"eos_token_id": -1}, "eos_token_id=-1"),
    "mask = pad": ({"mask_token_id": 3, "pad_token_id": 3}, "mask_token_id and pad_token_id are both 3"),
    "mask = eos": ({"mask_token_id": 0, "eos_token_id": 0}, "mask_token_id and eos_token_id are both 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_values_are_refused(case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        MDLMConfig(**{"vocab_size": 64, **options})


def test_padding_may_be_the_end_of_text() -> None:
    config = MDLMConfig(vocab_size=64, mask_token_id=0, pad_token_id=2, eos_token_id=2)
    assert (config.mask_token_id, config.pad_token_id, config.eos_token_id) == (0, 2, 2)


def test_round_trip_through_json(tmp_path: Path, tiny_config: MDLMConfig) -> None:
    config = MDLMConfig(
        vocab_size=128, num_tokens=100, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, head_dim=10,
        num_key_value_heads=2, intermediate_size=72, max_position_embeddings=33, rope_theta=77.0, rms_norm_eps=1e-3,
        qkv_bias=True, qk_norm=True, tie_word_embeddings=False, block_size=4, shift_logits=True, initializer_range=0.1,
        mask_token_id=9, pad_token_id=8, eos_token_id=7, bos_token_id=6,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is MDLMConfig
    assert loaded == config == copy.deepcopy(config)
    assert loaded != tiny_config
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "mdlm"
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 77.0}
    for name in ("num_tokens", "tie_word_embeddings", "mask_token_id", "bos_token_id", "shift_logits", "block_size"):
        assert written[name] == getattr(config, name), name


def test_a_hand_edited_file_with_a_misspelt_key_is_refused(tmp_path: Path, tiny_config: MDLMConfig) -> None:
    tiny_config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "blocksize": 4}))
    with pytest.raises(ValueError, match="no option 'blocksize'; did you mean 'block_size'"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_save_and_load(tmp_path: Path, tied: bool) -> None:
    model = make_model("sdpa", tie_word_embeddings=tied, qkv_bias=True, qk_norm=True)
    model.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) != tied, "a tied matrix is stored once"  # noqa: SIM118
    for loader in (AutoModelForMaskedLM, MDLMForMaskedLM):
        loaded, report = loader.from_pretrained(tmp_path, output_loading_info=True)  # type: ignore[misc]
        assert not any(report.values()), report
        assert type(loaded) is MDLMForMaskedLM
        assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
        assert loaded.num_parameters() == model.num_parameters()
        assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    backbone = AutoModel.from_pretrained(tmp_path)
    assert type(backbone) is MDLMModel
    assert torch.equal(backbone(IDS).last_hidden_state, model.model(IDS).last_hidden_state)
    half = AutoModelForMaskedLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
    assert half.dtype == torch.bfloat16
    assert half.config._attn_implementation == "eager"
    assert half(IDS).logits.dtype == torch.bfloat16


def test_attention_can_be_switched_and_unknown_names_are_refused() -> None:
    model = make_model("sdpa")
    model.set_attn_implementation("eager")
    assert model(IDS, output_attentions=True).attentions is not None
    with pytest.raises(ValueError, match="attn_implementation"):
        model.set_attn_implementation("fast")


@pytest.mark.parametrize("return_dict", [True, False])
def test_outputs_may_be_a_tuple(return_dict: bool) -> None:
    model = make_model()
    out = model(IDS, return_dict=return_dict)
    assert isinstance(out, tuple) != return_dict
    assert torch.equal(out[0], model(IDS).logits)
    assert torch.equal(model.model(IDS, return_dict=return_dict)[0], model.model(IDS).last_hidden_state)


@pytest.mark.parametrize("tied", [True, False])
def test_resizing_keeps_what_is_known_and_knows_what_is_padding(tied: bool) -> None:
    model = make_model(tie_word_embeddings=tied, mask_token_id=VOCAB - 1)
    before = model(IDS).logits
    model.resize_token_embeddings(VOCAB + 2, pad_to_multiple_of=64, mean_resizing=False)
    assert (model.config.vocab_size, model.config.num_tokens) == (64, VOCAB + 2)
    assert model.lm_head.weight.shape == model.model.embed_tokens.weight.shape == (64, 16)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    torch.testing.assert_close(model(IDS).logits[..., :VOCAB], before)
    with pytest.raises(ValueError, match=f"no room for config.mask_token_id={VOCAB - 1}"):
        model.resize_token_embeddings(VOCAB - 1)
    assert model.config.vocab_size == 64


def test_the_units_of_sharding_exist() -> None:
    model = make_model()
    assert {"MDLMLayer"} == set(model._no_split_modules) <= {type(m).__name__ for m in model.modules()}


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # by peft
def test_low_rank_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = make_model("sdpa", dtype=torch.float32)
    before = model(IDS).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 2 * 7, "two matrices for each of seven projections in two layers, none for the head"
    at = torch.arange(8).view(1, 8) < 3
    logits = adapted(IDS, logits_at=at).logits
    logits.sum().backward()
    assert not torch.allclose(logits, before[at])
    adapted.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(make_model("sdpa"), tmp_path)
    torch.testing.assert_close(again(IDS, logits_at=at).logits, logits)


_PLAIN_IMPORT = """
import inspect, sys
import mdlm
assert "torch" not in sys.modules and "transformers" not in sys.modules, "import mdlm must stay cheap"
import transformers.modeling_layers  # which loads the Auto classes while transformers is half imported
import transformers.models.auto.modeling_auto as auto
assert "mdlm.modeling" not in sys.modules
assert "MODEL_MAPPING" in inspect.getsource(auto) and auto.__spec__.origin == auto.__file__
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM
model = AutoModelForMaskedLM.from_pretrained(sys.argv[1])
assert type(model) is mdlm.MDLMForMaskedLM and type(model.config) is mdlm.MDLMConfig
assert type(AutoModel.from_config(model.config)) is mdlm.MDLMModel
"""


def test_a_plain_import_is_cheap_and_teaches_the_auto_classes(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    subprocess.run([sys.executable, "-W", "error", "-c", _PLAIN_IMPORT, str(tmp_path)], check=True)


def test_auto_classes_loaded_before_mdlm_are_taught_too(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [finder for finder in sys.meta_path if not isinstance(finder, auto._AfterImport)]
    assert len(others) == len(sys.meta_path) - 1
    monkeypatch.setattr(sys, "meta_path", list(others))
    monkeypatch.delitem(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING._model_mapping, "mdlm")
    monkeypatch.delitem(configuration_auto.CONFIG_MAPPING._extra_content, "mdlm")
    config = MDLMConfig(vocab_size=8, hidden_size=8, num_attention_heads=2)
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        AutoModelForMaskedLM.from_config(config)
    auto.register()
    auto.register()
    assert type(AutoModelForMaskedLM.from_config(config)) is MDLMForMaskedLM
    assert AutoConfig.for_model("mdlm", vocab_size=8, hidden_size=8, num_attention_heads=2) == config
    assert len(sys.meta_path) == len(others) + 1


def test_the_package_offers_its_names() -> None:
    assert mdlm.MDLMConfig is MDLMConfig
    assert mdlm.MDLMForMaskedLM is MDLMForMaskedLM
    assert mdlm.MDLMModel is MDLMModel
