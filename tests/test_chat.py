"""Fine-tuning data: which tokens are learnt, what stands behind them, which rows are refused, in every format."""

from __future__ import annotations

import copy
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_rows import small_bpe, take
from transformers import PreTrainedTokenizerFast

from mdlm.chat import chat_tokenizer
from mdlm.data import Batch, Data, DataConfig, open_data, training_texts
from mdlm.data_examples import best_fit

CHATS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "user", "content": f"say {i}"},
            {"role": "assistant", "content": "word " * (i % 3) + f"é{i}"},
        ]
    }
    for i in range(12)
]
PAIRS = [{"prompt": f"Document {i}", "completion": " says word" + " word" * (i % 4)} for i in range(12)]
TWO_TURNS = {
    "messages": [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "first answer"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "last answer"},
    ]
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return small_bpe()


def opened(tokenizer: PreTrainedTokenizerFast, rows: Any, **options: Any) -> Data:
    defaults = {"records": "messages" if "messages" in rows[0] else "completion", "packing": "none", "seq_len": 64}
    if "messages" in rows[0]:
        defaults["chat_template"] = "plain"
    config = DataConfig(**{**defaults, "source": "given", "validation_fraction": 0.0, "shuffle": False, **options})
    return open_data(config, tokenizer, train=rows)


def epoch(data: Data, batch_size: int = 1, **options: Any) -> list[Batch]:
    assert data.rows_per_epoch is not None
    return take(data.train_batches(batch_size, **options), data.rows_per_epoch // batch_size)


def learnt(tokenizer: PreTrainedTokenizerFast, batch: Batch, row: int = 0) -> str:
    return tokenizer.decode(batch.input_ids[row][batch.maskable[row]])


def unlearnt(tokenizer: PreTrainedTokenizerFast, batch: Batch, row: int = 0) -> str:
    assert batch.attention_mask is not None
    return tokenizer.decode(batch.input_ids[row][~batch.maskable[row] & batch.attention_mask[row]])


def test_of_a_chat_the_answers_and_their_end_are_learnt_and_nothing_else(tokenizer):
    (batch,) = epoch(opened(tokenizer, [TWO_TURNS], seq_len=128))
    assert learnt(tokenizer, batch) == "first answer<|eos|>last answer<|eos|>"
    assert unlearnt(tokenizer, batch) == (
        "### system\nbe short\n### user\none\n### assistant\n\n### user\ntwo\n### assistant\n"
    )
    (last,) = epoch(opened(tokenizer, [TWO_TURNS], seq_len=128, turns="last"))
    assert learnt(tokenizer, last) == "last answer<|eos|>"
    assert torch.equal(last.input_ids, batch.input_ids)


def test_conversations_of_sharegpt_are_the_same_chats(tokenizer):
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in TWO_TURNS["messages"]]
    options = {"records": "messages", "chat_template": "plain", "seq_len": 128}
    (ours,) = epoch(opened(tokenizer, [TWO_TURNS], **options))
    row = {"conversations": turns, "id": "7"}
    (theirs,) = epoch(opened(tokenizer, [row], messages_column="conversations", **options))
    assert torch.equal(theirs.input_ids, ours.input_ids)
    assert torch.equal(theirs.maskable, ours.maskable)
    pair = {"prompt": turns[:-1], "completion": turns[-1:]}
    (batch,) = epoch(opened(tokenizer, [pair], records="completion", chat_template="plain", seq_len=128))
    assert learnt(tokenizer, batch).startswith("last answer")


def test_of_a_pair_the_completion_and_one_end_are_learnt(tokenizer):
    for batch, pair in zip(epoch(opened(tokenizer, PAIRS)), PAIRS, strict=True):
        assert unlearnt(tokenizer, batch) == pair["prompt"]
        assert learnt(tokenizer, batch) == pair["completion"] + "<|eos|>"


