"""The lm-eval model class on local tasks whose right answers a tiny trained model knows; batches, `until`, resuming."""

from __future__ import annotations

import json
import math
import re
import socket
from pathlib import Path
from typing import Any

import harness_model as hm
import pytest
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from public_folders import make_folder
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mdlm.chat import PLAIN_TEMPLATE
from mdlm.denoiser import FunctionDenoiser, LogitsModelDenoiser, as_denoiser
from mdlm.eval.harness import MDLM
from mdlm.eval.harness_score import windows
from mdlm.load import load_model
from mdlm.modeling import MDLMForMaskedLM
from mdlm.samplers import PRESETS, generate


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness needs no hub: opening a connection fails the test."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(
        "lm_eval.evaluator.add_env_info", lambda storage: None
    )  # asks pip and lscpu, which takes seconds


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return hm.letter_tokenizer()


@pytest.fixture(scope="module")
def manager() -> TaskManager:
    return TaskManager(include_path=str(hm.TASKS), include_defaults=False)


def model(**options: Any) -> MDLM:
    given = {"tokenizer": hm.letter_tokenizer(), "batch_size": 8, **options}
    return MDLM(given.pop("pretrained", None) or hm.trained_model(), **given)


def evaluate(manager: TaskManager, lm: MDLM, *tasks: str, **options: Any) -> dict[str, Any]:
    results = simple_evaluate(model=lm, tasks=list(tasks), task_manager=manager, bootstrap_iters=0, **options)
    assert results is not None
    return dict(results)


def value(results: dict[str, Any], task: str, metric: str) -> float:
    return float(results["results"][task][f"{metric},none"])


def generation(context: str, repeats: int = 1, doc: int = 0, **gen_kwargs: Any) -> Instance:
    return Instance("generate_until", {}, (context, gen_kwargs), 0, ("task", doc, repeats))


def likelihood(context: str, continuation: str) -> Instance:
    return Instance("loglikelihood", {}, (context, continuation), 0, ("task", 0, 1))


def test_a_model_that_knows_the_answers_gets_all_of_them_right(manager: TaskManager) -> None:
    results = evaluate(manager, model(), "successor", "successor_choice")
    assert value(results, "successor", "exact_match") == 1.0
    assert value(results, "successor_choice", "acc") == 1.0


def test_a_model_that_knows_nothing_does_not(manager: TaskManager, tokenizer: PreTrainedTokenizerBase) -> None:
    torch.manual_seed(1)
    results = evaluate(manager, model(pretrained=MDLMForMaskedLM(hm.config_for(tokenizer)).eval()), "successor")
    assert value(results, "successor", "exact_match") < 0.5


def test_bits_per_byte_of_a_uniform_model_are_the_logarithm_of_its_vocabulary(
    manager: TaskManager, tokenizer: PreTrainedTokenizerBase
) -> None:
    """LLaDA #92: `loglikelihood_rolling` was missing. One token is one byte here, 258 of 259 may be emitted."""
    flat = FunctionDenoiser(lambda tokens: torch.zeros(*tokens.shape, 259), 0, 259, ragged_ok=True)
    for length in (None, 3):
        results = evaluate(manager, model(pretrained=flat, max_length=length), "successor_text")
        assert value(results, "successor_text", "bits_per_byte") == pytest.approx(math.log2(258), rel=1e-5)


@pytest.mark.parametrize("length", [2, 3, 5, 16])
def test_windows_of_whole_texts_are_lm_evals(length: int) -> None:
    """lm-eval counts what a causal model is fed, which is one token less than what stands in a window."""
    for size in range(1, 24):
        ids = list(range(100, 100 + size))
        theirs = [
            make_disjoint_window(window)
            for window in get_rolling_token_windows(ids, prefix_token=2, max_seq_len=length - 1, context_len=1)
        ]
        assert [(pair.prompt, pair.answer) for pair in windows(ids, [2], length, 0)] == theirs


