"""QLoRA: what the base is rounded to, that only the adapter learns, that loading and merging give the model trained."""

from __future__ import annotations

import builtins
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from model_tools import batch, make_model
from public_folders import make_folder
from safetensors.torch import load_file
from test_lora import logits, tuned
from test_sft import RUN, pairs
from training_runs import assert_same, configure, fresh_accelerate, records

from mdlm import cli
from mdlm.adapter import AdapterConfig, attach, base_hash
from mdlm.load import load_model
from mdlm.modeling import MDLMForMaskedLM
from mdlm.quantize import Quantization, quantize, quantized_layers, rounded
from mdlm.training.loop import start, train, train_to_end

bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
KINDS: tuple[Quantization, ...] = ("nf4", "int8")
NF4 = (
    -1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302,
    0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0,
)  # fmt: skip
"""Dettmers et al., 2305.14314, appendix E."""


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    with fresh_accelerate():
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in pairs(40)))
    return path


@pytest.fixture(scope="module")
def base(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with fresh_accelerate():
        checkpoint = train(configure(data, tmp_path_factory.mktemp("base") / "run", **RUN))
    assert checkpoint is not None
    return checkpoint


OPTIONS: dict[str, Any] = {"lora__quantize": "nf4", "lora__dropout": 0.1, "train__ema": 0.9, "validation__every": 3}


@pytest.fixture(scope="module")
def adapted(data: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with fresh_accelerate():
        checkpoint = train(tuned(data, tmp_path_factory.mktemp("qlora") / "run", base, **OPTIONS))
    assert checkpoint is not None
    return checkpoint


def test_nf4_is_the_nearest_of_sixteen_levels_times_the_blocks_largest_value() -> None:
    weight = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
    levels = np.array(NF4)
    expected = np.empty((24, 64))
    for row, block in enumerate(weight.double().numpy()):
        largest = np.abs(block).max()
        expected[row] = [levels[np.abs(levels - w / largest).argmin()] * largest for w in block]
    # the blocks' largest values are themselves stored in 8 bits
    scale = np.abs(weight.numpy()).max(axis=1, keepdims=True)
    assert (np.abs(rounded(weight, "nf4").double().numpy() - expected) / scale).max() < 0.03
    assert np.abs(rounded(weight, "nf4").numpy() - weight.numpy()).max() > 0.1


def test_int8_is_127_steps_of_each_rows_largest_value() -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    step = weight.abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(rounded(weight, "int8"), (weight / step).round() * step, rtol=2e-3, atol=0.02)
    assert ((rounded(weight, "int8") - weight).abs() < 0.6 * step).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_model_computes_with_the_rounded_weights(kind: Quantization) -> None:
    options: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "qkv_bias": True}
    model, plain = (make_model("sdpa", initializer_range=0.1, **options).eval() for _ in range(2))
    quantize(model, kind, torch.float32)
    assert all(m.weight.dtype in (torch.uint8, torch.int8) for m in quantized_layers(model).values())
    for module in quantized_layers(plain).values():
        module.weight.data.copy_(rounded(module.weight.data, kind))
    arguments, real = batch("packed and padded")
    with torch.no_grad():
        ours, expected, whole = (
            m(**arguments).logits[real] for m in (model, plain, make_model("sdpa", initializer_range=0.1, **options))
        )
    error, effect = float((ours - expected).abs().max()), float((expected - whole).abs().max())
    if kind == "nf4":
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)
        assert effect > 0.01
    else:  # inputs are rounded, too
        assert error < 0.05 * float(expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_adapter_learns_also_after_an_evaluation(kind: Quantization, base: Path) -> None:
    model = MDLMForMaskedLM.from_pretrained(base)
    digest = base_hash(model)
    assert attach(model, AdapterConfig(r=4, quantize=kind)) == digest
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2
    assert all("lora_" in name for name in trained)
    logits(model.eval())  # must not repack the weights for inference
    model.train()(torch.arange(24).view(2, 12) + 3).logits.sin().sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == trained
    assert all(g.isfinite().all() for g in gradients.values())
    assert all((g != 0).any() for name, g in gradients.items() if "lora_B" in name)


def test_a_checkpoint_loads_as_the_model_that_was_trained(
    adapted: Path, base: Path, data: Path, tmp_path: Path
) -> None:
    run = start(tuned(data, tmp_path / "run", base, **{**OPTIONS, "train__ema": None}))
    train_to_end(run)
    assert all(np.isfinite([line["loss"] for line in records(tmp_path / "run", "train")]))
    checkpoint = tmp_path / "run" / "checkpoint-6"
    assert json.loads((checkpoint / "adapter" / "base.json").read_text())["quantize"] == "nf4"
    loaded, _ = load_model(checkpoint, device="cpu")
    assert type(loaded) is MDLMForMaskedLM
    torch.testing.assert_close(logits(loaded), logits(run.core.eval()), rtol=1e-3, atol=1e-3)
    unrounded = load_file(base / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    parts = load_file(checkpoint / "adapter" / "adapter_model.safetensors")
    key = f"base_model.model.{name.removesuffix('.weight')}"
    delta = 2.0 * parts[f"{key}.lora_B.weight"] @ parts[f"{key}.lora_A.weight"]
    torch.testing.assert_close(loaded.state_dict()[name], rounded(unrounded[name], "nf4") + delta)
    assert not torch.allclose(loaded.state_dict()[name], unrounded[name] + delta, atol=1e-3)


def test_a_run_resumes_bit_by_bit(adapted: Path, base: Path, data: Path, tmp_path: Path) -> None:
    again = train(tuned(data, tmp_path / "run", base, resume=adapted.parent / "checkpoint-3", **OPTIONS))
    assert again is not None
    assert_same(adapted, again)
    options = {**OPTIONS, "lora__quantize": None, "resume": adapted.parent / "checkpoint-3"}
    with fresh_accelerate(), pytest.raises(ValueError, match="--lora was"):
        start(tuned(data, tmp_path / "other", base, **options))


def test_merging_and_sampling(adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["merge", str(adapted), str(tmp_path / "merged")]) == 0
    merged, _ = load_model(tmp_path / "merged", device="cpu")
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    assert torch.equal(logits(merged), logits(load_model(adapted, device="cpu")[0]))
    assert cli.main(["sample", str(adapted), "--prompt", "the cat", "--max_new_tokens", "4"]) == 0
    assert capsys.readouterr().out


def test_a_public_base_stays_in_its_precision_until_it_is_rounded(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "llada", "llada", dtype=torch.bfloat16)
    seen = []
    original = quantize

    def spy(model: MDLMForMaskedLM, *rest: Any) -> None:
        seen.append({p.dtype for p in model.parameters()})
        original(model, *rest)

    monkeypatch.setattr("mdlm.adapter.quantize", spy)
    run = start(tuned(data, tmp_path / "run", tmp_path / "llada", lora__quantize="nf4"))
    assert seen == [{torch.bfloat16}]
    assert {p.dtype for p in run.core.parameters()} == {torch.uint8, torch.float32}
    assert train_to_end(run) is not None


def test_without_bitsandbytes_the_error_names_the_extra(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def fail(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "bitsandbytes":
            raise ImportError("No module named 'bitsandbytes'")
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fail)
    with pytest.raises(ValueError, match=r"pip install 'mdlm-torch\[qlora\]'"):
        quantize(MDLMForMaskedLM.from_pretrained(base), "nf4", torch.float32)


def test_rounding_without_an_adapter_has_no_effect_and_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lora\.quantize have no effect without lora\.r"):
        AdapterConfig(quantize="nf4")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_the_same_bits_are_computed_with(kind: Quantization) -> None:
    model = make_model("sdpa", hidden_size=64, intermediate_size=64, head_dim=16, initializer_range=0.1)
    attach(model, AdapterConfig(r=4, quantize=kind))
    tokens = batch("dense")[0]["input_ids"]
    expected = model(tokens).logits.detach()
    moved = torch.nn.Module.to(model, "cuda")
    out = moved(tokens.cuda()).logits
    torch.testing.assert_close(out.detach().cpu(), expected, rtol=0.05, atol=0.05)
    out.sin().sum().backward()
    assert all(p.grad is not None for p in moved.parameters() if p.requires_grad)