def test_no_token_holds_characters_of_prompt_and_answer(tokenizer):
    """A prompt has the tokens it has alone, which it is given when text is generated after it."""
    assert len(tokenizer.encode("word")) < len(tokenizer.encode("wo")) + len(tokenizer.encode("rd"))
    (batch,) = epoch(opened(tokenizer, [{"prompt": "wo", "completion": "rd"}]))
    prompt = tokenizer.encode("wo")
    assert batch.input_ids[0, : len(prompt)].tolist() == prompt
    assert batch.maskable[0].tolist()[: len(prompt) + 1] == [False] * len(prompt) + [True]


def test_a_special_token_spelt_out_in_a_pair_stays_text(tokenizer):
    (batch,) = epoch(opened(tokenizer, [{"prompt": "a <|mask|> b", "completion": "<|eos|>x"}]))
    ids = batch.input_ids[0][batch.maskable[0]]
    assert (ids == tokenizer.eos_token_id).sum() == 1
    assert not (batch.input_ids == tokenizer.mask_token_id).any()


def test_the_mask_token_in_a_chat_is_an_error_that_names_the_row(tokenizer):
    bad = {"messages": [{"role": "user", "content": "<|mask|>"}, {"role": "assistant", "content": "x"}]}
    with pytest.raises(ValueError, match=r"texts\[1\]: the text contains the mask token"):
        opened(tokenizer, [CHATS[0], bad])


@pytest.mark.parametrize("policy", ["none", "eos_one", "eos_to_batch", "eos_to_length"])
def test_what_is_learnt_behind_the_answer(tokenizer, policy):
    data = opened(tokenizer, PAIRS, pad_supervision=policy, seq_len=48)
    whole = [len(tokenizer.encode(p["prompt"])) + len(tokenizer.encode(p["completion"])) for p in PAIRS]
    eos = tokenizer.eos_token_id
    for number, batch in enumerate(epoch(data, 4)):
        for row in range(4):
            size = whole[4 * number + row]
            longest = max(whole[4 * number : 4 * number + 4])
            expected = {"none": 0, "eos_one": 1, "eos_to_batch": longest + 1 - size, "eos_to_length": 48 - size}[policy]
            assert batch.attention_mask is not None
            assert int(batch.attention_mask[row].sum()) == size + expected
            tail = batch.input_ids[row, size : size + expected]
            assert (tail == eos).all()
            assert batch.maskable[row, size : size + expected].all()
            assert not batch.maskable[row, size + expected :].any()


def test_pad_equal_to_eos_does_not_drop_the_true_eos(tokenizer):
    """unturtle #59: labels equal to the pad id were ignored, and with pad == eos the model never learnt to end."""
    same = copy.deepcopy(tokenizer)
    same.pad_token = same.eos_token
    for batch, pair in zip(epoch(opened(same, PAIRS)), PAIRS, strict=True):
        answer = batch.input_ids[0][batch.maskable[0]].tolist()
        assert answer == [*same.encode(pair["completion"]), same.eos_token_id]
        assert int(batch.attention_mask[0].sum()) < 64, "padding is still told apart"


@pytest.mark.parametrize("template", ["inside", "behind"])
def test_an_end_token_of_the_template_is_the_true_one_and_is_not_doubled(tokenizer, tmp_path, template):
    inside, behind = ("{{ eos_token }}", "") if template == "inside" else ("", "{{ eos_token }}\n")
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}" + inside
        + "{% endgeneration %}" + behind + "{% else %}U:{{ m.content }}\n{% endif %}{% endfor %}"
    )  # fmt: skip
    (batch,) = epoch(opened(tokenizer, CHATS[:1], chat_template=str(tmp_path / "t.jinja")))
    assert learnt(tokenizer, batch) == "é0<|eos|>"
    assert unlearnt(tokenizer, batch) == "U:say 0\nA:"


def test_one_to_four_ends_are_drawn_per_example_and_stay_the_same(tokenizer):
    pairs = [{"prompt": f"{i}", "completion": "x"} for i in range(400)]
    counts = [
        [int((b.input_ids[0][b.maskable[0]] == tokenizer.eos_token_id).sum()) for b in epoch(data)]
        for data in (opened(tokenizer, pairs, eos_random=4), opened(tokenizer, pairs, eos_random=4, workers=2))
    ]
    assert counts[0] == counts[1]
    seen = Counter(counts[0])
    assert set(seen) == {1, 2, 3, 4}
    assert all(abs(n - 100) < 4.4 * (400 * 0.25 * 0.75) ** 0.5 for n in seen.values())


