"""LoRA: only the adapter learns, runs resume exactly, peft reads what is saved, other bases are refused; freezing."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from public_folders import make_folder
from safetensors.torch import load_file, save_file
from test_sft import RUN, pairs
from test_training_processes import LAUNCH, launch
from training_runs import DEFAULTS, arguments, assert_same, configure, fresh_accelerate, records, tensors

from mdlm import cli
from mdlm.adapter import AdapterConfig, attach, base_hash, freeze, has_adapter
from mdlm.load import load_model
from mdlm.modeling import MDLMForMaskedLM
from mdlm.training.config import TrainConfig, parse_config
from mdlm.training.loop import start, train, train_to_end

SIZES = ("model__hidden_size", "model__num_hidden_layers")


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


def tuned(data: Path, output: Path, base: Path, **options: Any) -> TrainConfig:
    given = {"output_dir": output, "data.source": data, **DEFAULTS, **{k.replace("__", "."): v for k, v in RUN.items()}}
    given |= {"model.init_from": base, "lora.r": 4, **{k.replace("__", "."): v for k, v in options.items()}}
    for name in SIZES:
        del given[name.replace("__", ".")]
    return parse_config([f"--{k}={'null' if v is None else v}" for k, v in given.items()])


@pytest.fixture(scope="module")
def adapted(data: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last checkpoint of a LoRA run with everything that could disturb a resume: dropout, EMA, accumulation."""
    with fresh_accelerate():
        options = {"lora__dropout": 0.2, "train__ema": 0.9, "train__micro_batch": 4}
        checkpoint = train(tuned(data, tmp_path_factory.mktemp("lora") / "run", base, **options))
    assert checkpoint is not None
    return checkpoint


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(24).view(2, 12) + 3
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def test_a_fresh_adapter_changes_nothing_and_alone_is_trained(base):
    model = MDLMForMaskedLM.from_pretrained(base)
    before, digest = logits(model), base_hash(model)
    attach(model, AdapterConfig(r=4))
    assert torch.equal(logits(model), before)
    assert base_hash(model) == digest
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * 7 * 2
    assert all("lora_" in name for name in trained)


def test_the_checkpoint_holds_the_adapter_and_the_base_is_left_as_it_was(adapted, base, data, tmp_path):
    assert has_adapter(adapted)
    assert not list(adapted.glob("*.safetensors"))
    run = start(tuned(data, tmp_path / "run", base))
    before = {n: p.clone() for n, p in run.core.named_parameters() if "lora_" not in n}
    train_to_end(run)
    assert all(torch.equal(p, before[n]) for n, p in run.core.named_parameters() if n in before)
    b = [t for n, t in tensors(tmp_path / "run" / "checkpoint-6").items() if "lora_B" in n and "adapter/" in n]
    assert b
    assert all((t != 0).any() for t in b)
    losses = [line["loss"] for line in records(tmp_path / "run", "train")]
    assert all(np.isfinite(losses))


def test_a_lora_run_with_dropout_and_average_resumes_bit_by_bit(adapted, base, data, tmp_path):
    middle = adapted.parent / "checkpoint-3"
    options = {"lora__dropout": 0.2, "train__ema": 0.9, "train__micro_batch": 4}
    again = train(tuned(data, tmp_path / "run", base, resume=middle, **options))
    assert again is not None
    assert_same(adapted, again)


def test_another_rank_or_base_is_another_run(adapted, base, data, tmp_path):
    middle = adapted.parent / "checkpoint-3"
    options = {"lora__dropout": 0.2, "train__ema": 0.9, "train__micro_batch": 4, "resume": middle}
    with pytest.raises(ValueError, match="--lora was"):
        start(tuned(data, tmp_path / "a", base, **{**options, "lora__alpha": 3.0}))
    with fresh_accelerate(), pytest.raises(ValueError, match="adapter of another base"):
        start(tuned(data, tmp_path / "b", base.parent / "checkpoint-3", **options))


