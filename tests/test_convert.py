"""Public checkpoints become our model and go back: logits against independent references, bits, and the errors."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import public_folders as pf
import pytest
import reference_public as ref
import torch
from safetensors.torch import load_file
from torch import Tensor

from mdlm import convert as convert_module
from mdlm.config import MDLMConfig
from mdlm.convert import convert, load_public
from mdlm.load import load_model
from mdlm.modeling import MDLMForMaskedLM
from mdlm.public_weights import Stored

NAMES = list(pf.CONFIGS)
PADDING = {"dense": (0, 0), "left": (3, 0), "right": (0, 4)}


@pytest.fixture
def exact_rotary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary angles in float64 instead of float32, so that float64 models can be compared to 1e-9."""

    def angles(config: MDLMConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequency, scale = ref.frequencies(
            config.rope_theta, config.head_dim, config.rope_parameters, config.max_position_embeddings
        )
        angle = positions[:, None, :, None].double() * frequency
        angle = torch.cat((angle, angle), dim=-1)
        return angle.cos() * scale, angle.sin() * scale

    monkeypatch.setattr("mdlm.modeling.rotary_angles", angles)


def two_rows(padding: str = "dense") -> tuple[Tensor, Tensor]:
    """Ids [2, 11], mask ids among them, and where there is a token; the second row is padded."""
    ids = torch.randint(0, 280, (2, 11), generator=torch.Generator().manual_seed(3))
    ids[:, ::3] = pf.MASK
    left, right = PADDING[padding]
    real = torch.ones(ids.shape, dtype=torch.bool)
    real[1, :left] = False
    real[1, 11 - right :] = False
    return ids, real


def distance(model: MDLMForMaskedLM, expected: Tensor, ids: Tensor, real: Tensor) -> float:
    with torch.no_grad():
        got = model(ids, attention_mask=None if bool(real.all()) else real).logits
    return float((got - expected)[real].abs().max())


def folder_tensors(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        first[n].dtype == second[n].dtype and first[n].shape == second[n].shape and torch.equal(first[n], second[n])
        for n in first
    )


def config_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference(name: str, padding: str, tmp_path: Path, exact_rotary: None) -> None:
    public, weights = pf.make_folder(tmp_path / "src", name)
    model, _ = load_public(tmp_path / "src", torch.float64)
    ids, real = two_rows(padding)
    assert distance(model, ref.logits(public, weights, ids, real), ids, real) < 1e-9


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_the_reference_with_float32_angles(name: str, tmp_path: Path) -> None:
    public, weights = pf.make_folder(tmp_path / "src", name)
    model, _ = load_public(tmp_path / "src", torch.float64)
    ids, real = two_rows("left")
    assert distance(model, ref.logits(public, weights, ids, real), ids, real) < 2e-5


@pytest.mark.parametrize(
    "changes",
    [
        {"n_kv_heads": 2},
        {"include_qkv_bias": True},
        {"weight_tying": True},
        {"embedding_size": None},
        {"vocab_size": 300},
        {"rope_theta": 10000.0, "rms_norm_eps": 1e-2},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_llada_variants_equal_the_reference(changes: dict[str, Any], tmp_path: Path, exact_rotary: None) -> None:
    public, weights = pf.make_folder(tmp_path / "src", "llada", **changes)
    model, _ = load_public(tmp_path / "src", torch.float64)
    ids, real = two_rows("left")
    assert distance(model, ref.logits(public, weights, ids, real), ids, real) < 1e-9


SCALINGS = {
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "default": {"rope_type": "default"},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("style", [4, 5])
def test_rope_scaling_of_both_transformers_generations(kind: str, style: int, tmp_path: Path) -> None:
    settings = dict(SCALINGS[kind])
    changes: dict[str, Any] = {"rope_scaling": settings, "rope_theta": 100.0}
    public, weights = pf.make_folder(tmp_path / "src", "a2d-llama", **changes)
    if style == 5:
        del public["rope_scaling"], public["rope_theta"]
        settings["rope_type"] = settings.pop("type", settings.get("rope_type"))
        public["rope_parameters"] = {**settings, "rope_theta": 100.0}
        (tmp_path / "src" / "config.json").write_text(json.dumps(public))
    model, _ = load_public(tmp_path / "src", torch.float64)
    ids, real = two_rows("left")
    assert distance(model, ref.logits(public, weights, ids, real), ids, real) < 2e-5
    convert(str(tmp_path / "src"), str(tmp_path / "ours"))
    convert(str(tmp_path / "ours"), str(tmp_path / "back"), to="a2d-llama")
    assert config_of(tmp_path / "back") == public


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("block_size", [None, 3])
def test_a2d_options_that_the_configuration_cannot_say(
    shift: bool, block_size: int | None, tmp_path: Path, exact_rotary: None
) -> None:
    public, weights = pf.make_folder(tmp_path / "src", "a2d-qwen3")
    model, _ = load_public(tmp_path / "src", torch.float64, shift_logits=shift, block_size=block_size)
    ids, real = two_rows("left")
    assert distance(model, ref.logits(public, weights, ids, real, shift, block_size), ids, real) < 1e-9


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_round_trip_keeps_every_bit_of_tensors_configuration_and_tokenizer(
    name: str, dtype: torch.dtype, files: int, tmp_path: Path
) -> None:
    public, weights = pf.make_folder(tmp_path / "src", name, dtype=dtype, files=files)
    convert(str(tmp_path / "src"), str(tmp_path / "ours"))
    ours = folder_tensors(tmp_path / "ours")
    assert {t.dtype for t in ours.values()} == {dtype}
    assert MDLMForMaskedLM.from_pretrained(tmp_path / "ours", dtype="auto").dtype == dtype
    convert(str(tmp_path / "ours"), str(tmp_path / "back"), to=name)
    assert same_bits(folder_tensors(tmp_path / "back"), weights)
    assert list(config_of(tmp_path / "back").items()) == list(public.items())
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        was, now = (json.loads((tmp_path / f / file).read_text()) for f in ("src", "back"))
        assert was == now, file
    convert(str(tmp_path / "back"), str(tmp_path / "again"))
    assert same_bits(folder_tensors(tmp_path / "again"), ours)
    assert MDLMConfig.from_pretrained(tmp_path / "again") == MDLMConfig.from_pretrained(tmp_path / "ours")


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_never_was_public_is_written_from_the_template(name: str, tmp_path: Path) -> None:
    pf.make_folder(tmp_path / "src", name)
    convert(str(tmp_path / "src"), str(tmp_path / "ours"))
    (tmp_path / "ours" / "public.json").unlink()
    convert(str(tmp_path / "ours"), str(tmp_path / "back"), to=name)
    convert(str(tmp_path / "back"), str(tmp_path / "again"))
    assert MDLMConfig.from_pretrained(tmp_path / "again") == MDLMConfig.from_pretrained(tmp_path / "ours")
    assert same_bits(folder_tensors(tmp_path / "again"), folder_tensors(tmp_path / "ours"))
    convert(str(tmp_path / "ours"), str(tmp_path / "like"), to=name, like=str(tmp_path / "src"))
    like, source = config_of(tmp_path / "like"), config_of(tmp_path / "src")
    assert {key: like[key] for key in source} == source
    assert set(like) - set(source) <= {"mask_token_id", "pad_token_id", "torch_dtype"}


def test_one_public_format_becomes_another_only_if_it_can_say_the_same(tmp_path: Path) -> None:
    pf.make_folder(tmp_path / "src", "a2d-qwen2")
    convert(str(tmp_path / "src"), str(tmp_path / "dream"), to="a2d-qwen2")
    with pytest.raises(ValueError, match=r"Dream .* has no place for shift_logits=False"):
        convert(str(tmp_path / "src"), str(tmp_path / "other"), to="dream")
    pf.make_folder(tmp_path / "sdar", "sdar")
    with pytest.raises(ValueError, match=r"llada .* has no place for head_dim=12, qk_norm=True, block_size=4"):
        convert(str(tmp_path / "sdar"), str(tmp_path / "other"), to="llada")
    assert not (tmp_path / "other").exists()


def test_a_public_folder_is_loaded_by_load_model(tmp_path: Path) -> None:
    pf.make_folder(tmp_path / "src", "dream", dtype=torch.bfloat16)
    model, tokenizer = load_model(tmp_path / "src", dtype="bfloat16", device="cpu")
    assert model.dtype == torch.bfloat16
    assert model.config.shift_logits
    assert tokenizer.mask_token_id == model.config.mask_token_id == pf.MASK
    assert model.config.num_tokens < model.config.vocab_size == pf.ROWS


def test_nothing_is_written_over_and_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pf.make_folder(tmp_path / "src", "llada")
    (tmp_path / "there").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        convert(str(tmp_path / "src"), str(tmp_path / "there"))
    assert list((tmp_path / "there").iterdir()) == []
    reads = 0

    def fails(self: convert_module.Checkpoint, name: str) -> Tensor:
        nonlocal reads
        reads += 1
        if reads == 5:
            raise KeyboardInterrupt
        return self.weights[name].read()

    monkeypatch.setattr(convert_module.Checkpoint, "read", fails)
    with pytest.raises(KeyboardInterrupt):
        convert(str(tmp_path / "src"), str(tmp_path / "new"))
    assert {p.name for p in tmp_path.iterdir()} == {"src", "there"}


def test_tensors_are_read_once_and_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pf.make_folder(tmp_path / "src", "llada", dtype=torch.bfloat16, files=2)
    alive: list[weakref.ref[Tensor]] = []
    names, most = [], 0
    plain = Stored.read

    def counted(self: Stored) -> Tensor:
        nonlocal most
        tensor = plain(self)
        names.append(self.name)
        alive.append(weakref.ref(tensor))
        most = max(most, sum(there() is not None for there in alive))
        return tensor

    monkeypatch.setattr(Stored, "read", counted)
    convert(str(tmp_path / "src"), str(tmp_path / "ours"), max_file_bytes=20_000)
    assert most <= 2  # the one just read, and the one before until its name is given away
    assert sorted(names) == sorted(pf.tensors(pf.CONFIGS["llada"]))
    assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
    assert same_bits(folder_tensors(tmp_path / "ours"), dict(load_model(tmp_path / "ours", "bfloat16")[0].state_dict()))


MEASURE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from pathlib import Path
import public_folders as pf
from mdlm.convert import convert, load_public

torch.set_num_threads(1)
root = Path(sys.argv[2])
status = lambda key: int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) * 1024
pf.make_folder(root / "small", "llada")
load_public(root / "small")
convert(str(root / "small"), str(root / "small-ours"))
size = sum(f.stat().st_size for f in (root / "big").glob("*.safetensors"))
before = status("VmRSS")
convert(str(root / "big"), str(root / "ours"))
converting = (status("VmHWM") - before) / size
before = status("VmRSS")
kept = load_public(root / "big")
print(json.dumps([converting, (status("VmHWM") - before) / size]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's process accounting")
def test_memory_stays_within_the_checkpoint(tmp_path: Path) -> None:
    sizes = {"d_model": 384, "mlp_hidden_size": 1024, "n_layers": 8}
    pf.make_folder(tmp_path / "big", "llada", files=2, **sizes)
    command = [sys.executable, "-c", MEASURE, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    converting, loading = json.loads(done.stdout.splitlines()[-1])
    assert converting <= 0.3
    assert 0.5 <= loading <= 1.3


def test_what_a_killed_conversion_left_is_replaced(tmp_path: Path) -> None:
    pf.make_folder(tmp_path / "src", "sdar")
    (tmp_path / ".ours.partial").mkdir()
    (tmp_path / ".ours.partial" / "model.safetensors").write_bytes(b"half")
    convert(str(tmp_path / "src"), str(tmp_path / "ours"))
    assert {p.name for p in tmp_path.iterdir()} == {"src", "ours"}
    assert load_model(tmp_path / "ours", device="cpu")[0].config.block_size == 4
