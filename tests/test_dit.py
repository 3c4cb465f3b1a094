"""MDLM's and BD3-LM's own checkpoints: log-probabilities against the equations in float64, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import public_folders as pf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mdlm.data import Batch
from mdlm.dit import load_dit
from mdlm.eval.likelihood import nelbo
from mdlm.eval.likelihood_conditional import conditional
from mdlm.load import load_model
from mdlm.samplers.generate import generate

ROWS, WIDTH, COND, HEADS = 281, 24, 10, 3
MASK = 280
CONFIGS: dict[str, dict[str, Any]] = {
    "mdlm": {
        "architectures": ["MDLM"], "auto_map": {"AutoConfig": "configuration_mdlm.MDLMConfig"}, "cond_dim": COND,
        "dropout": 0.1, "hidden_dim": WIDTH, "model_length": 32, "model_type": "mdlm", "n_blocks": 2, "n_heads": HEADS,
        "return_dict": False, "time_conditioning": False, "torch_dtype": "float32", "vocab_size": ROWS,
    },
}  # fmt: skip
CONFIGS["bd3lm"] = {
    **CONFIGS["mdlm"], "architectures": ["BD3LM"], "model_type": "bd3lm", "block_size": 4, "cross_attn": True,
    "adaln": True, "attn_backend": "flex", "causal": False, "var_min": True, "sampling_eps_min": 1e-3,
    "sampling_eps_max": 1.0,
}  # fmt: skip


def make_dit(folder: Path, name: str, **changes: Any) -> dict[str, Tensor]:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return 0.3 * torch.randn(shape, generator=generator)

    w = {
        "backbone.vocab_embed.embedding": draw(ROWS, WIDTH) * 3,
        "backbone.sigma_map.mlp.0.weight": draw(COND, 256),
        "backbone.sigma_map.mlp.0.bias": draw(COND),
        "backbone.sigma_map.mlp.2.weight": draw(COND, COND),
        "backbone.sigma_map.mlp.2.bias": draw(COND),
        "backbone.rotary_emb.inv_freq": draw(4),
        "backbone.output_layer.norm_final.weight": 1 + draw(WIDTH),
        "backbone.output_layer.linear.weight": draw(ROWS, WIDTH),
        "backbone.output_layer.linear.bias": draw(ROWS),
        "backbone.output_layer.adaLN_modulation.weight": draw(2 * WIDTH, COND),
        "backbone.output_layer.adaLN_modulation.bias": draw(2 * WIDTH),
    }
    for n in range(2):
        at = f"backbone.blocks.{n}."
        w |= {at + "norm1.weight": 1 + draw(WIDTH), at + "norm2.weight": 1 + draw(WIDTH)}
        w |= {at + "attn_qkv.weight": draw(3 * WIDTH, WIDTH), at + "attn_out.weight": draw(WIDTH, WIDTH)}
        w |= {at + "mlp.0.weight": draw(4 * WIDTH, WIDTH), at + "mlp.0.bias": draw(4 * WIDTH)}
        w |= {at + "mlp.2.weight": draw(WIDTH, 4 * WIDTH), at + "mlp.2.bias": draw(WIDTH)}
        w |= {at + "adaLN_modulation.weight": draw(6 * WIDTH, COND), at + "adaLN_modulation.bias": draw(6 * WIDTH)}
    save_file(w, folder / "model.safetensors", metadata={"format": "pt"})
    return w


def reference(weights: dict[str, Tensor], ids: Tensor, block_size: int | None) -> Tensor:
    """Log-probabilities [seq, rows] of one row by loops over tokens and heads; the mask has none."""
    w = {name.removeprefix("backbone."): t.double() for name, t in weights.items()}
    seq, dim = len(ids), WIDTH // HEADS

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        centred = x - x.mean()
        return weight * centred / torch.sqrt((centred**2).mean() + 1e-5)

    def gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def turned(x: Tensor, position: int) -> Tensor:
        out = x.clone()
        for j in range(dim // 2):
            angle = position * 10000 ** (-2 * j / dim)
            a, b = x[j], x[j + dim // 2]
            out[j] = a * math.cos(angle) - b * math.sin(angle)
            out[j + dim // 2] = b * math.cos(angle) + a * math.sin(angle)
        return out

    level = torch.cat((torch.ones(128), torch.zeros(128))).double()  # cosines and sines of noise level 0
    c = silu(w["sigma_map.mlp.0.weight"] @ level + w["sigma_map.mlp.0.bias"])
    c = silu(w["sigma_map.mlp.2.weight"] @ c + w["sigma_map.mlp.2.bias"])
    x = [w["vocab_embed.embedding"][i] for i in ids.tolist()]
    for n in range(2):
        at = f"blocks.{n}."
        six = (w[at + "adaLN_modulation.weight"] @ c + w[at + "adaLN_modulation.bias"]).view(6, WIDTH)
        qkv = [w[at + "attn_qkv.weight"] @ (norm(h, w[at + "norm1.weight"]) * (1 + six[1]) + six[0]) for h in x]
        parts = [t.view(3, HEADS, dim) for t in qkv]
        new = []
        for i in range(seq):
            keys = [j for j in range(seq) if block_size is None or j // block_size <= i // block_size]
            heads = []
            for h in range(HEADS):
                q = turned(parts[i][0, h], i)
                scores = torch.stack([q @ turned(parts[j][1, h], j) for j in keys]) / math.sqrt(dim)
                p = torch.exp(scores - scores.max())
                heads.append(sum(a * parts[j][2, h] for a, j in zip(p / p.sum(), keys)))
            y = x[i] + six[2] * (w[at + "attn_out.weight"] @ torch.cat(heads))  # type: ignore[arg-type]
            z = norm(y, w[at + "norm2.weight"]) * (1 + six[4]) + six[3]
            z = w[at + "mlp.2.weight"] @ gelu(w[at + "mlp.0.weight"] @ z + w[at + "mlp.0.bias"]) + w[at + "mlp.2.bias"]
            new.append(y + six[5] * z)
        x = new
    two = w["output_layer.adaLN_modulation.weight"] @ c + w["output_layer.adaLN_modulation.bias"]
    shift, scale = two[:WIDTH], two[WIDTH:]
    last = [norm(h, w["output_layer.norm_final.weight"]) * (1 + scale) + shift for h in x]
    logits = torch.stack([w["output_layer.linear.weight"] @ h + w["output_layer.linear.bias"] for h in last])
    logits[:, MASK] = -math.inf
    return logits - torch.logsumexp(logits, -1, keepdim=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_equal_the_reference(name: str, tmp_path: Path) -> None:
    weights = make_dit(tmp_path / "src", name)
    denoiser = load_dit(tmp_path / "src", MASK, dtype=torch.float64)
    ids = torch.randint(0, ROWS, (2, 11), generator=torch.Generator().manual_seed(1))
    ids[:, ::3] = MASK
    got = denoiser(ids)
    for row in range(2):
        expected = reference(weights, ids[row], CONFIGS[name].get("block_size"))
        torch.testing.assert_close(got[row], expected, rtol=0, atol=1e-9)


def test_text_is_generated(tmp_path: Path) -> None:
    make_dit(tmp_path / "src", "mdlm")
    denoiser = load_dit(tmp_path / "src", pf.MASK, num_tokens=280)
    out = generate(denoiser, pf.tokenizer(), ["the cat"], max_new_tokens=8, temperature=1.0)
    assert not bool((out.tokens[0] == pf.MASK).any())
    with pytest.raises(ValueError, match="model_length=32"):
        generate(denoiser, pf.tokenizer(), ["the cat"], max_new_tokens=64)


def test_rows_of_different_length_are_refused(tmp_path: Path) -> None:
    make_dit(tmp_path / "src", "mdlm")
    denoiser = load_dit(tmp_path / "src", MASK)
    with pytest.raises(ValueError, match="cannot be told about padding"):
        denoiser(torch.zeros((2, 4), dtype=torch.long), attention_mask=torch.tensor([[True] * 4, [True] * 3 + [False]]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time_conditioning": True}, "time_conditioning=True: only"),
        ({"causal": True}, "causal=True: only"),
        ({"adaln": False}, "adaln=False: only"),
        ({"n_heads": None, "soft_cap": 3}, r"n_heads is missing\n  soft_cap=3"),
        ({"hidden_dim": 30}, r"embedding has shape \[281, 24\]; the configuration says \[281, 30\]"),
        ({"n_blocks": 3}, r"blocks\.2\.attn_qkv\.weight \[72, 24\] is missing"),
        ({"n_blocks": 1}, r"blocks\.1\.attn_qkv\.weight is not a tensor"),
    ],
)
def test_other_variants_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_dit(tmp_path / "src", "bd3lm", **changes)
    with pytest.raises(ValueError, match=message):
        load_dit(tmp_path / "src", MASK)


@pytest.mark.parametrize("name", CONFIGS)
def test_load_model_points_to_the_right_loader(name: str, tmp_path: Path) -> None:
    make_dit(tmp_path / "src", name)
    with pytest.raises(ValueError, match=r"LayerNorm and a time input.*mdlm\.dit\.load_dit"):
        load_model(tmp_path / "src")


def test_the_likelihood_of_a_network_with_blocks_is_not_made_from_a_noised_past(tmp_path: Path) -> None:
    """Masks over the whole row show later blocks a noised past, which BD3-LM was never trained on: not its NELBO."""
    for name in CONFIGS:
        make_dit(tmp_path / name, name)
    ids = torch.randint(0, MASK, (4, 12), generator=torch.Generator().manual_seed(1))
    batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), torch.arange(4))
    assert math.isfinite(nelbo(load_dit(tmp_path / "mdlm", MASK), [batch]).nats_per_token)
    with pytest.raises(ValueError, match="has blocks of 4, but no forward over noised and clean text"):
        nelbo(load_dit(tmp_path / "bd3lm", MASK), [batch])
    with pytest.raises(ValueError, match=r"pair 0: .* blocks of 4"):
        conditional(load_dit(tmp_path / "bd3lm", MASK), [[5, 6]], [[7, 8, 9]])
