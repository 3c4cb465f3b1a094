"""`mdlm eval tasks` and lm_eval's own command line with `mdlm` registered: results, adapters, resuming, processes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness_model as hm
import lm_eval.tasks
import pytest
import torch

from mdlm.adapter import AdapterConfig, adapter_weights, attach, base_hash, save_adapter
from mdlm.chat import PLAIN_TEMPLATE
from mdlm.eval import __main__ as command
from mdlm.eval import harness
from mdlm.eval.harness_command import _check_documents, find_tasks
from mdlm.eval.harness_jobs import Worker
from mdlm.modeling import MDLMForMaskedLM

LAUNCH = [
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1",
    "--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0",
]  # fmt: skip
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda storage: None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    hm.trained_model().save_pretrained(folder)
    tokenizer = hm.letter_tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def run(capsys: pytest.CaptureFixture[str], checkpoint: Path, *options: Any) -> dict[str, Any]:
    capsys.readouterr()
    include = [] if "--include_path" in options else ["--include_path", str(hm.TASKS)]
    assert command.main(["tasks", str(checkpoint), *include, *map(str, options)]) == 0
    return dict(json.loads(capsys.readouterr().out))


def fails(capsys: pytest.CaptureFixture[str], *options: Any, status: int = 1) -> str:
    capsys.readouterr()
    assert command.main(["tasks", *map(str, options)]) == status
    return capsys.readouterr().err.splitlines()[-1]


def test_the_command_prints_results_with_their_protocol(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--tasks", "successor,successor_choice", "--strategy", "eb", "--gamma", "0.2", "--mc_num", "16"]
    record = run(capsys, checkpoint, *options, "--output", tmp_path / "out", "--limit", 3, "--seed", 4)
    assert record["results"]["successor"]["exact_match,none"] == 1.0
    assert record["results"]["successor_choice"]["acc,none"] == 1.0
    ours = record["config"]["mdlm"]
    assert ours["tasks"]["successor"]["options"]["knobs"]["gamma"] == 0.2
    assert ours["tasks"]["successor_choice"]["options"]["likelihood"]["mc_num"] == 16
    assert (ours["seed"], ours["command"]["limit"], ours["pretrained"]) == (4, 3.0, str(checkpoint))
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == record
    assert len((tmp_path / "out" / "answers-0.jsonl").read_text().splitlines()) == 3 + 6


def test_options_given_beat_the_preset_and_the_preset_its_defaults(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also an option that is given with the value it has by default."""
    options = ["--tasks", "successor", "--preset", "llada-1.5", "--max_new_tokens", 6, "--eos", "stop", "--limit", 2]
    record = run(capsys, checkpoint, *options, "--eos_token_id", 2, "--apply_chat_template", "false")
    found = record["config"]["mdlm"]["tasks"]["successor"]["options"]
    assert found["generation"]["eos"] == "stop"
    assert found["generation"]["max_new_tokens"] == 6
    assert found["generation"]["eos_token_id"] == 2
    assert (found["strategy"], found["knobs"]["block_length"]) == ("llada", 16)
    assert record["config"]["mdlm"]["command"]["apply_chat_template"] is False


@pytest.mark.parametrize("names", ["letters,successor*", "alphabet", "successor,alphabet,letters"])
def test_a_group_is_its_tasks_and_none_is_run_twice(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], names: str
) -> None:
    """Groups may hold groups, and a name may stand for what another one holds already."""
    record = run(capsys, checkpoint, "--tasks", names, "--limit", 2)
    assert {"successor", "successor_choice", "successor_text"} <= set(record["results"])
    assert record["config"]["mdlm"]["tasks"]["successor"]["generate_until"]["answers"] == 2


