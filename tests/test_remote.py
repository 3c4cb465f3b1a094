"""Models run by the code that comes with their checkpoint: only on the user's word, with the right masks."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import public_folders as pf
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mdlm.load import load_model, load_remote
from mdlm.samplers.generate import generate

CONFIGURATION = """
from transformers import PreTrainedConfig

class TinyConfig(PreTrainedConfig):
    model_type = "llada2_moe"

    def __init__(self, vocab_size=8, hidden_size=4, num_experts=2, **kwargs):
        self.vocab_size, self.hidden_size, self.num_experts = vocab_size, hidden_size, num_experts
        super().__init__(**kwargs)
"""
MODELING = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput
from .configuration_tiny import TinyConfig

class TinyForCausalLM(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.place = nn.Embedding(64, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, position_ids=None):
        x = self.embed(input_ids)
        seq = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(seq)[None]
        x = x + self.place(position_ids)
        scores = x @ x.transpose(1, 2)
        if attention_mask is not None:
            assert attention_mask.shape == (len(x), 1, seq, seq) and attention_mask.dtype == x.dtype
            scores = scores + attention_mask[:, 0]
        return CausalLMOutput(logits=self.head(x + scores.softmax(-1) @ x))
"""


@pytest.fixture(autouse=True, scope="module")
def _modules_in_a_test_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """`transformers` copies code to its cache before it runs it."""
    cache = str(tmp_path_factory.mktemp("modules"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", cache)
        patch.syspath_prepend(cache)
        yield


def make_remote(folder: Path, **changes: Any) -> dict[str, Tensor]:
    """A checkpoint with code that leaves a mark when it is run."""
    folder.mkdir()
    public: dict[str, Any] = {
        "model_type": "llada2_moe", "architectures": ["TinyForCausalLM"], "vocab_size": pf.ROWS, "hidden_size": 8,
        "num_experts": 2, "pad_token_id": pf.EOS, "eos_token_id": pf.EOS,
        "auto_map": {
            "AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM",
        },
        **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(public))
    code = CONFIGURATION.replace("llada2_moe", public["model_type"])
    (folder / "configuration_tiny.py").write_text(textwrap.dedent(code))
    mark = f"open({str(folder / 'was-run')!r}, 'w').close()\n"
    (folder / "modeling_tiny.py").write_text(mark + textwrap.dedent(MODELING))
    generator = torch.Generator().manual_seed(0)
    weights = {
        "embed.weight": torch.randn(pf.ROWS, 8, generator=generator),
        "place.weight": torch.randn(64, 8, generator=generator),
        "head.weight": torch.randn(pf.ROWS, 8, generator=generator),
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    pf.save_tokenizer(folder)
    return weights


def expected_log_probs(weights: dict[str, Tensor], ids: Tensor, block_size: int | None, tokens: int) -> Tensor:
    """Log-probabilities [seq, tokens] of one row without padding, in float64, by loops; the mask id has none."""
    w = {name: t.double() for name, t in weights.items()}
    x = [w["embed.weight"][i] + w["place.weight"][p] for p, i in enumerate(ids.tolist())]
    out = []
    for q in range(len(x)):
        keys = [k for k in range(len(x)) if block_size is None or k // block_size <= q // block_size]
        scores = torch.stack([x[q] @ x[k] for k in keys])
        weight = torch.exp(scores - scores.max())
        state = x[q] + sum(a * x[k] for a, k in zip(weight / weight.sum(), keys))
        logits = (w["head.weight"] @ state)[:tokens].clone()
        logits[pf.MASK] = -torch.inf
        out.append(logits - torch.logsumexp(logits, 0))
    return torch.stack(out)


def test_code_of_a_checkpoint_runs_only_on_the_users_word(tmp_path: Path) -> None:
    make_remote(tmp_path / "src")
    with pytest.raises(ValueError, match=r"read them, then say so: load_remote\(path, trust_remote_code=True\)"):
        load_remote(tmp_path / "src")
    with pytest.raises(ValueError, match=r"mixture of experts .* mdlm\.load\.load_remote"):
        load_model(tmp_path / "src")
    assert not (tmp_path / "src" / "was-run").exists()
    load_remote(tmp_path / "src", trust_remote_code=True, block_size=4, device="cpu")
    assert (tmp_path / "src" / "was-run").exists()


def test_llada2_gets_the_additive_block_causal_mask_and_padding_changes_nothing(tmp_path: Path) -> None:
    weights = make_remote(tmp_path / "src")
    denoiser, tokenizer = load_remote(
        tmp_path / "src", trust_remote_code=True, block_size=4, dtype="float64", device="cpu"
    )
    assert (denoiser.mask_token_id, denoiser.num_tokens) == (pf.MASK, len(tokenizer))
    ids = torch.randint(3, 200, (2, 10), generator=torch.Generator().manual_seed(1))
    for left, right in ((0, 0), (3, 0), (0, 3)):
        real = torch.ones(2, 10, dtype=torch.bool)
        real[1, :left] = False
        real[1, 10 - right :] = False
        got = denoiser(ids, attention_mask=real)
        for row in range(2):
            expected = expected_log_probs(weights, ids[row][real[row]], 4, denoiser.num_tokens)
            torch.testing.assert_close(got[row][real[row]], expected, rtol=0, atol=1e-9)


def test_a_bidirectional_family_refuses_rows_of_different_length(tmp_path: Path) -> None:
    weights = make_remote(tmp_path / "src", model_type="lladamoe")
    denoiser, _ = load_remote(tmp_path / "src", trust_remote_code=True, dtype="float64", device="cpu")
    ids = torch.randint(3, 200, (1, 9), generator=torch.Generator().manual_seed(1))
    expected = expected_log_probs(weights, ids[0], None, denoiser.num_tokens)
    torch.testing.assert_close(denoiser(ids)[0], expected, rtol=0, atol=1e-9)
    with pytest.raises(ValueError, match="cannot be told about padding"):
        denoiser(ids, attention_mask=torch.arange(9)[None] > 1)


def test_text_is_generated_without_the_mask(tmp_path: Path) -> None:
    make_remote(tmp_path / "src")
    denoiser, tokenizer = load_remote(tmp_path / "src", trust_remote_code=True, block_size=4, device="cpu")
    out = generate(denoiser, tokenizer, ["the cat", "a"], max_new_tokens=8, temperature=1.0)
    assert int(out.new_tokens.min()) > 0
    assert not any(bool((row == pf.MASK).any()) for row in out.tokens)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {}, "'llada2_moe' needs block_size"),
        ({"model_type": "lladamoe"}, {"block_size": 4}, "takes no block_size"),
        ({"model_type": "other"}, {}, "say shift_logits and mask_style"),
        ({"auto_map": {}}, {"block_size": 4}, "names no code"),
        ({"mask_token_id": 0}, {"block_size": 4, "mask_token_id": 1}, "the checkpoint says 0"),
        ({}, {"block_size": 4, "dtype": "int8"}, "dtype is 'int8'"),
    ],
)
def test_conventions_are_never_guessed(
    changes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    make_remote(tmp_path / "src", **changes)
    with pytest.raises(ValueError, match=message):
        load_remote(tmp_path / "src", trust_remote_code=True, device="cpu", **options)