def test_results_say_by_which_protocol_they_came_about(manager: TaskManager) -> None:
    results = evaluate(manager, model(seed=3, mc_num=16, exact=False, strategy="eb", gamma=0.3), "successor_choice")
    ours = results["config"]["mdlm"]
    found = ours["tasks"]["successor_choice"]
    assert found["options"]["likelihood"] == {"estimator": "count", "mc_num": 16, "group": 8, "exact": False}
    assert (found["options"]["strategy"], found["options"]["knobs"]["gamma"]) == ("eb", 0.3)
    assert (ours["seed"], ours["weights"] is not None, ours["processes"]) == (3, True, 1)
    noise = found["loglikelihood"]
    assert noise["answers"] == 10
    assert noise["nfe_mean"] == 16
    assert 0 < noise["standard_error_mean"] < noise["standard_error_of_sum"]
    assert {"versions", "git_commit"} <= set(ours)
    json.dumps(ours)


@pytest.mark.parametrize("estimator", ["count", "nelbo", "any_order"])
def test_every_estimator_ranks_the_choices(manager: TaskManager, estimator: str) -> None:
    results = evaluate(manager, model(estimator=estimator, mc_num=8), "successor_choice")
    assert value(results, "successor_choice", "acc") == 1.0


def test_batches_of_any_size_give_the_same_answers() -> None:
    """dllm #58: evaluation in batches ran row by row; LLaDA #89, #90: padding changed the answers."""
    texts = [
        generation(f"{shown}{letter}>", until=[";"], max_gen_toks=6) for shown in ("", "a>b;") for letter in "bcdf"
    ]
    pairs = [likelihood(f"{shown}{letter}>", "c;") for shown in ("", "a>b;") for letter in "bcdf"]
    rolling = [Instance("loglikelihood_rolling", {}, (text,), 0, ("task", 0, 1)) for text in ("a>b;", "b", "c>d;a>b;c")]
    found = []
    for size in (1, 3, 64):
        lm = model(batch_size=size, strategy="first_hitting", temperature=1.0, exact=False, mc_num=8)
        found.append((lm.generate_until(texts), lm.loglikelihood(pairs), lm.loglikelihood_rolling(rolling)))
    for texts_, pairs_, rolling_ in found[1:]:
        assert texts_ == found[0][0]
        assert [greedy for _, greedy in pairs_] == [greedy for _, greedy in found[0][1]]
        assert [number for number, _ in pairs_] == pytest.approx([number for number, _ in found[0][1]], rel=1e-5)
        assert rolling_ == pytest.approx(found[0][2], rel=1e-5)


def test_the_forwards_of_a_batch_are_shared() -> None:
    """dllm #58: 16 requests in a batch must not cost 16 times the model calls of one."""
    calls = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        calls.append(kwargs.get("input_ids", args[0] if args else None).shape[0])

    trained = hm.trained_model()
    hook = trained.register_forward_pre_hook(count, with_kwargs=True)
    try:
        model(strategy="confidence", batch_size=16, eos="ignore").generate_until(
            [generation(f"{letter}>", max_gen_toks=4) for letter in "abcdefg"]
        )
    finally:
        hook.remove()
    assert calls == [7] * 4


def share_right(lm: MDLM) -> float:
    """Of what comes after each letter, asked for with room for end tokens."""
    texts = lm.generate_until([generation(f"{letter}>", until=[";"], max_gen_toks=6) for letter in hm.LETTERS[:-1]])
    return sum(text == right for text, right in zip(texts, hm.LETTERS[1:])) / len(texts)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_strategy_answers_the_task(name: str) -> None:
    small = {"semi_autoregressive": {"length": 6, "stride": 3}}.get(name, {})
    assert share_right(model(strategy=name, **small)) >= 0.7


@pytest.mark.parametrize("cache", ["none", "prefix", "dual", "delayed", "interval"])
def test_every_cache_answers_the_task(cache: str) -> None:
    assert share_right(model(strategy="confidence", cache=cache)) >= 0.7


def test_a_cache_that_the_model_cannot_have_is_refused_at_the_start() -> None:
    """dInfer #14, #31: options that do not fit the model fail in the middle of a run."""
    with pytest.raises(ValueError, match="block"):
        model(cache="block")


def test_answers_end_before_until_and_early() -> None:
    """Text behind the stop string is neither returned nor paid for."""
    lm = model(strategy="confidence", block_length=1, eos="ignore")
    (text,) = lm.generate_until([generation("b>", until=[";"], max_gen_toks=8)])
    assert text == "c"
    (record,) = [lm.answers[key] for key in lm.answers._found]
    assert record["finish"] == "until"
    assert record["nfe"] == 2
    whole = model(strategy="confidence", block_length=1, eos="ignore")
    assert whole.generate_until([generation("b>", max_gen_toks=8)])[0].startswith("c;")
    assert next(iter(whole.answers._found.values()))["nfe"] == 8