def reference_merged(base: Path, adapter: Path, scale: float) -> dict[str, np.ndarray]:
    """W + scale B A in float64, from the files alone."""
    weights = {n: t.double().numpy() for n, t in load_file(base / "model.safetensors").items()}
    parts = {n: t.double().numpy() for n, t in load_file(adapter / "adapter_model.safetensors").items()}
    for name in parts:
        if name.endswith("lora_A.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            weights[f"{layer}.weight"] = (
                weights[f"{layer}.weight"] + scale * parts[name.replace("_A.", "_B.")] @ parts[name]
            )
    return weights


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks transformers by an old name
def test_loading_merging_and_peft_agree_with_the_definition(adapted, base, tmp_path, capsys):
    from peft import PeftModel

    expected = reference_merged(base, adapted / "adapter", scale=2.0)
    loaded, _ = load_model(adapted, device="cpu")
    for name, weight in loaded.named_parameters():
        assert np.abs(weight.detach().double().numpy() - expected[name]).max() < 1e-6, name
    assert type(loaded) is MDLMForMaskedLM
    assert not any("lora" in name for name in loaded.state_dict())

    theirs = PeftModel.from_pretrained(MDLMForMaskedLM.from_pretrained(base), str(adapted / "adapter")).eval()
    assert torch.allclose(logits(theirs), logits(loaded), atol=1e-5)
    assert not torch.allclose(logits(loaded), logits(MDLMForMaskedLM.from_pretrained(base)), atol=1e-4)

    assert cli.main(["merge", str(adapted.parent), str(tmp_path / "plain")]) == 0
    plain, _ = load_model(tmp_path / "plain", device="cpu")
    assert torch.equal(logits(plain), logits(loaded))
    assert cli.main(["merge", str(adapted), str(tmp_path / "plain")]) == 1
    assert "exists already" in capsys.readouterr().err
    assert cli.main(["merge", str(base), str(tmp_path / "no")]) == 1
    assert "nothing to merge" in capsys.readouterr().err
    half, _ = load_model(adapted, dtype="bfloat16", device="cpu")
    assert all(p.dtype == torch.bfloat16 for p in half.parameters())


def test_sampling_and_evaluation_take_an_adapter_checkpoint(adapted, data, capsys):
    assert cli.main(["sample", str(adapted.parent), "--prompt=the cat", "--max_new_tokens=6", "--device=cpu"]) == 0
    assert "the cat" in capsys.readouterr().out


def test_adapters_of_another_base_are_refused(adapted, base, tmp_path):
    moved = json.loads((adapted / "adapter" / "base.json").read_text())
    assert Path(moved["path"]) == base.resolve()
    shutil.copytree(adapted, tmp_path / "adapted")
    (tmp_path / "adapted" / "adapter" / "base.json").write_text(
        json.dumps({**moved, "path": str(base.parent / "checkpoint-3")})
    )
    with pytest.raises(ValueError, match="adapter of another base"):
        load_model(tmp_path / "adapted", device="cpu")


def test_an_adapter_checkpoint_is_no_base(adapted, data, tmp_path):
    with pytest.raises(ValueError, match="make one of it with `mdlm merge`"):
        start(tuned(data, tmp_path / "run", adapted))


def test_two_processes_train_the_adapter_as_one_does(data, base, tmp_path):
    expected = train(tuned(data, tmp_path / "one", base))
    assert expected is not None
    options = arguments(data, tmp_path / "two", train__micro_batch=2, model__init_from=base, lora__r=4, **RUN)
    options = [o for o in options if not any(o.startswith(f"--{s.replace('__', '.')}=") for s in SIZES)]
    done = launch([*LAUNCH, "-m", "mdlm.training", *options])
    assert done.returncode == 0, done.stderr
    assert_same(expected, tmp_path / "two" / "checkpoint-6", tolerance=2e-6)


def test_without_peft_the_error_names_the_extra(base, monkeypatch):
    original = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "peft":
            raise ImportError("No module named 'peft'")
        return original(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"mdlm-torch\[peft\]"):
        attach(MDLMForMaskedLM.from_pretrained(base), AdapterConfig(r=2))


def test_frozen_weights_stay_and_the_rest_learns(data, tmp_path):
    options = {**RUN, "train__freeze": "[model.embed_tokens.*,model.layers.0.*]"}
    run = start(configure(data, tmp_path / "run", **options))
    before = {name: p.clone() for name, p in run.core.named_parameters()}
    train_to_end(run)
    for name, p in run.core.named_parameters():
        frozen = name.startswith(("model.embed_tokens", "model.layers.0."))
        assert torch.equal(p, before[name]) == frozen, name
    with fresh_accelerate(), pytest.raises(ValueError, match=r"--train\.freeze was \['model\.embed"):
        start(configure(data, tmp_path / "again", resume=tmp_path / "run" / "checkpoint-3", **RUN))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"r": 0}, "must be 1 or more"),
        ({"alpha": 8.0}, "no effect without lora.r"),
        ({"r": 2, "alpha": -1.0}, "must be positive"),
        ({"r": 2, "dropout": 1.0}, r"in \[0, 1\)"),
        ({"r": 2, "targets": ()}, "is empty"),
    ],
)
def test_bad_options_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        AdapterConfig(**options)


