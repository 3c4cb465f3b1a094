"""`MDLMForMaskedLM.from_pretrained` of public folders: the same model as `mdlm convert` makes, with the same checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from public_folders import CONFIGS, MASK, make_folder, save_weights
from test_convert_causal import CAUSAL, make_causal
from transformers import AutoModelForMaskedLM

from mdlm.convert import convert
from mdlm.modeling import MDLMForMaskedLM, MDLMModel

IDS = torch.arange(24).view(2, 12) + 3


def same(one: MDLMForMaskedLM, other: MDLMForMaskedLM) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return one.config == other.config and a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_public_folder_is_what_convert_makes_of_it(name: str, tmp_path: Path) -> None:
    make_folder(tmp_path / "public", name)
    if name == "fast_dllm":  # it names its mask in the tokenizer only
        assert "mask_token_id" not in CONFIGS[name]
    convert(str(tmp_path / "public"), str(tmp_path / "ours"))
    direct = MDLMForMaskedLM.from_pretrained(tmp_path / "public")
    assert type(direct) is MDLMForMaskedLM
    assert not direct.training
    assert same(direct, MDLMForMaskedLM.from_pretrained(tmp_path / "ours"))
    direct.save_pretrained(tmp_path / "again")
    again = MDLMForMaskedLM.from_pretrained(str(tmp_path / "again"))
    assert torch.equal(again(IDS).logits, direct(IDS).logits)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_folder_needs_its_mask(name: str, tmp_path: Path) -> None:
    make_causal(tmp_path / "public", name)
    with pytest.raises(ValueError, match=r"is a causal model.*has no mask token"):
        MDLMForMaskedLM.from_pretrained(tmp_path / "public")
    options: dict[str, Any] = {"add_mask_token": True, "shift_logits": False, "block_size": 4}
    convert(str(tmp_path / "public"), str(tmp_path / "ours"), **options)
    direct = MDLMForMaskedLM.from_pretrained(tmp_path / "public", **options)
    assert (direct.config.shift_logits, direct.config.block_size) == (False, 4)
    assert same(direct, MDLMForMaskedLM.from_pretrained(tmp_path / "ours"))


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({}, torch.bfloat16),
        ({"dtype": "auto"}, torch.bfloat16),
        ({"dtype": torch.float32}, torch.float32),
        ({"dtype": "float16", "device_map": {"": "cpu"}}, torch.float16),
    ],
    ids=["stored", "auto", "float32", "float16"],
)
def test_precision_is_the_stored_one_or_the_one_asked_for(
    options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    make_folder(tmp_path / "public", "llada", dtype=torch.bfloat16, files=3)
    model = MDLMForMaskedLM.from_pretrained(tmp_path / "public", attn_implementation="eager", **options)
    assert {p.dtype for p in model.parameters()} == {dtype} == {model.dtype}
    assert model.config._attn_implementation == "eager"


def test_a_repository_of_the_hub_comes_out_of_the_cache(tmp_path: Path) -> None:
    commit = "0" * 40
    repository = tmp_path / "models--org--Dream-Tiny"
    make_folder(repository / "snapshots" / commit, "dream")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    model = MDLMForMaskedLM.from_pretrained("org/Dream-Tiny", cache_dir=tmp_path, local_files_only=True)
    assert same(model, MDLMForMaskedLM.from_pretrained(repository / "snapshots" / commit))
    with pytest.raises(OSError, match="couldn't find them in the cached files"):  # transformers' own words
        MDLMForMaskedLM.from_pretrained("org/Absent", cache_dir=tmp_path, local_files_only=True)


def test_our_own_folders_are_loaded_by_transformers_as_ever(tmp_path: Path) -> None:
    make_folder(tmp_path / "public", "a2d-qwen3")
    MDLMForMaskedLM.from_pretrained(tmp_path / "public").save_pretrained(tmp_path / "ours")
    model, info = MDLMForMaskedLM.from_pretrained(tmp_path / "ours", output_loading_info=True)  # type: ignore[misc]
    assert not info["missing_keys"]
    assert same(AutoModelForMaskedLM.from_pretrained(tmp_path / "ours"), model)
    assert isinstance(MDLMModel.from_pretrained(tmp_path / "ours"), MDLMModel)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trust_remote_code": True}, "trust_remote_code cannot be followed there .code in the folder is never run"),
        ({"quantization_config": object()}, "quantization_config cannot be followed"),
        ({"device_map": "auto"}, "device_map is 'auto'; a public checkpoint is loaded onto one device"),
        ({"device_map": {"model": "cpu"}}, "loaded onto one device"),
        ({"dtype": "floaty"}, "dtype is 'floaty'"),
        ({"mask_token_id": MASK + 1}, "mask_token_id=1 was asked for, but the checkpoint says"),
    ],
    ids=["code", "quantised", "map", "mapping", "dtype", "mask"],
)
def test_options_that_cannot_be_followed_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_folder(tmp_path / "public", "llada")
    with pytest.raises(ValueError, match=message):
        MDLMForMaskedLM.from_pretrained(tmp_path / "public", **options)


def test_half_downloaded_broken_and_misshapen_weights_are_refused(tmp_path: Path) -> None:
    _, weights = make_folder(tmp_path / "half", "llada", files=2)
    (tmp_path / "half" / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors is missing"):
        MDLMForMaskedLM.from_pretrained(tmp_path / "half")
    make_folder(tmp_path / "broken", "llada")
    name = "model.transformer.ln_f.weight"
    save_weights(tmp_path / "broken", {**weights, name: torch.full_like(weights[name], torch.nan)})
    with pytest.raises(ValueError, match="values that are NaN or infinite"):
        MDLMForMaskedLM.from_pretrained(tmp_path / "broken")
    make_folder(tmp_path / "shape", "llada")
    save_weights(tmp_path / "shape", {**weights, name: torch.ones(31)})
    with pytest.raises(ValueError, match=r"ln_f.weight has shape \[31\]; the configuration says \[32\]"):
        MDLMForMaskedLM.from_pretrained(tmp_path / "shape")
    public = json.loads((tmp_path / "shape" / "config.json").read_text())
    (tmp_path / "shape" / "config.json").write_text(json.dumps({**public, "model_type": "mamba"}))
    with pytest.raises(ValueError, match="model_type 'mamba' is not a format known here"):
        MDLMForMaskedLM.from_pretrained(tmp_path / "shape")