def test_a_template_without_generation_markers_is_an_error_that_names_the_row(tokenizer, tmp_path):
    """NeMo #3550: without {% generation %} the assistant mask is empty and the loss silently 0."""
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}A{% endif %}"
    )
    with pytest.raises(ValueError, match=r"texts\[0\]: the tokenizer's chat template has no {% generation %}"):
        opened(tokenizer, CHATS, chat_template=str(tmp_path / "t.jinja"))
    with pytest.raises(ValueError, match=r"texts\[0\]: the record is a chat, but the tokenizer has no chat template"):
        opened(tokenizer, CHATS, chat_template=None)


def test_a_row_with_nothing_to_learn_is_an_error_that_names_it(tokenizer):
    empty = {"prompt": "a", "completion": ""}
    with pytest.raises(ValueError, match=r"texts\[2\]: nothing to learn"):
        opened(tokenizer, [*PAIRS[:2], empty])
    with pytest.raises(ValueError, match=r"texts\[1\]: nothing to learn"):
        opened(tokenizer, [CHATS[0], {"messages": [{"role": "user", "content": "hello?"}]}])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"messages": []}, "a chat must be a list"),
        ({"messages": "hello"}, "a chat must be a list"),
        ({"messages": [{"from": "human", "content": "x"}]}, "a chat must be a list"),
        ({"messages": [{"from": "human", "value": 3}]}, "a chat must be a list"),
        ({"messages": [{"from": "alien", "value": "x"}]}, "a message is from 'alien'; known are system, human"),
        ({"messages": [{"role": "user", "content": None}]}, "a chat must be a list"),
        ({"chat": []}, "no column 'messages'; there are chat"),
    ],
)
def test_malformed_chats_are_errors_that_name_the_row(tokenizer, bad, message):
    with pytest.raises(ValueError, match=rf"texts\[1\]: {message}"):
        opened(tokenizer, [CHATS[0], bad])


def test_a_pair_of_chats_needs_no_generation_markers(tokenizer, tmp_path):
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = CHATS[1]["messages"]
    rows = [{"prompt": messages[:1], "completion": messages[1:]}]
    (batch,) = epoch(opened(tokenizer, rows, chat_template=str(tmp_path / "t.jinja")))
    assert unlearnt(tokenizer, batch) == "<user>say 1<|eos|><assistant>"
    assert learnt(tokenizer, batch) == "word é1<|eos|>"
    (tmp_path / "t.jinja").write_text("{{ messages | length }}{% if add_generation_prompt %}<assistant>{% endif %}")
    with pytest.raises(ValueError, match=r"texts\[0\]: the chat template does not continue the prompt"):
        opened(tokenizer, rows, chat_template=str(tmp_path / "t.jinja"))


def test_too_long_examples_are_an_error_cut_or_dropped_as_chosen(tokenizer):
    short, long = {"prompt": "ab", "completion": "cd"}, {"prompt": "ab", "completion": "cdefghijklmnop"}
    asks = {"prompt": "abcdefghijklmnop", "completion": "x"}
    rows = [short, long, asks]
    with pytest.raises(ValueError, match=r"texts\[1\]: the example has \d+ tokens, a row takes seq_len=8"):
        opened(tokenizer, rows, seq_len=8)
    cut = opened(tokenizer, rows, seq_len=8, too_long="truncate")
    first, second = epoch(cut)
    assert learnt(tokenizer, second) == "cdefgh", "an answer that was cut has not ended"
    supervision = cut.report.supervision
    assert supervision.truncated == 1
    assert supervision.dropped == {"the prompt alone fills seq_len=8": 1}
    dropped = opened(tokenizer, rows, seq_len=8, too_long="drop")
    (only,) = epoch(dropped)
    assert torch.equal(only.input_ids, first.input_ids)
    assert dropped.report.supervision.dropped == {"longer than seq_len=8": 2}
    assert "2 dropped (longer than seq_len=8)" in str(dropped.report)
    with pytest.raises(ValueError, match=r"no example is left of 2 records \(2: longer than seq_len=4\)"):
        opened(tokenizer, [long, asks], seq_len=4, too_long="drop")


