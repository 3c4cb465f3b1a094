"""Options, presets, texts, `until`, kept answers: the parts of the harness that need no lm-eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import harness_model as hm
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from mdlm.eval.harness_jobs import Worker
from mdlm.eval.harness_options import GENERATION, load_preset, preset_names, resolve
from mdlm.eval.harness_store import Answers, answer_key
from mdlm.eval.harness_text import cut, encode, encode_pair, end_ids, read_wish
from mdlm.modeling import MDLMForMaskedLM
from mdlm.samplers import generate

PUBLIC = {
    "a2d",
    "dream-base",
    "dream-instruct",
    "fast-dllm",
    "fast-dllm-v2",
    "llada-1.5",
    "llada-base",
    "llada-instruct",
    "llada-instruct-blocks",
    "sdar",
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return hm.letter_tokenizer()


def words(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids))


def test_there_is_a_preset_for_each_public_model() -> None:
    assert set(preset_names()) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_presets_name_strategies_and_options_that_exist_and_generate(name: str) -> None:
    """Every option set of every preset builds its strategy, and a model of the right kind writes with it."""
    preset = load_preset(name)
    blocks = {"sdar": 4, "fast-dllm-v2": 32}.get(name)
    tokenizer = hm.letter_tokenizer()
    torch.manual_seed(0)
    model = MDLMForMaskedLM(hm.config_for(tokenizer, **({} if blocks is None else {"block_size": blocks}))).eval()
    for task in (None, *(pattern.replace("*", "x") for pattern in preset.tasks)):
        options = resolve(preset.of(task))
        small = {**options.generation, "max_new_tokens": 6}
        for key in ("eos_token_id", "suppress_tokens"):
            if key in small:
                small[key] = [2]
        out = generate(model, tokenizer, [[70, 71]], strategy=options.strategy, seed=[0], **small, **options.knobs)
        assert not (out.tokens[0] == 0).any()
        length = options.given("max_new_tokens")
        if options.strategy in ("llada", "dream") and length is not None:  # one token per step, in blocks or not
            assert options.knobs["steps"] == (options.knobs.get("block_length") or length)


@pytest.mark.parametrize(
    ("name", "task", "expected"),
    [
        ("llada-instruct", "gsm8k", {"max_new_tokens": 512, "eos": "defer", "temperature": 0.0}),
        ("llada-instruct", "mmlu_pro_law", {"max_new_tokens": 256}),
        ("llada-instruct", "mmlu_law", {"max_new_tokens": 3}),
        ("llada-instruct", "humaneval_instruct", {"suppress_tokens": (126081,)}),
        ("llada-1.5", "gpqa_main", {"eos": "stop", "max_new_tokens": 256}),
        ("dream-base", "humaneval", {"temperature": 0.2, "top_p": 0.95}),
    ],
)
def test_published_numbers_differ_by_task_options(name: str, task: str, expected: dict[str, Any]) -> None:
    """LLaDA-1.5 #3, LLaDA #25, #86, #88: numbers cannot be reproduced without the flags and lengths of each task."""
    generation = resolve(load_preset(name).of(task)).generation
    assert {key: generation[key] for key in expected} == expected


def test_few_shot_examples_and_draws_of_llada_base_are_those_of_its_tasks() -> None:
    preset = load_preset("llada-base")
    assert [preset.num_fewshot(task) for task in ("gpqa_main", "winogrande", "piqa", "gsm8k")] == [5, 5, 0, None]
    assert resolve(preset.of("mmlu_law")).likelihood.draws == 1
    assert resolve(preset.of("arc_challenge")).likelihood.draws == 128
    assert resolve(preset.of("arc_challenge")).given("guidance") == 0.5
    assert resolve(preset.of("lambada_openai")).given("guidance") == 0.0


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'llada-instruct'"):
        load_preset("llada-instuct")


