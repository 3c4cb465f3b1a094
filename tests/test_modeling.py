"""The model: its equations, its invariances, the head on the rows asked for, what a user may get wrong."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import reference_model as ref
import torch
from model_tools import VOCAB, batch, expected_logits, make_model
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

from mdlm.config import MDLMConfig
from mdlm.layers import MDLMRMSNorm, ResidualOutput, rotary_angles, rotate
from mdlm.modeling import HEAD_ROW_STEPS, MDLMForMaskedLM

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases and norms on queries and keys": {"qkv_bias": True, "qk_norm": True},
    "one key head": {"num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 4},
    "heads wider than the stream": {"head_dim": 6},
    "untied": {"tie_word_embeddings": False},
    "other base and epsilon": {"rope_theta": 50.0, "rms_norm_eps": 0.1},
    "blocks": {"block_size": 3},
    "shifted": {"shift_logits": True},
    "shifted blocks": {"shift_logits": True, "block_size": 2},
    "post": {"norm_placement": "post"},
    "peri": {"norm_placement": "peri"},
    "span": {"norm_placement": "span"},
    "hybrid": {"norm_placement": "hybrid"},
    "deepnorm": {"norm_placement": "deepnorm"},
    "decoupled": {"linear": "sdd", "qk_norm": True},
    "span, decoupled": {"norm_placement": "span", "linear": "sdd"},
}


@pytest.mark.parametrize("layout", ["dense", "left padding", "packed and padded", "padding inside a document"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_model_computes_its_equations(variant: str, layout: str) -> None:
    model = make_model("eager", torch.float64, **VARIANTS[variant])
    arguments, real = batch(layout)
    logits = model(**arguments).logits
    # float64 but for the angles, which are float32
    torch.testing.assert_close(logits[real], expected_logits(model, layout)[real], rtol=1e-5, atol=1e-5)
    assert logits.isfinite().all()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500.0},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
        {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32, "rope_theta": 500.0,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 500.0},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rotary_angles_are_those_of_transformers(rope: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 128}
    positions = torch.tensor([[0, 1, 5, 77, 127]])
    theirs = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(rope)))(torch.zeros(1), positions)
    ours = rotary_angles(MDLMConfig(**sizes, rope_parameters=dict(rope)), positions)
    for a, b in zip(ours, theirs):
        torch.testing.assert_close(a[:, 0], b, rtol=0, atol=1e-5)


def test_norm_and_rotation_work_in_float32_inside() -> None:
    large = torch.full((1, 4), 300.0, dtype=torch.float16)  # whose square is beyond float16
    norm = torch.nn.Module.to(MDLMRMSNorm(4, 1e-6), torch.float16)
    torch.testing.assert_close(norm(large), torch.ones(1, 4, dtype=torch.float16))
    config = MDLMConfig(vocab_size=8, hidden_size=8, num_attention_heads=2)
    x = torch.randn(1, 1, 1, 4, dtype=torch.bfloat16)
    position = 1001  # 1001 is no bfloat16 number: rounded to 1000, the first pair would turn by a radian less
    turned = rotate(x, *rotary_angles(config, torch.tensor([[position]])))
    expected = ref.rotate(x.double().flatten().numpy(), position, 10000.0)
    torch.testing.assert_close(turned.double().flatten(), torch.from_numpy(expected), rtol=2**-7, atol=2**-7)
    assert turned.dtype == torch.bfloat16


# --- what must not change the answer


@pytest.mark.parametrize("options", [{}, {"shift_logits": True}, {"block_size": 2}], ids=str)
def test_packed_documents_answer_as_they_do_alone(options: dict[str, Any]) -> None:
    model = make_model("sdpa", **options)
    lengths = [4, 1, 3, 6]
    documents = [torch.randint(0, VOCAB, (1, n)) for n in lengths]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(torch.cat(documents, 1), position_ids=positions).logits[0].split(lengths)
    for together, document in zip(packed, documents):
        torch.testing.assert_close(together, model(document).logits[0], rtol=1e-4, atol=1e-4)


def test_one_document_does_not_hear_of_another() -> None:
    model = make_model("sdpa")
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    ids = torch.randint(0, VOCAB, (1, 8))
    changed = ids.clone()
    changed[:, :4] = (changed[:, :4] + 1) % VOCAB
    before, after = (model(i, position_ids=positions).logits for i in (ids, changed))
    assert torch.equal(before[:, 4:], after[:, 4:])
    assert not torch.allclose(before[:, :4], after[:, :4])


def test_blocks_do_not_hear_of_later_blocks() -> None:
    model = make_model("sdpa", block_size=3)
    ids = torch.randint(0, VOCAB, (1, 9))
    whole = model(ids).logits
    torch.testing.assert_close(model(ids[:, :6]).logits, whole[:, :6], rtol=1e-4, atol=1e-4)
    changed = ids.clone()
    changed[0, 5] = (changed[0, 5] + 1) % VOCAB
    difference = (model(changed).logits - whole).abs().amax((0, 2)) > 1e-4
    assert difference.tolist() == [False] * 3 + [True] * 6, "inside a block attention goes both ways"


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize(("left", "right"), [(0, 4), (4, 0), (1, 3)])
def test_a_row_of_a_padded_batch_answers_as_it_does_alone(left: int, right: int, shift: bool) -> None:
    model = make_model("sdpa", shift_logits=shift)
    ids = torch.randint(0, VOCAB, (3, 9))
    mask = torch.ones_like(ids)
    mask[1, :left] = 0
    mask[1, 9 - right :] = 0
    alone = model(ids[1:2, left : 9 - right]).logits[0]
    torch.testing.assert_close(model(ids, mask).logits[1, left : 9 - right], alone, rtol=1e-4, atol=1e-4)


# --- the head on the rows asked for


@pytest.mark.parametrize("layout", ["dense", "left padding", "packed and padded"])
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_logits_at_changes_nothing(share: float, shift: bool, layout: str) -> None:
    arguments, _ = batch(layout)
    at = torch.rand(2, 9, generator=torch.Generator().manual_seed(3)) < share
    answers, gradients = [], []
    for selected in (False, True):
        model = make_model("sdpa", torch.float64, shift_logits=shift)
        logits = model(**arguments, logits_at=at).logits if selected else model(**arguments).logits[at]
        logits.sin().sum().backward()
        answers.append(logits.detach())
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert answers[1].shape == (int(at.sum()), VOCAB)
    torch.testing.assert_close(answers[1], answers[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-10, atol=1e-12)
    assert len(gradients[1]) == len(list(model.parameters())), "a parameter without a gradient would stall DDP"


def test_logits_at_runs_the_head_on_few_sizes() -> None:
    model = make_model("sdpa")
    sizes: set[int] = set()
    model.lm_head.register_forward_hook(lambda _, inputs, __: sizes.add(inputs[0].shape[0]))
    for count in range(129):
        at = (torch.arange(128) < count).view(8, 16)
        assert model(torch.zeros(8, 16, dtype=torch.long), logits_at=at).logits.shape[0] == count
    assert sorted(sizes) == [4 * (i + 1) for i in range(HEAD_ROW_STEPS)]


def test_logits_at_saves_the_work_of_the_head() -> None:
    model = make_model("sdpa", vocab_size=4096)
    ids = torch.zeros(2, 32, dtype=torch.long)
    flops = []
    for at in (None, torch.arange(64).view(2, 32) < 16):
        with FlopCounterMode(display=False) as counter:
            model(ids, logits_at=at)
        flops.append(counter.get_total_flops())
    assert flops[0] - flops[1] == 2 * (64 - 16) * 16 * 4096


# --- training


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")  # its new name is younger than v5
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    arguments, _ = batch("packed and padded")
    gradients, calls = [], []
    for checkpointed in (False, True):
        model = make_model("sdpa", qk_norm=True).train()
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        count: list[int] = []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        model(**arguments).logits.sin().sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        calls.append(len(count))
    assert calls == [1, 2], "the layer is computed again in the backward pass"
    torch.testing.assert_close(gradients[1], gradients[0])


def test_training_mode_is_deterministic() -> None:
    model = make_model("sdpa")
    arguments, _ = batch("dense")
    assert torch.equal(model.train()(**arguments).logits, model.eval()(**arguments).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_stays_near_the_reference(dtype: torch.dtype, autocast: bool) -> None:
    model = make_model("sdpa", torch.float32 if autocast else dtype, initializer_range=0.2)
    arguments, real = batch("packed and padded")
    with torch.autocast("cpu", dtype, enabled=autocast):
        logits = model(**arguments).logits
    assert logits.dtype == dtype
    error = (logits.double() - expected_logits(model, "packed and padded"))[real].abs().max()
    assert error < 8 * torch.finfo(dtype).eps * logits.abs().max()
    logits[real].float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = MDLMForMaskedLM(
        MDLMConfig(vocab_size=512, hidden_size=128, num_hidden_layers=8, qkv_bias=True, qk_norm=True)
    )
    for name, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            std = 0.02 / 4 if isinstance(module, ResidualOutput) else 0.02
            assert isinstance(module, ResidualOutput) == name.endswith(("o_proj", "down_proj"))
            assert abs(module.weight.mean()) < 0.05 * std, name
            assert abs(module.weight.std() / std - 1) < 0.05, name
        if isinstance(module, torch.nn.Linear) and module.bias is not None:
            assert (module.bias == 0).all(), name
        if isinstance(module, MDLMRMSNorm):
            assert (module.weight == 1).all(), name


# --- what a user may get wrong


def _ids(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.long)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an id beyond the embedding": ({"input_ids": torch.tensor([[1, VOCAB]])}, f"holds {VOCAB}.*rows 0 .. {VOCAB - 1}"),
    "a negative id": ({"input_ids": torch.tensor([[1, -100]])}, "holds -100"),
    "one row without a batch axis": ({"input_ids": _ids(4)}, r"token ids as \[batch, seq\]"),
    "nothing": ({"input_ids": _ids(0, 4)}, r"is empty.*\[0, 4\]"),
    "embeddings for ids": ({"input_ids": torch.zeros(2, 4)}, r"float32.*token ids"),
    "too long": ({"input_ids": _ids(1, 33)}, "33 tokens long.*max_position_embeddings=32"),
    "a mask of another length": ({"input_ids": _ids(2, 4), "attention_mask": _ids(2, 5)}, r"attention_mask.*\[2, 5\]"),
    "a square mask": ({"input_ids": _ids(2, 4), "attention_mask": _ids(2, 1, 4, 4)}, "one number per token"),
    "positions of one row": ({"input_ids": _ids(2, 4), "position_ids": _ids(1, 4)}, r"position_ids.*\[2, 4\]"),
    "a position too far": ({"input_ids": _ids(1, 2), "position_ids": torch.tensor([[0, 32]])}, "position_ids holds 32"),
    "logits at numbers": ({"input_ids": _ids(2, 4), "logits_at": _ids(2, 4)}, "boolean mask"),
    "logits at another shape": ({"input_ids": _ids(2, 4), "logits_at": _ids(8).bool()}, r"logits_at.*\[8\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_refused(case: str) -> None:
    arguments, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        make_model(max_position_embeddings=32)(**arguments)


def test_an_unknown_argument_is_not_swallowed() -> None:
    with pytest.raises(TypeError, match="labels"):
        make_model()(_ids(1, 4), labels=_ids(1, 4))


def test_a_packed_row_may_be_longer_than_the_longest_document() -> None:
    positions = torch.arange(32).repeat(2)[None]
    assert make_model(max_position_embeddings=32)(_ids(1, 64), position_ids=positions).logits.shape == (1, 64, VOCAB)


def test_generate_hands_everything_on(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = ModuleType("mdlm.samplers.generate")
    sampler.generate = lambda *arguments, **options: (arguments, options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mdlm.samplers.generate", sampler)
    model = make_model()
    arguments, options = model.generate("def ", tokenizer="t", strategy="threshold", steps=3)
    assert arguments == (model, "t", "def ")
    assert options == {"strategy": "threshold", "steps": 3}