def test_the_report_counts_what_is_learnt_before_training(tokenizer):
    """NeMo #1672, dllm #81: nobody could say how much of the loss was padding."""
    for policy in ("eos_one", "eos_to_batch", "eos_to_length"):
        data = opened(tokenizer, PAIRS, pad_supervision=policy, seq_len=48)
        batches = epoch(data, 4)
        total = sum(int(b.maskable.sum()) for b in batches)
        answers = sum(len(tokenizer.encode(p["completion"])) + 1 for p in PAIRS)
        supervision = data.report_for(4).supervision
        assert supervision.supervised == answers
        assert supervision.eos_padding == total - answers
        assert f"{total} tokens in the loss per epoch" in str(data.report_for(4))
    four = opened(tokenizer, PAIRS, eos_random=4)
    total = sum(int(b.maskable.sum()) for b in epoch(four))
    assert (four.report.supervision.supervised, four.report.supervision.eos_padding) == (answers, total - answers)


@pytest.mark.parametrize(("batch_size", "world"), [(1, 1), (2, 1), (1, 4), (2, 2), (4, 3)])
def test_rows_are_the_same_in_any_split_even_when_filled_to_the_batch(tokenizer, batch_size, world):
    data = opened(tokenizer, PAIRS, pad_supervision="eos_to_batch", shuffle=True)
    rows: dict[int, tuple[list[int], list[bool]]] = {}
    for rank in range(world):
        for batch in take(data.train_batches(batch_size, rank=rank, world=world, global_batch=12), 24 // batch_size):
            for number, ids, maskable in zip(batch.rows.tolist(), batch.input_ids.tolist(), batch.maskable.tolist()):
                rows[number] = ids, maskable
    whole = next(data.train_batches(12))
    for number, ids, maskable in zip(whole.rows.tolist(), whole.input_ids.tolist(), whole.maskable.tolist()):
        assert rows[number] == (ids, maskable)
    stream = data.train_batches(2, global_batch=4)
    take(stream, 3)
    resumed = opened(tokenizer, PAIRS, pad_supervision="eos_to_batch", shuffle=True).train_batches(
        2, global_batch=4, state=json.loads(json.dumps(stream.state_dict()))
    )
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(take(stream, 4), take(resumed, 4), strict=True))


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=60), capacity=st.integers(20, 50))
@settings(max_examples=100)
def test_best_fit_puts_every_item_once_into_bins_with_room(lengths, capacity):
    bins = best_fit(np.asarray(lengths), capacity)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in b) for b in bins]
    assert max(loads) <= capacity
    assert sum(load <= capacity // 2 for load in loads) <= 1, "two half-empty bins would have been one"


def test_packed_rows_hold_whole_examples_that_see_only_themselves(tokenizer):
    data = opened(tokenizer, PAIRS, packing="documents", seq_len=64)
    alone = Counter(
        (tuple(b.input_ids[0][b.attention_mask[0]].tolist()), tuple(b.maskable[0][b.attention_mask[0]].tolist()))
        for b in epoch(opened(tokenizer, PAIRS))
    )
    found: Counter[Any] = Counter()
    batches = epoch(data)
    assert len(batches) < len(PAIRS) / 2
    for batch in batches:
        assert batch.position_ids is not None
        real = torch.ones(64, dtype=torch.bool) if batch.attention_mask is None else batch.attention_mask[0]
        starts = [i for i in range(64) if batch.position_ids[0, i] == 0 and real[i]]
        ends = [*starts[1:], int(real.sum())]
        for a, b in zip(starts, ends, strict=True):
            found[tuple(batch.input_ids[0, a:b].tolist()), tuple(batch.maskable[0, a:b].tolist())] += 1
    assert found == alone


def test_epochs_have_the_same_rows_in_another_order(tokenizer):
    data = opened(tokenizer, PAIRS, packing="documents", shuffle=True, seq_len=32)
    stream, n = data.train_batches(1), data.rows_per_epoch
    one, two = ([tuple(b.input_ids[0].tolist()) for b in take(stream, n)] for _ in range(2))
    assert one != two
    assert Counter(one) == Counter(two)


@pytest.mark.parametrize("rows", [CHATS, PAIRS], ids=["messages", "completion"])
def test_jsonl_parquet_and_datasets_give_the_same_rows(tokenizer, tmp_path: Path, rows):
    from datasets import Dataset

    expected = [b.input_ids for b in epoch(opened(tokenizer, rows))]
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({**row, "other": 1}) for row in rows))
    options = {"records": "messages" if rows is CHATS else "completion", "seq_len": 64, "packing": "none"}
    options |= {"shuffle": False, "validation_fraction": 0.0, "chat_template": "plain"}
    for source in ("saved", "rows.parquet", "rows.jsonl"):
        data = open_data(DataConfig(source=str(tmp_path / source), **options), tokenizer)
        assert all(torch.equal(a, b.input_ids) for a, b in zip(expected, epoch(data), strict=True))
    given_dataset = opened(tokenizer, rows, chat_template="plain")
    assert len(epoch(given_dataset)) == len(rows)
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + '\n{"messages": [], "prompt": "a", "completion": ""}')
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: "):
        open_data(DataConfig(source=str(tmp_path / "rows.jsonl"), **options), tokenizer)
    with pytest.raises(ValueError, match="no column"):
        open_data(
            DataConfig(source="given", **options | {"messages_column": "x", "prompt_column": "x"}),
            tokenizer,
            train=Dataset.from_list(rows),
        )