def test_options_find_their_place_and_knobs_belong_to_the_strategy() -> None:
    options = resolve({"strategy": "eb", "gamma": 0.5, "mc_num": 16, "temperature": 0.3, "add_bos_token": True})
    assert (options.strategy, options.knobs) == ("eb", {"gamma": 0.5})
    assert options.likelihood.draws == 16
    assert options.generation == {"temperature": 0.3}
    assert options.texts.add_bos_token
    assert options.describe()["knobs"] == {"gamma": 0.5, "score": "entropy", "block_length": None}
    stored = resolve({}, ("dus", {"base": 3}))
    assert (stored.strategy, stored.knobs) == ("dus", {"base": 3})
    cache = resolve({"strategy": "fast_dllm", "cache": "prefix"})  # a knob of this strategy, an argument elsewhere
    assert (cache.knobs, cache.generation) == ({"cache": "prefix"}, {})
    assert "cache" in GENERATION


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"treshold": 0.9}, "strategy 'threshold' does not take treshold; it takes threshold=0.9.*mean 'threshold'"),
        ({"strategy": "llada", "threshold": 0.9}, "strategy 'llada' does not take threshold; it takes steps=128"),
        ({"strategy": "lada"}, "no strategy 'lada'; did you mean 'llada'"),
        ({"mc_nmu": 3}, "does not take mc_nmu.*Did you mean 'mc_num'"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"mc_num": 2.5}, "mc_num is 2.5"),
        ({"strategy": "llada", "steps": "many"}, "steps is 'many'"),
        ({"strategy": "llada", "remasking": "none"}, "remasking is 'none'"),
    ],
    ids=["misspelt", "other_knob", "strategy", "near", "type", "fraction", "knob_type", "knob_value"],
)
def test_an_option_that_does_not_exist_or_fit_is_the_samplers_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(options)


def test_pairs_are_cut_as_lm_eval_cuts_them(tokenizer: PreTrainedTokenizerBase) -> None:
    """Spaces at the end of the context are scored; so they are in lm-eval's own models."""
    assert [words(tokenizer, part) for part in encode_pair(tokenizer, "Q: a ", "b")] == ["Q: a", " b"]
    assert [words(tokenizer, part) for part in encode_pair(tokenizer, "x", " y")] == ["x", " y"]
    with pytest.raises(ValueError, match="is empty"):
        encode_pair(tokenizer, "x", "")


def test_a_token_across_the_border_is_scored_not_cut(tmp_path: Path) -> None:
    """Where context and continuation merge into one token, lm-eval's cut leaves nothing, or half a text."""
    from mdlm.tokenization import train_bpe

    merging = train_bpe(["abab abab abab"] * 4, 262)
    assert len(encode(merging, "ab")) == 1
    assert len(encode(merging, "xa")) == 2
    before, after = encode_pair(merging, "xa", "b")
    assert [words(merging, part) for part in (before, after)] == ["x", "ab"]