def test_the_harness_writes_what_generate_writes_for_the_user() -> None:
    """dllm #80: the chat program and the evaluation disagreed. Lengths that no block divides are kept (dllm #107)."""
    tokenizer = hm.letter_tokenizer()
    prompts = ["b>", "a>b;c>"]
    for options in (
        {"strategy": "threshold", "block_length": 4},
        {"strategy": "dus", "cache": "dual", "block_length": 4},
    ):
        own = model(**options, temperature=0.0, eos="ignore").generate_until(
            [generation(prompt, max_gen_toks=7) for prompt in prompts]
        )
        ids = [tokenizer.encode(prompt, add_special_tokens=False) for prompt in prompts]
        out = generate(hm.trained_model(), tokenizer, ids, max_new_tokens=7, temperature=0.0, eos="ignore", **options)
        assert own == out.text
        assert out.new_tokens.tolist() == [7, 7]


def test_the_first_indentation_of_code_is_not_lost() -> None:
    """d2F #6: HumanEval 0.006, because of what was done to the text. The first token's space is part of the answer."""
    pieces = ["<mask>", "</s>", "\u2581def", "\u2581f:", "\u2581", "\u2581return", "\u2581x"]
    inner = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="\u2581"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    spaced = PreTrainedTokenizerFast(tokenizer_object=inner, mask_token="<mask>", eos_token="</s>")

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(*tokens.shape, len(pieces))
        for place, token in zip(range(2, 6), (4, 5, 6, 1)):
            out[:, place : place + 1, token] = 9.0
        return out

    coder = FunctionDenoiser(logits, 0, len(pieces), ragged_ok=True)
    lm = model(pretrained=coder, tokenizer=spaced)
    assert spaced.decode([4, 5, 6]) == " return x"  # what is lost without the prompt in front
    assert lm.generate_until([generation("def f:", max_gen_toks=4)]) == ["  return x"]
    assert lm.generate_until([generation("def f:", max_gen_toks=4, until=["  return"])]) == [""]
    assert generate(coder, spaced, "def f:", max_new_tokens=4, temperature=0.0).text == ["  return x"]


def test_special_tokens_stop_too_and_do_not_show() -> None:
    """Dream's and chat models' stop strings are special tokens, which decoded text does not hold."""
    tokenizer = hm.letter_tokenizer()
    stop = tokenizer.encode("c", add_special_tokens=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["c"]}, replace_extra_special_tokens=False)
    lm = model(tokenizer=tokenizer, strategy="confidence", block_length=1)
    assert tokenizer.encode("c", add_special_tokens=False) == stop
    assert lm.generate_until([generation("b>", until=["c", "never"], max_gen_toks=4)]) == [""]
    assert next(iter(lm.answers._found.values()))["finish"] == "eos"


def test_an_end_token_that_is_an_ordinary_one_is_not_part_of_the_answer() -> None:
    (end,) = hm.letter_tokenizer().encode(";", add_special_tokens=False)
    lm = model(strategy="confidence", block_length=1, eos_token_id=end)
    assert lm.generate_until([generation("b>", max_gen_toks=6)]) == ["c"]


def test_no_answer_holds_the_mask_or_an_end_token() -> None:
    """Diffulex #39: all-mask output; SDAR: the mask token can be sampled."""
    texts = model(strategy="ancestral", temperature=5.0, steps=2, eos="ignore").generate_until(
        [generation(f"{letter}>", max_gen_toks=12, until=[]) for letter in "abc"]
    )
    assert not any("<|" in text for text in texts)


def test_empty_answers_can_be_prevented_and_are_counted(manager: TaskManager) -> None:
    """Dream #61: 40 % of HumanEval answers were an end token alone; end-token policies are options here."""

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(*tokens.shape, 259)
        out[..., 2] = 5.0  # the end token is likely everywhere
        out[..., 70] = 3.0
        return out

    eager = FunctionDenoiser(logits, 0, 259, ragged_ok=True)
    empty = evaluate(manager, model(pretrained=eager), "successor")
    assert empty["config"]["mdlm"]["tasks"]["successor"]["generate_until"]["empty_texts"] == 5
    banned = evaluate(manager, model(pretrained=eager, eos="ban"), "successor")
    assert banned["config"]["mdlm"]["tasks"]["successor"]["generate_until"]["empty_texts"] == 0
    begun = model(pretrained=eager, begin_suppress_tokens=[2])
    assert begun.generate_until([generation("a>", max_gen_toks=3)])[0] != ""