def test_validation_counts_the_answers_and_their_one_end(tokenizer):
    one, filled = (
        opened(tokenizer, PAIRS, pad_supervision=policy, validation_fraction=0.3)
        for policy in ("eos_one", "eos_to_length")
    )
    assert one.validation is not None
    ids = [b.input_ids[b.maskable] for b in one.validation_batches(2)]
    assert one.validation_tokens == sum(len(i) for i in ids) == filled.validation_tokens
    text = "".join(tokenizer.decode(i) for i in ids)
    assert text.count("<|eos|>") == one.report.validation_documents
    assert "Document" not in text
    assert one.validation_bytes == len(text.replace("<|eos|>", "").encode())
    assert one.report.documents + one.report.validation_documents == len(PAIRS)


def test_a_tokenizer_is_trained_on_what_the_records_say(tokenizer):
    config = DataConfig(source="x", records="messages", packing="none", validation_fraction=0.0)
    assert list(training_texts(config, train=[TWO_TURNS])) == ["be short\none\nfirst answer\ntwo\nlast answer"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"packing": "stream"}, "packing='stream' would let examples see each other"),
        ({"packing": "documents", "pad_supervision": "eos_to_batch"}, "use packing='none'"),
        ({"streaming": True}, "set streaming=false"),
        ({"format": "lines"}, "plain text has not"),
        ({"source": "builtin"}, "plain text has not"),
        ({"records": "text", "pad_supervision": "none"}, "has no effect with records='text'"),
        ({"records": "chats"}, "choose one of text, messages, completion"),
        ({"eos_random": 0}, "at least 1"),
        ({"eos_random": 4, "pad_supervision": "none"}, "has no effect with pad_supervision='none'"),
    ],
)
def test_options_that_do_not_go_together_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"source": "x.jsonl", "records": "messages", "packing": "none", **options})


def test_another_supervision_is_other_data(tokenizer):
    state = opened(tokenizer, PAIRS).train_batches(2).state_dict()
    with pytest.raises(ValueError, match="belongs to other data"):
        opened(tokenizer, PAIRS, pad_supervision="eos_to_length").train_batches(2, state=state)


def test_a_template_that_is_no_file_is_named(tokenizer):
    with pytest.raises(FileNotFoundError, match=r"'nowhere\.jinja'"):
        chat_tokenizer(tokenizer, "nowhere.jinja")
    assert tokenizer.chat_template is None, "the caller's tokenizer is left alone"
