"""Stability options of the block: what depth does to signal and gradient at the start, and that everything else works.

The equations themselves are tested against the float64 reference in `test_modeling.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_tools import VOCAB, batch, make_model
from torch import Tensor
from torch.nn import functional as F

from mdlm.adapter import AdapterConfig, attach
from mdlm.config import LINEARS, NORM_PLACEMENTS, MDLMConfig
from mdlm.convert import convert
from mdlm.layers import rotary_angles, rotate
from mdlm.modeling import MDLMForMaskedLM
from mdlm.training.optim import OptimConfig, build_optimizer, parameter_groups

WIDTH = 64
DEPTHS = (2, 8, 64)
OPTIONS: dict[str, dict[str, Any]] = {
    **{placement: {"norm_placement": placement} for placement in NORM_PLACEMENTS},
    "sdd": {"linear": "sdd"},
    "span sdd": {"norm_placement": "span", "linear": "sdd"},
}


def at_start(layers: int, **options: Any) -> tuple[float, float]:
    """Mean square of the stream that enters the last layer; gradient norm of the first layer over the last one's.

    The initial weights keep the scale of a normalised vector (standard deviation 1 / sqrt(width)), so that every
    branch counts: with much smaller ones every placement is near the identity.
    """
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_attention_heads": 4}
    model = MDLMForMaskedLM(MDLMConfig(num_hidden_layers=layers, initializer_range=WIDTH**-0.5, **sizes, **options))
    tokens, targets = torch.randint(0, VOCAB, (2, 4, 16))
    out = model(tokens, output_hidden_states=True)
    F.cross_entropy(out.logits.flatten(0, 1), targets.flatten()).backward()
    norms = [
        sum(float(p.grad.square().sum()) for p in model.model.layers[n].parameters() if p.grad is not None) ** 0.5
        for n in (0, -1)
    ]
    return float(out.hidden_states[-2].detach().square().mean()), norms[0] / norms[1]


@pytest.mark.parametrize("linear", LINEARS)
@pytest.mark.parametrize("placement", NORM_PLACEMENTS)
def test_the_stream_at_the_start_is_as_large_as_theory_says(placement: str, linear: str) -> None:
    for layers in DEPTHS:
        square, _ = at_start(layers, norm_placement=placement, linear=linear)
        if placement == "peri":  # two branches of mean square 1 a layer
            assert 0.75 < square / (2 * (layers - 1)) < 1.25
        elif placement in ("post", "span", "deepnorm"):
            assert square == pytest.approx(1.0, abs=0.01)
        else:  # pre: all branches together add up to at most 2; hybrid: 1 and one branch
            assert square < 3.0


@pytest.mark.parametrize(
    ("placement", "linear", "limit"),
    [
        ("span", "dense", 16),  # product over layers of sqrt(1 + 1 / layers), times constants: saturates
        ("hybrid", "dense", 16),
        ("deepnorm", "dense", 16),
        ("post", "sdd", 16),
        ("span", "sdd", 16),
        ("pre", "dense", 64),  # grows with the stream, about as sqrt(layers)
        ("peri", "dense", 64),
    ],
)
def test_gradients_of_the_first_and_last_layer_stay_comparable(placement: str, linear: str, limit: float) -> None:
    for layers in DEPTHS:
        _, ratio = at_start(layers, norm_placement=placement, linear=linear)
        assert 1 / limit < ratio < limit, layers


def test_with_post_the_gradient_explodes_with_depth() -> None:
    ratios = [at_start(layers, norm_placement="post")[1] for layers in DEPTHS]
    assert ratios[0] < 2
    assert ratios[2] > 1000


def test_pre_is_the_plain_model_bit_for_bit() -> None:
    model = make_model("sdpa")
    weights = model.state_dict()
    per_layer = {f"self_attn.{x}_proj" for x in "qkvo"} | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    per_layer |= {"input_layernorm", "post_attention_layernorm"}
    expected = {f"model.layers.{n}.{name}.weight" for n in range(2) for name in per_layer}
    assert set(weights) == expected | {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}

    tokens = batch("dense")[0]["input_ids"]

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (16,), weights[f"{name}.weight"], 1e-6)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}_proj.weight"])

    rotation = rotary_angles(model.config, torch.arange(9)[None])
    h = F.embedding(tokens, weights["model.embed_tokens.weight"])
    for n in range(2):
        at = f"model.layers.{n}"
        x = norm(h, f"{at}.input_layernorm")
        q, k, v = (linear(x, f"{at}.self_attn.{name}").view(2, 9, -1, 4).transpose(1, 2) for name in "qkv")
        q, k = rotate(q, *rotation), rotate(k, *rotation)
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mixed = F.scaled_dot_product_attention(q, k, v, scale=0.5)
        h = h + linear(mixed.transpose(1, 2).reshape(2, 9, 16), f"{at}.self_attn.o")
        x = norm(h, f"{at}.post_attention_layernorm")
        h = h + linear(F.silu(linear(x, f"{at}.mlp.gate")) * linear(x, f"{at}.mlp.up"), f"{at}.mlp.down")
    plain = F.linear(norm(h, "model.norm"), weights["lm_head.weight"])
    assert torch.equal(model(tokens).logits, plain)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # its new name is younger than v5
@pytest.mark.parametrize("name", OPTIONS)
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    gradients = []
    for checkpointed in (False, True):
        model = make_model("sdpa", **OPTIONS[name]).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**batch("packed and padded")[0]).logits.sin().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert all(g is not None for g in gradients[0].values())
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("name", OPTIONS)
def test_save_and_load(name: str, tmp_path: Path) -> None:
    model = make_model("sdpa", **OPTIONS[name])
    model.save_pretrained(tmp_path)
    again = MDLMForMaskedLM.from_pretrained(tmp_path)
    assert again.config == model.config
    tokens = batch("dense")[0]["input_ids"]
    assert torch.equal(again(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "pre"])
def test_public_formats_refuse_what_they_cannot_say(name: str, tmp_path: Path) -> None:
    make_model("sdpa", mask_token_id=0, eos_token_id=1, pad_token_id=1, **OPTIONS[name]).save_pretrained(tmp_path / "m")
    option, value = next(iter(OPTIONS[name].items()))
    with pytest.raises(ValueError, match=f"has no place for .*{option}='{value}'"):
        convert(str(tmp_path / "m"), str(tmp_path / "out"), to="a2d-llama")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", OPTIONS)
def test_an_adapter_sits_on_the_matrix_so_that_it_can_be_merged(name: str) -> None:
    model, merged = make_model("sdpa", **OPTIONS[name]), make_model("sdpa", **OPTIONS[name])
    attach(model, AdapterConfig(r=2, alpha=2.0))
    tensors = dict(model.named_parameters())
    with torch.no_grad():
        for key, tensor in tensors.items():
            if "lora_B" in key:
                tensor.normal_(std=0.3)
        for key, tensor in merged.named_parameters():
            place = key.removesuffix(".weight")
            if f"{place}.lora_A.default.weight" in tensors:
                tensor += tensors[f"{place}.lora_B.default.weight"] @ tensors[f"{place}.lora_A.default.weight"]
    tokens = batch("dense")[0]["input_ids"]
    plain = make_model("sdpa", **OPTIONS[name])(tokens).logits
    assert not torch.allclose(model(tokens).logits, plain, atol=1e-2)
    torch.testing.assert_close(model(tokens).logits, merged(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OPTIONS)
def test_muon_takes_the_matrices_and_no_scale_decays(name: str) -> None:
    model = make_model("sdpa", **OPTIONS[name])
    by_id = {id(p): n for n, p in model.named_parameters()}
    groups = {g["name"]: {by_id[id(p)] for p in g["params"]} for g in parameter_groups(model, OptimConfig(name="muon"))}
    matrices = {n for n, p in model.named_parameters() if p.ndim == 2}
    assert groups["muon"] == {n for n in matrices if "_proj" in n}
    assert groups["no_decay"] == set(by_id.values()) - matrices
    optimizer = build_optimizer(model, OptimConfig(name="muon"))
    before = {n: p.clone() for n, p in model.named_parameters()}
    model(batch("dense")[0]["input_ids"]).logits.sin().sum().backward()
    optimizer.step()
    assert all((p != before[n]).any() for n, p in model.named_parameters())


@pytest.mark.parametrize("layers", [2, 8])
def test_initial_scales_of_sdd_and_deepnorm(layers: int) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 128, "num_hidden_layers": layers}
    decoupled = MDLMForMaskedLM(MDLMConfig(linear="sdd", **sizes)).state_dict()
    alphas = {name: tensor for name, tensor in decoupled.items() if name.endswith("_scale.weight")}
    assert len(alphas) == 7 * layers
    for name, alpha in alphas.items():
        expected = layers**-0.5 if "o_scale" in name or "down_scale" in name else 1.0
        assert (alpha == torch.tensor(expected)).all(), name
    scaled = MDLMForMaskedLM(MDLMConfig(norm_placement="deepnorm", **sizes)).state_dict()
    for name, tensor in scaled.items():
        if "_proj" in name:
            small = name.rpartition(".")[0].rpartition(".")[2] in ("v_proj", "o_proj", "up_proj", "down_proj")
            assert float(tensor.std()) == pytest.approx(0.02 * (8 * layers) ** (-0.25 * small), rel=0.05), name


def test_biases_beside_decoupled_projections_are_refused() -> None:
    with pytest.raises(ValueError, match="set qkv_bias=False"):
        MDLMConfig(linear="sdd", qkv_bias=True)
    with pytest.raises(ValueError, match="linear='sparse' is unknown; allowed: dense, sdd"):
        MDLMConfig(linear="sparse")