def test_repeats_are_different_samples_and_the_same_request_is_the_same_one() -> None:
    """Dream #79, DARE #20: all samples of a prompt were the same because they shared a seed."""
    request = generation("a>", repeats=4, until=[], do_sample=True, temperature=3.0, max_gen_toks=8)
    texts = model(strategy="first_hitting").generate_until([request] * 4)
    assert len(set(texts)) == 4
    assert model(strategy="first_hitting").generate_until([request] * 6) == [*texts, *texts[:2]]  # filled up
    assert model(strategy="first_hitting", seed=1).generate_until([request] * 4) != texts


def test_tasks_say_the_temperature_unless_the_caller_does() -> None:
    greedy = generation("a>", do_sample=False, temperature=2.0, max_gen_toks=8)
    sampled = generation("a>", do_sample=True, temperature=3.0, max_gen_toks=8)
    lm = model(strategy="first_hitting")
    assert lm.generate_until([sampled]) != lm.generate_until([greedy])
    fixed = model(strategy="first_hitting", temperature=0.0)
    assert fixed.generate_until([sampled]) == fixed.generate_until([greedy])
    assert lm.generate_until([greedy]) == fixed.generate_until([greedy])


def test_limit_answers_the_same_first_documents(manager: TaskManager) -> None:
    whole = evaluate(manager, model(mc_num=8, exact=False), "successor_choice")["samples"]["successor_choice"]
    some = evaluate(manager, model(mc_num=8, exact=False), "successor_choice", limit=2)["samples"]["successor_choice"]
    assert len(some) == 2
    assert [sample["resps"] for sample in some] == [sample["resps"] for sample in whole[:2]]


def test_few_shot_examples_stand_in_the_prompt(manager: TaskManager) -> None:
    samples = evaluate(manager, model(), "successor", num_fewshot=1, limit=2)
    prompts = [sample["arguments"][0][0] for sample in samples["samples"]["successor"]]
    assert all(re.fullmatch(r"[ae]>[bf];[a-h]>", prompt) for prompt in prompts)


def test_chat_templates_wrap_prompts_and_examples_become_turns(manager: TaskManager) -> None:
    tokenizer = hm.letter_tokenizer()
    tokenizer.chat_template = PLAIN_TEMPLATE
    lm = model(tokenizer=tokenizer, max_length=64)
    results = evaluate(
        manager, lm, "successor", num_fewshot=1, limit=1, apply_chat_template=True, fewshot_as_multiturn=True
    )
    prompt = results["samples"]["successor"][0]["arguments"][0][0]
    shape = r"### user\n[ae]>\n### assistant\n[bf]<\|eos\|>\n### user\nb>\n### assistant\n"
    assert re.fullmatch(shape, prompt)
    prefilled = lm.apply_chat_template(
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], add_generation_prompt=False
    )
    assert prefilled == "### user\nq\n### assistant\na"


def test_a_chat_template_that_is_missing_is_said(manager: TaskManager) -> None:
    with pytest.raises(ValueError, match="the tokenizer has none"):
        evaluate(manager, model(), "successor", apply_chat_template=True)


def test_an_interrupted_evaluation_goes_on_where_it_was(tmp_path: Path) -> None:
    requests = [likelihood(f"{letter}>", f"{other};") for letter in "abcdefg" for other in "bcd"]
    whole = model(exact=False, mc_num=8, batch_size=4).loglikelihood(requests)

    stopped = model(exact=False, mc_num=8, batch_size=4, answers=tmp_path)
    score, calls = stopped.worker.score, []

    def interrupt(jobs: Any) -> Any:
        calls.append(len(jobs))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return score(jobs)

    object.__setattr__(stopped.worker, "score", interrupt)
    with pytest.raises(KeyboardInterrupt):
        stopped.loglikelihood(requests)
    assert len((tmp_path / "answers-0.jsonl").read_text().splitlines()) == 8

    resumed = model(exact=False, mc_num=8, batch_size=4, answers=tmp_path, resume=True)
    assert resumed.loglikelihood(requests) == whole
    assert resumed.answers.computed == 13
    other = model(exact=False, mc_num=16, batch_size=4, answers=tmp_path, resume=True)
    other.loglikelihood(requests[:2])
    assert other.answers.computed == 2, "answers of another protocol must not be used"