def test_names_that_match_nothing_are_errors(base, data, tmp_path):
    model = MDLMForMaskedLM.from_pretrained(base)
    with pytest.raises(ValueError, match="names query; linear layers are down_proj"):
        attach(model, AdapterConfig(r=2, targets=("query",)))
    with pytest.raises(ValueError, match=r"no weight matches 'layers\.9"):
        freeze(model, ["layers.9*"])
    with pytest.raises(ValueError, match=r"set --model\.init_from"):
        configure(data, tmp_path / "x", lora__r=4)


def test_weights_that_are_not_finite_are_refused(base, data, tmp_path):
    model = MDLMForMaskedLM.from_pretrained(base)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    model.save_pretrained(tmp_path / "bad")
    _, tokenizer = load_model(base, device="cpu")
    tokenizer.save_pretrained(tmp_path / "bad")
    with pytest.raises(ValueError, match="1 weights are not finite"):
        start(tuned(data, tmp_path / "run", tmp_path / "bad"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("cut", r"model\.safetensors is damaged or was not copied to its end"),
        ("name", r"(?s)norm\.weight \[32\] is missing.*norm\.scale \[32\] is not a tensor of this format"),
        ("shape", r"norm\.weight has shape \[31\]; the configuration says \[32\]"),
    ],
)
def test_a_folder_of_ours_without_all_its_weights_is_refused(base, data, tmp_path, damage, message):
    """transformers would draw what is missing at random, and say so in a table."""
    bad = tmp_path / "bad"
    shutil.copytree(base, bad)
    file = bad / "model.safetensors"
    weights = load_file(file)
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        norm = weights.pop("model.norm.weight")
        weights["model.norm." + ("scale" if damage == "name" else "weight")] = norm[: 32 if damage == "name" else 31]
        save_file({name: tensor.clone() for name, tensor in weights.items()}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load_model(bad, device="cpu")
    with pytest.raises(ValueError, match=message):
        start(tuned(data, tmp_path / "run", bad))


def test_an_adapter_beside_a_model_of_the_hub_finds_it_again(data, tmp_path, monkeypatch):
    """The base is said by its name on the hub; it comes out of the cache, there is no network."""
    commit, repository = "0" * 40, tmp_path / "models--org--Tiny"
    make_folder(repository / "snapshots" / commit, "llada")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    checkpoint = train(tuned(data, tmp_path / "run", "org/Tiny", train__steps=1))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # named on a command line it asks no network
    named, folder = (load_model(place, device="cpu")[0] for place in ("org/Tiny", repository / "snapshots" / commit))
    assert torch.equal(logits(named), logits(folder))
    assert not torch.equal(logits(load_model(checkpoint, device="cpu")[0]), logits(folder))
    with pytest.raises(ValueError, match=r"org/Absent: there is no such folder; .*hf download"):
        load_model("org/Absent", device="cpu")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"--model\.init_from org/Absent: no such folder, and not to be had on the"):
        start(tuned(data, tmp_path / "absent", "org/Absent"))


def test_the_recipe_runs_on_a_model_in_llada_format(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """sft_lora.yaml as it is, but short and small, with the base read from LLaDA's names; then sampling and merging."""
    make_folder(tmp_path / "llada", "llada")
    recipe = Path(str(files("mdlm.training.recipes"))) / "sft_lora.yaml"
    reduced = {
        "output_dir": tmp_path / "run", "model.init_from": tmp_path / "llada", "data.source": data, "data.seq_len": 128,
        "train.steps": 3, "train.global_batch": 4, "train.log_every": 1, "validation.every": 3,
        "data.validation_rows": 4, "lr_schedule.warmup_steps": 1,
    }  # fmt: skip
    options = [f"--{name}={value}" for name, value in reduced.items()]
    assert train(parse_config([f"--config={recipe}", *options])) == tmp_path / "run" / "checkpoint-3"
    assert len(records(tmp_path / "run", "train")) == 3
    assert np.isfinite(records(tmp_path / "run", "validation")[0]["nats_per_token"])
    assert cli.main(["merge", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    one, two = (load_model(tmp_path / name, device="cpu")[0] for name in ("run", "merged"))
    assert torch.equal(logits(one), logits(two))
    base, _ = load_model(tmp_path / "llada", device="cpu")
    assert not torch.equal(logits(base), logits(one))