def test_the_mask_token_in_a_text_is_text_and_other_special_tokens_are_tokens(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    ids = encode(tokenizer, "a<|mask|>b<|eos|>")
    assert tokenizer.mask_token_id not in ids
    assert ids[-1] == tokenizer.eos_token_id
    assert words(tokenizer, ids[:-1]) == "a<|mask|>b"


@pytest.mark.parametrize(
    ("gen_kwargs", "until", "length", "sampling"),
    [
        ({}, (), None, {"temperature": 0.0}),
        ({"until": "\n", "max_gen_toks": 5, "do_sample": False, "temperature": 0.7}, ("\n",), 5, {"temperature": 0.0}),
        ({"until": ["a", ""], "max_new_tokens": 7, "num_beams": 1}, ("a",), 7, {"temperature": 0.0}),
        ({"temperature": 0.2, "top_p": 0.95}, (), None, {"temperature": 0.2, "top_p": 0.95}),
        ({"do_sample": True}, (), None, {"temperature": 1.0}),
        ({"do_sample": True, "temperature": 0.6, "top_k": 0}, (), None, {"temperature": 0.6}),
        ({"do_sample": False, "top_p": 0.9}, (), None, {"temperature": 0.0}),
    ],
    ids=["none", "greedy", "beams", "temperature", "sample", "top_k_0", "top_p_unused"],
)
def test_generation_keywords_are_read_as_lm_eval_reads_them(
    gen_kwargs: dict[str, Any], until: Any, length: Any, sampling: dict[str, float]
) -> None:
    wish = read_wish(gen_kwargs)
    assert (wish.until, wish.max_new_tokens, dict(wish.sampling)) == (until, length, sampling)


@pytest.mark.parametrize(
    ("gen_kwargs", "message"),
    [
        ({"num_beams": 4}, "no beam search"),
        ({"length_penalty": 2}, "length_penalty are not known"),
        ({"until": 3}, "until is 3"),
    ],
    ids=["beams", "unknown", "until"],
)
def test_generation_keywords_that_cannot_be_followed_are_an_error(gen_kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_wish(gen_kwargs)


def test_until_cuts_before_the_first_of_its_strings(tokenizer: PreTrainedTokenizerBase) -> None:
    assert cut("abc\n\ndef;", (";", "\n\n")) == "abc"
    assert cut("abc", (";",)) == "abc"
    assert cut(";", (";",)) == ""
    assert end_ids(tokenizer, ("<|eos|>", ";", "<|eos|>;")) == (2,)


def test_answers_are_on_disk_as_soon_as_they_are_known_and_a_torn_line_is_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    first = Answers(folder)
    first.add({"k1": {"text": "ä"}, "k2": {"text": "b"}})
    other = Answers(folder, rank=1, resume=True)
    assert other["k1"] == {"text": "ä"}
    other.add({"k3": {"text": "c"}})
    with (folder / "answers-0.jsonl").open("a") as file:
        file.write('{"key": "k4", "te')  # killed here
    again = Answers(folder, resume=True)
    assert ("k4" in again, len(again), again["k3"]) == (False, 3, {"text": "c"})
    again.add({"k5": {"text": "d"}})
    lines = (folder / "answers-0.jsonl").read_text().splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["k1", "k2", "k5"]


def test_answers_of_an_earlier_evaluation_are_not_mixed_in_unasked(tmp_path: Path) -> None:
    Answers(tmp_path).add({"k": {"text": "a"}})
    with pytest.raises(ValueError, match="earlier evaluation: resume it"):
        Answers(tmp_path)
    with pytest.raises(ValueError, match="resume needs the folder"):
        Answers(None, resume=True)
    assert answer_key("a", 1) != answer_key("a", 2)


def worker(tokenizer: PreTrainedTokenizerBase, **options: Any) -> Worker:
    torch.manual_seed(0)
    return Worker(MDLMForMaskedLM(hm.config_for(tokenizer)).eval(), tokenizer, **{"max_length": 16, **options})


def test_prompts_that_are_too_long_lose_their_beginning_and_it_is_counted(tokenizer: PreTrainedTokenizerBase) -> None:
    job = worker(tokenizer).generation("0123456789abcdef", {"max_gen_toks": 6}, resolve({}))
    assert words(tokenizer, job.prompt) == "6789abcdef"
    assert job.truncated
    score = worker(tokenizer).likelihood("0123456789abcdef", "xy", resolve({}))
    assert (words(tokenizer, score.prompt), score.truncated) == ("23456789abcdef", True)
    assert not worker(tokenizer).generation("0123456789", {"max_gen_toks": 6}, resolve({})).truncated
    with pytest.raises(ValueError, match="no room for its prompt"):
        worker(tokenizer).generation("01", {"max_gen_toks": 16}, resolve({}))


def test_a_text_without_context_stands_behind_a_token_that_is_not_scored(tokenizer: PreTrainedTokenizerBase) -> None:
    at = worker(tokenizer)
    assert at.likelihood("", "ab", resolve({})).prompt == [tokenizer.eos_token_id]
    assert at.likelihood("", "ab", resolve({"prefix_token_id": 5})).prompt == [5]
    brought = at.likelihood("", "<|eos|>ab", resolve({}))
    assert (brought.prompt, words(tokenizer, brought.answer)) == ([2], "ab")
    rolling = at.rolling("<|eos|>abc", resolve({}))
    assert (rolling.prompt, words(tokenizer, rolling.answer)) == ([2], "abc")
    bos = hm.letter_tokenizer()
    bos.add_special_tokens({"bos_token": "<|bos|>"})
    known = worker(bos)
    (token,) = [bos.bos_token_id]
    options = resolve({"add_bos_token": True})
    assert known.likelihood("a", "b", options).prompt[0] == token
    assert known.likelihood("", "b", options).prompt == [token]
    assert (
        known.generation("<|bos|>a", {}, resolve({"add_bos_token": True, "max_new_tokens": 3})).prompt.count(token) == 1
    )
    assert known.generation("a" * 20, {"max_gen_toks": 4}, options).prompt[0] == token  # it survives the cut


def test_choices_of_one_question_share_their_masks_and_other_questions_do_not(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    at, options = worker(tokenizer), resolve({})
    assert at.likelihood("q", "a", options).noise == at.likelihood("q", "b", options).noise
    assert at.likelihood("q", "a", options).noise != at.likelihood("r", "a", options).noise
    assert at.likelihood("", "a", options).noise != at.likelihood("", "b", options).noise
    assert at.generation("q", {}, resolve({"max_new_tokens": 2}), 0).noise != (
        at.generation("q", {}, resolve({"max_new_tokens": 2}), 1).noise
    )