def test_answers_are_kept_by_weights_not_by_place_and_not_for_models_without(tmp_path: Path) -> None:
    request = [generation("b>", max_gen_toks=6)]
    model(answers=tmp_path / "kept").generate_until(request)
    network = LogitsModelDenoiser(hm.trained_model(), 0, 259)  # the same weights in another coat
    again = model(pretrained=network, answers=tmp_path / "kept", resume=True, max_length=64)
    again.generate_until(request)
    assert again.answers.computed == 0
    other = MDLMForMaskedLM(hm.trained_model().config).eval()
    changed = model(pretrained=other, answers=tmp_path / "kept", resume=True)
    changed.generate_until(request)
    assert changed.answers.computed == 1
    flat = FunctionDenoiser(lambda tokens: torch.zeros(*tokens.shape, 259), 0, 259)
    with pytest.raises(ValueError, match="cannot be kept for a FunctionDenoiser"):
        model(pretrained=flat, answers=tmp_path / "new")


def test_lm_evals_own_cache_of_answers_is_filled(manager: TaskManager, tmp_path: Path) -> None:
    first = evaluate(manager, model(), "successor", "successor_choice", use_cache=str(tmp_path / "c"))
    again = model()
    second = evaluate(manager, again, "successor", "successor_choice", use_cache=str(tmp_path / "c"))
    assert again.answers.computed == 0
    assert second["results"] == first["results"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"treshold": 0.5}, "does not take treshold"),
        ({"strategy": "lada"}, "did you mean 'llada'"),
        ({"batch_size": "auto"}, "there is no automatic one"),
        ({"batch_size": 0}, "batch_size"),
        ({"max_length": 1000}, "takes at most 64"),
        ({"max_new_tokens": 100}, "max_new_tokens is 100"),
        ({"temperature": -1.0}, "temperature"),
        ({"add_bos_token": True}, "no beginning-of-sequence token"),
        ({"preset": "llama"}, "no preset 'llama'"),
        ({"peft": "x"}, "no peft"),
        ({"suppress_tokens": [9999]}, "do not exist"),
        ({"resume": True}, "resume needs the folder"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_are_refused_before_the_first_request(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(**options)


@pytest.mark.parametrize("family", ["llada", "dream", "sdar", "fast_dllm"])
def test_every_method_works_for_every_family_of_public_models(family: str, tmp_path: Path) -> None:
    """LLaDA #92, dllm #93, #95: methods that some families lacked. One-token answers are one look at the model."""
    folder = tmp_path / family
    make_folder(folder, family)
    lm = MDLM(str(folder), batch_size=4, device="cpu")
    context, answer = "the cat sat on", " a"
    ((number, greedy),) = lm.loglikelihood([likelihood(context, answer)])
    network, tokenizer = load_model(folder, device="cpu")
    ids = tokenizer(context, add_special_tokens=False)["input_ids"]
    (token,) = tokenizer(answer, add_special_tokens=False)["input_ids"]
    row = as_denoiser(network)(torch.tensor([[*ids, network.config.mask_token_id]]))[0, -1]
    assert number == pytest.approx(float(row[token]), abs=1e-5)
    assert greedy is (int(row.argmax()) == token)
    (rolling,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (context,), 0, ("task", 0, 1))])
    assert -20 * len(ids) < rolling < 0
    (text,) = lm.generate_until([generation(context, until=["zzz"], max_gen_toks=5)])
    assert "<" not in text


def test_without_a_checkpoint_the_argument_is_named() -> None:
    with pytest.raises(ValueError, match="pretrained=FOLDER"):
        MDLM()


def test_a_preset_is_overruled_by_what_is_said(manager: TaskManager) -> None:
    results = evaluate(manager, model(preset="a2d", max_new_tokens=6), "successor")
    options = results["config"]["mdlm"]["tasks"]["successor"]["options"]
    assert (options["strategy"], options["knobs"]["steps"], options["generation"]["max_new_tokens"]) == (
        "llada",
        256,
        6,
    )
    assert value(results, "successor", "exact_match") == 1.0
    assert results["config"]["mdlm"]["preset"] == "a2d"