def test_chat_models_get_their_template_and_examples_as_turns(
    checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tasks", "successor", "--limit", 1, "--num_fewshot", 1, "--log_samples", "true", "--max_new_tokens", 2]
    turns = run(capsys, checkpoint, *options, "--apply_chat_template", "true")
    prompt = turns["samples"]["successor"][0]["arguments"][0][0]
    assert prompt.count("### user") == 2
    assert prompt.endswith("### user\nb>\n### assistant\n")
    one = run(capsys, checkpoint, *options, "--apply_chat_template", "true", "--fewshot_as_multiturn", "false")
    assert one["samples"]["successor"][0]["arguments"][0][0].count("### user") == 1


def test_the_presets_number_of_examples_is_used_unless_another_is_given(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mdlm.eval import harness_command
    from mdlm.eval.harness_options import Preset

    preset = Preset("mine", "", options={"strategy": "confidence"}, tasks={"succ*": {"num_fewshot": 1}})
    for module in (harness_command, harness):
        monkeypatch.setattr(module, "load_preset", lambda name: preset)
    options = ["--tasks", "successor", "--limit", 1, "--log_samples", "true", "--preset", "mine"]
    prompts = [
        run(capsys, checkpoint, *options, *more)["samples"]["successor"][0]["arguments"][0][0]
        for more in ([], ["--num_fewshot", 2])
    ]
    assert [prompt.count(">") for prompt in prompts] == [2, 3]


def test_a_local_data_file_needs_no_hub(checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    task = (hm.TASKS / "successor.yaml").read_text()
    local = (
        f"dataset_path: json\ndataset_kwargs:\n  cache_dir: {tmp_path}/cache\n  data_files: {hm.TASKS}/successor.jsonl"
    )
    task = task.replace("custom_dataset: !function data.load\ndataset_kwargs:\n  file: successor.jsonl", local)
    task = task.replace("task: successor", "task: letters").replace("test_split: test", "test_split: train")
    (tmp_path / "letters.yaml").write_text(task)
    record = run(capsys, checkpoint, "--tasks", "letters", "--include_path", tmp_path, "--max_new_tokens", 6)
    assert record["results"]["letters"]["exact_match,none"] > 0.8
    assert record["results"]["letters"]["sample_len"] == 7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "successor,sucessor_choice"], "no task 'sucessor_choice'; near it are .*successor_choice"),
        ([], "give --tasks"),
        (["--tasks", "successor", "--strategy", "lada"], "did you mean 'llada'"),
        (["--tasks", "successor", "--preset", "dreem-base"], "did you mean 'dream-base'"),
        (["--tasks", "successor", "--limit", "0"], "--limit"),
        (["--tasks", "successor", "--resume", "true"], "--resume needs --output"),
        (["--tasks", "successor", "--include_path", "/nowhere"], "not a folder"),
        (["--tasks", "successor", "--gamma", "-1", "--strategy", "eb"], "gamma"),
        (["--tasks", "successor", "--max_new_tokens", "64"], "no room for its prompt"),
        (["--tasks", "successor", "--peft", "{checkpoint}"], "no adapter of our training"),
    ],
    ids=["task", "none", "strategy", "preset", "limit", "resume", "include", "knob", "long", "peft"],
)
def test_bad_input_is_one_line_on_stderr(
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    manager = lm_eval.tasks.TaskManager  # lm-eval's own tasks take long to read
    monkeypatch.setattr(
        "lm_eval.tasks.TaskManager", lambda **_: manager(include_path=str(hm.TASKS), include_defaults=False)
    )
    given = [option.format(checkpoint=checkpoint) for option in options]
    include = [] if "--include_path" in options else ["--include_path", hm.TASKS]
    error = fails(capsys, checkpoint, *include, *given)
    assert error.startswith("mdlm eval tasks: ")
    assert re.search(message, error)


def test_tasks_without_enough_documents_are_named() -> None:
    task = SimpleNamespace(task_name="small", eval_docs=[1, 2, 3])
    _check_documents([task], None, 3)
    _check_documents([task], 0.4, 2)
    with pytest.raises(ValueError, match="'small' has 2 documents for 3 processes: start at most"):
        _check_documents([task], 2, 3)
    with pytest.raises(ValueError, match="'empty' has 0 documents for 1 process: there is nothing"):
        _check_documents([SimpleNamespace(task_name="empty", eval_docs=[])], None, 1)


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a checkpoint" in fails(capsys, tmp_path, "--tasks", "successor", "--include_path", hm.TASKS)


def test_without_lm_eval_the_extra_is_named(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lm_eval", "lm_eval.models", "lm_eval.tasks", "mdlm.eval.harness"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "mdlm-torch[eval]" in fails(capsys, checkpoint, "--tasks", "successor")


def test_a_misspelt_flag_is_refused(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        command.main(["tasks", str(checkpoint), "--tasks", "successor", "--treshold", "0.5"])
    assert stopped.value.code == 2
    assert "--treshold" in capsys.readouterr().err


def test_presets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["tasks", "--presets"]) == 0
    text = capsys.readouterr().out
    assert "## llada-instruct" in text
    assert "`gsm8k*`: max_new_tokens=512, steps=512, eos=defer" in text


def test_ctrl_c_keeps_what_is_answered_and_resume_goes_on(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--tasks", "successor_choice", "--mc_num", "16", "--exact", "false", "--batch_size", "3"]
    whole = run(capsys, checkpoint, *options)
    score, calls = Worker.score, []

    def interrupt(self: Worker, jobs: Any) -> Any:
        calls.append(len(jobs))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(self, jobs)

    include, output = ["--include_path", hm.TASKS], ["--output", tmp_path / "out"]
    monkeypatch.setattr(Worker, "score", interrupt)
    message = fails(capsys, checkpoint, *include, *options, *output, status=130)
    assert "go on with --resume" in message
    monkeypatch.setattr(Worker, "score", score)
    assert "earlier evaluation: resume it" in fails(capsys, checkpoint, *include, *options, *output)
    calls.clear()
    monkeypatch.setattr(Worker, "score", lambda self, jobs: calls.append(len(jobs)) or score(self, jobs))
    resumed = run(capsys, checkpoint, *options, *output, "--resume", "true")
    assert sum(calls) == 4
    assert resumed["results"] == whole["results"]
    assert resumed["config"]["mdlm"]["tasks"] == whole["config"]["mdlm"]["tasks"]


def test_an_adapter_is_added_to_its_base_and_refused_on_another(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """dllm #80: evaluation could not load adapters. The base is what is left of a good model without the adapter."""
    good = hm.trained_model()
    torch.manual_seed(0)
    options = AdapterConfig(r=4)
    base = MDLMForMaskedLM(good.config)
    base.load_state_dict(good.state_dict())
    attach(base, options)
    with torch.no_grad():
        for name, weight in base.named_parameters():
            if "lora_" in name:
                weight.copy_(0.3 * torch.randn_like(weight))
    adapter = {name: value.detach().clone() for name, value in adapter_weights(base.state_dict()).items()}
    plain = MDLMForMaskedLM(good.config)
    state = {k: v.clone() for k, v in good.state_dict().items()}
    for name in [name for name in adapter if "lora_A" in name]:
        target = name.partition(".lora_A")[0] + ".weight"
        state[target] -= 2.0 * adapter[name.replace("lora_A", "lora_B")] @ adapter[name]
    plain.load_state_dict(state)
    plain.save_pretrained(tmp_path / "base")
    hm.letter_tokenizer().save_pretrained(tmp_path / "base")
    save_adapter(tmp_path / "adapter", adapter, options, str(tmp_path / "base"), base_hash(plain))

    alone = run(capsys, tmp_path / "base", "--tasks", "successor")
    assert alone["results"]["successor"]["exact_match,none"] < 1.0
    added = run(capsys, tmp_path / "base", "--tasks", "successor", "--peft", tmp_path / "adapter")
    assert added["results"]["successor"]["exact_match,none"] == 1.0
    assert added["config"]["mdlm"]["peft"] == str(tmp_path / "adapter")
    assert added["config"]["mdlm"]["weights"] != alone["config"]["mdlm"]["weights"]
    include = ["--include_path", hm.TASKS]
    error = fails(capsys, checkpoint, "--tasks", "successor", *include, "--peft", tmp_path / "adapter")
    assert "adapter of another base" in error


def test_a_task_that_does_not_exist_is_said_with_those_near_it() -> None:
    known = ["arc_easy", "arc_challenge", "gsm8k", "gsm8k_cot"]
    assert find_tasks("arc_*, gsm8k,arc_easy", known) == ["arc_challenge", "arc_easy", "gsm8k"]
    with pytest.raises(ValueError, match=r"no task 'gsm8_k'; near it are gsm8k, gsm8k_cot\. 4 are known"):
        find_tasks("arc_easy,gsm8_k", known)
    with pytest.raises(ValueError, match=r"no task 'xyzzy'\. 4 are known"):
        find_tasks("xyzzy", known)
    with pytest.raises(ValueError, match="give --tasks"):
        find_tasks(" ,", known)


def test_lm_evals_own_command_line_knows_the_model(checkpoint: Path, tmp_path: Path) -> None:
    tasks = ["--tasks", "successor", "--include_path", str(hm.TASKS), "--output_path", str(tmp_path)]
    arguments = ["--model_args", f"pretrained={checkpoint},strategy=threshold,threshold=0.8,max_new_tokens=6"]
    command = [sys.executable, "-m", "mdlm.eval.harness", "--model", "mdlm", *arguments, *tasks, "--batch_size", "4"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "mdlm ({'pretrained'" in done.stdout
    (file,) = tmp_path.rglob("results_*.json")
    results = json.loads(file.read_text())
    assert results["results"]["successor"]["exact_match,none"] == 1.0
    assert results["config"]["model"] == "mdlm"
    assert results["config"]["mdlm"]["tasks"]["successor"]["options"]["knobs"]["threshold"] == 0.8


def test_the_command_line_fills_in_the_model_and_the_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm_eval's default device is cuda:0, whatever the machine has."""
    seen: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["harness"])
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: seen.append(sys.argv[1:]))
    for given in (["--tasks", "a"], ["run", "--model=dummy", "--device", "cpu"], ["ls", "tasks"], ["-C", "x.yaml"], []):
        assert harness.main(given) == 0
    assert seen[0] == ["--tasks", "a", "--model", "mdlm", "--device", "auto"]
    assert seen[1:] == [["run", "--model=dummy", "--device", "cpu"], ["ls", "tasks"], ["-C", "x.yaml"], []]

    def refuse() -> None:
        raise ValueError("no task")

    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", refuse)
    assert harness.main(["--tasks", "a"]) == 1
    assert capsys.readouterr().err == "mdlm.eval.harness: no task\n"


def test_registering_the_model_hides_none_of_lm_evals() -> None:
    from lm_eval.api.registry import get_model

    assert get_model("mdlm") is harness.MDLM
    assert get_model("dummy").__name__ == "DummyLM"


def test_two_processes_give_the_results_of_one(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """accelerate #3794: evaluation on several processes crashed on all but the first. Five documents on two."""
    names = "successor,successor_choice,successor_text"
    own = ["--strategy", "first_hitting", "--temperature", "1.0", "--mc_num", "16", "--exact", "false"]
    options = ["--include_path", str(hm.TASKS), "--tasks", names, *own, "--log_samples", "true", "--batch_size", "4"]
    one = run(capsys, checkpoint, *options)
    launched = [*LAUNCH, "-m", "mdlm.eval", "tasks", str(checkpoint), *options, "--output", str(tmp_path)]
    done = subprocess.run(launched, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("{")]
    two = json.loads(line)
    assert two["config"]["mdlm"]["processes"] == 2
    for task in names.split(","):
        ours = two["config"]["mdlm"]["tasks"][task]
        assert ours["options"] == one["config"]["mdlm"]["tasks"][task]["options"]
        (kind,) = set(ours) - {"options"}
        expected = one["config"]["mdlm"]["tasks"][task][kind]
        assert ours[kind] == {
            name: pytest.approx(number, rel=1e-6) if isinstance(number, float) else number
            for name, number in expected.items()
        }
        for metric, number in one["results"][task].items():
            if metric.endswith(",none") and isinstance(number, float) and "stderr" not in metric:
                assert two["results"][task][metric] == pytest.approx(number, rel=1e-6)
        first = [{s["doc"]["letter"]: s["resps"][0][0] for s in found["samples"][task]} for found in (one, two)]
        assert len(two["samples"][task]) == 5
        if task == "successor":
            assert first[0] == first[1]
    lines = [line for file in sorted(tmp_path.glob("answers-*.jsonl")) for line in file.read_text().splitlines()]
    assert len(lines) == len({json.loads(line)["key"] for line in lines}) == 5 + 10 + 5
    resumed = run(capsys, checkpoint, *options, "--output", tmp_path, "--resume", "true")
    assert resumed["results"] == one["results"], "what two processes kept serves one"
