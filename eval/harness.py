"""`MDLM`, the model class `mdlm` of lm-evaluation-harness, and its command line with that class registered.

    mdlm eval tasks CHECKPOINT --tasks a,b                                            (`harness_command.py`)
    python -m mdlm.eval.harness --model mdlm --model_args pretrained=CHECKPOINT --tasks a,b      (lm_eval's own options)

lm-eval 0.4.13 has no way to find outside models, so the program `lm_eval` itself does not know `mdlm`; the second line
is that program with the class registered. Several processes: `accelerate launch -m mdlm.eval.harness ...`.

The log-likelihood that lm-eval gets is an estimate of a lower bound (`harness_score.py`); its protocol, its standard
errors and its cost stand under `mdlm` in the results' `config`. The second value, "would greedy decoding write this",
is what `greedy_matches` says. Every answer is a function of the request, the options, the seed and the model: neither
of the batch, nor of `limit`, nor of the number of processes. Read next: `harness_jobs.py`.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mdlm.adapter import base_hash
from mdlm.checkpoint import provenance
from mdlm.eval.harness_jobs import Job, Worker, batches
from mdlm.eval.harness_load import join_processes, load_with_adapter, own_device
from mdlm.eval.harness_options import RequestOptions, load_preset, resolve
from mdlm.eval.harness_store import Answers, Record, answer_key
from mdlm.samplers.generate import stream

try:
    import lm_eval.models  # noqa: F401  (before ours is registered: lm_eval fills its registry only while it is empty)
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
    from tqdm import tqdm
except ImportError as error:
    raise ImportError(f"the evaluation harness needs lm-eval ({error}): pip install 'mdlm-torch[eval]'") from error


@register_model("mdlm")
class MDLM(LM):
    """A masked-diffusion model as lm-eval sees one.

    Args:
        pretrained: checkpoint folder or run (also of public formats, see `load_model`); or a model or `Denoiser`, with
            its `tokenizer`.
        tokenizer: of a `pretrained` that is an object.
        peft: an adapter of our training for `pretrained` (its folder, checkpoint or run). A checkpoint that is one
            needs no `peft`: its base is known.
        preset: name of a preset (`eval/harness_presets`); the options given here beat its own.
        batch_size: rows per forward; changes nothing but rounding.
        max_batch_size: lm-eval gives it; there is no automatic batch size, so only None is allowed.
        max_length: longest prompt and answer together; None: what the model takes.
        seed: of masks and of sampling.
        dtype: precision of the weights: float32, bfloat16, float16 or float64.
        device: auto (a GPU if there is one; with several processes each its own), cpu, cuda, cuda:1, ...
        answers: folder to keep answers in as they are found.
        resume: use the answers that are kept there.
        **options: see `RequestOptions`: `estimator`, `mc_num`, `group`, `exact`, `add_bos_token`, `prefix_token_id`,
            `strategy`, the arguments of `generate`, and the strategy's knobs.

    Raises ValueError for what cannot be loaded, and for options that do not exist or do not fit, before any request.
    """

    def __init__(
        self,
        pretrained: Any = None,
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        peft: str | None = None,
        preset: str | None = None,
        batch_size: int = 16,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        seed: int = 0,
        dtype: str = "float32",
        device: str = "auto",
        answers: str | Path | None = None,
        resume: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if max_batch_size is not None or not str(batch_size).isdigit() or int(batch_size) < 1:
            raise ValueError(
                f"batch_size is {batch_size!r} and max_batch_size {max_batch_size!r}; give batch_size as a number of 1 "
                "or more: there is no automatic one"
            )
        self.preset = None if preset is None else load_preset(str(preset))
        named = isinstance(pretrained, (str, Path, int))
        if pretrained is None:
            raise ValueError("give pretrained, a checkpoint: --model_args pretrained=FOLDER")
        if not named and (tokenizer is None or peft is not None):
            raise ValueError("pretrained is an object: give its tokenizer with it, and no peft")
        self._rank, self._world_size = join_processes()
        model: Any = pretrained
        if named:
            model, tokenizer = load_with_adapter(str(pretrained), peft, dtype, own_device(device))
        assert tokenizer is not None
        self.tokenizer = tokenizer
        limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        if max_length is not None and limit is not None and max_length > limit:
            raise ValueError(f"max_length is {max_length}, the model takes at most {limit}")
        self.worker = Worker(model, tokenizer, int(batch_size), limit if max_length is None else max_length, seed)
        self._device = self.worker.denoiser.device
        self._given = dict(options)
        self._options: dict[str | None, RequestOptions] = {}
        for task in (None, *(self.preset.tasks if self.preset else ())):
            self._check(self.options_of(task))
        network = model if isinstance(model, torch.nn.Module) else getattr(model, "model", None)
        weights = base_hash(network) if isinstance(network, torch.nn.Module) else None
        if answers is not None and weights is None:
            raise ValueError(f"answers cannot be kept for a {type(model).__name__}, whose weights cannot be told apart")
        self._keyed_by = {
            "weights": weights,
            "dtype": dtype if named else None,
            "max_length": self.worker.max_length,
            "seed": seed,
        }
        place = str(pretrained) if named else type(pretrained).__name__
        self.identity = {"pretrained": place, "peft": peft, **self._keyed_by}
        self.answers = Answers(answers, self._rank, resume)
        self._statistics: dict[str, dict[str, Any]] = {}
        self.barrier()

    def options_of(self, task: str | None) -> RequestOptions:
        """What decides the answers to a task's requests."""
        if task not in self._options:
            stored = getattr(getattr(self.worker.model, "generation_config", None), "strategy", None)
            own = (stored["name"], stored.get("knobs", {})) if stored is not None else None
            preset = {} if self.preset is None else self.preset.of(task)
            self._options[task] = resolve({**preset, **self._given}, own)
        return self._options[task]

    def _check(self, options: RequestOptions) -> None:
        """Raises here what the sampler would raise at the first request."""
        call = {**options.generation, "max_new_tokens": 1}
        stream(self.worker.model, self.tokenizer, [0], strategy=options.strategy, **call, **options.knobs)
        length, limit = options.given("max_new_tokens"), self.worker.max_length
        if length is not None and not 1 <= length <= (length if limit is None else limit):
            raise ValueError(f"max_new_tokens is {length}; it must be 1 or more, and at most max_length, {limit}")
        if options.texts.add_bos_token and self.tokenizer.bos_token_id is None:
            raise ValueError("add_bos_token is set, but the tokenizer has no beginning-of-sequence token")

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """An estimate in nats for each (context, continuation), and whether greedy decoding writes the continuation."""

        def job(request: Instance, options: RequestOptions, repeat: int) -> Job:
            context, continuation = request.args
            return self.worker.likelihood(context, continuation, options)

        return [_pair(record) for record in self._answer("loglikelihood", requests, job, self.worker.score, _pair)]

    def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
        """An estimate in nats for each whole text, every token predicted once."""

        def job(request: Instance, options: RequestOptions, repeat: int) -> Job:
            return self.worker.rolling(request.args[0], options)

        records = self._answer("loglikelihood_rolling", requests, job, self.worker.score_texts, _number)
        return [_number(record) for record in records]

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """An answer to each context, cut before the first of the task's `until` strings."""

        def job(request: Instance, options: RequestOptions, repeat: int) -> Job:
            context, gen_kwargs = request.args
            return self.worker.generation(context, gen_kwargs, options, repeat)

        return [_text(record) for record in self._answer("generate_until", requests, job, self.worker.generate, _text)]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The chat as one text; without `add_generation_prompt` its last message is left open."""
        self.chat_template(True)
        text = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return str(text)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The tokenizer's template; None where none is wanted. Raises ValueError unless it has exactly one."""
        if not chat_template:
            return None
        own = self.tokenizer.chat_template
        if not isinstance(own, str) or isinstance(chat_template, str):
            has = {type(None): "has none", str: "has one, without a name"}.get(type(own), "has several")
            raise ValueError(
                f"apply_chat_template is {chat_template!r}, and the tokenizer {has}; set tokenizer.chat_template to "
                "the text of the one to use, and give no name"
            )
        return own

    @property
    def tokenizer_name(self) -> str:
        """Names lm-eval's cache of prompts."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """What lm-eval puts into the results' `config`: the protocol, its errors and its cost, of all processes."""
        return {
            "mdlm": {
                **self.identity,
                "preset": None if self.preset is None else self.preset.name,
                "block_size": self.worker.block_size,
                "device": str(self._device),
                "gpu": torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else None,
                "processes": self._world_size,
                "tasks": {
                    task: {"options": self.options_of(task).describe(), **found}
                    for task, found in self._statistics.items()
                },
                **provenance(),
            }
        }

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, one after the other."""
        return torch.cat([value.reshape(-1) for value in self._gather(tensor.cpu())])

    def gather_object(self, obj: Any, dst: int = 0) -> list[Any] | None:
        """The objects of all processes on process `dst`, None elsewhere."""
        found = self._gather(obj)
        return found if self._rank == dst else None

    def barrier(self) -> None:
        """Waits for all processes."""
        if self._world_size > 1:
            dist.barrier()

    def _gather(self, value: Any) -> list[Any]:
        if self._world_size == 1:
            return [value]
        found: list[Any] = [None] * self._world_size
        dist.all_gather_object(found, value)
        return found

    def _answer(
        self,
        kind: str,
        requests: Sequence[Instance],
        job_of: Callable[[Instance, RequestOptions, int], Job],
        compute: Callable[[list[Job]], list[Record]],
        value_of: Callable[[Record], Any],
    ) -> list[Record]:
        """The record of each request: those kept, and new ones computed and kept batch by batch.

        A request that comes again has the same answer, unless it is a generation that lm-eval wants `repeats` samples
        of; copies beyond these, with which lm-eval fills a process up, are answered as the first.
        """
        seen: Counter[int] = Counter()
        keys: list[str] = []
        jobs: dict[str, Job] = {}
        tasks: dict[str, str] = {}
        for request in requests:
            repeat = seen[id(request)] % (request.repeats or 1) if kind == "generate_until" else 0
            seen[id(request)] += 1
            options = self.options_of(request.task_name)
            key = answer_key(kind, list(request.args), options.describe(), self._keyed_by, repeat)
            keys.append(key)
            if key not in jobs:
                jobs[key], tasks[key] = job_of(request, options, repeat), str(request.task_name)
        new = {key: job for key, job in jobs.items() if key not in self.answers}
        with tqdm(total=len(new), desc=kind, disable=self._rank > 0 or not new) as progress:
            for batch in batches(new, self.worker.batch_size):
                self.answers.add(dict(zip(batch, compute(list(batch.values())))))
                progress.update(len(batch))
        records = [self.answers[key] for key in keys]
        for request, record in zip(requests, records):
            self.cache_hook.add_partial(kind, request.args, value_of(record))
        mine = {key: (tasks[key], job.truncated, self.answers[key]) for key, job in jobs.items()}
        every = {key: value for part in self._gather(mine) for key, value in part.items()}
        for task in sorted({name for name, _, _ in every.values()}):
            own = [value[1:] for _, value in sorted(every.items()) if value[0] == task]
            self._statistics.setdefault(task, {})[kind] = summarise(kind, own)
        return records


def _pair(record: Record) -> tuple[float, bool]:
    return record["log_likelihood"], record["greedy"]


def _number(record: Record) -> float:
    return float(record["log_likelihood"])


def _text(record: Record) -> str:
    return str(record["text"])


def summarise(kind: str, found: Sequence[tuple[bool, Record]]) -> dict[str, Any]:
    """Errors and cost of a task's answers: (whether the prompt was cut off, record) of each."""
    records = [record for _, record in found]
    count = len(records)
    result: dict[str, Any] = {"answers": count, "prompts_cut_off": sum(cut_off for cut_off, _ in found)}
    result["nfe_mean"] = sum(record["nfe"] for record in records) / count
    if kind == "generate_until":
        written, forwards = (sum(record[name] for record in records) for name in ("new_tokens", "forwards"))
        result["new_tokens_mean"] = written / count
        result["tokens_per_forward"] = written / max(1, forwards)
        result["empty_texts"] = sum(not record["text"].strip() for record in records)
        result["finish"] = dict(Counter(record["finish"] for record in records))
        return result
    if kind == "loglikelihood":
        result["greedy_nfe_mean"] = sum(record["greedy_nfe"] for record in records) / count
    errors = [record["standard_error"] for record in records]
    known = None not in errors
    result["tokens"] = sum(record["tokens"] for record in records)
    result["log_likelihood_sum"] = math.fsum(record["log_likelihood"] for record in records)
    result["standard_error_of_sum"] = math.sqrt(math.fsum(e * e for e in errors)) if known else None
    result["standard_error_mean"] = math.fsum(errors) / count if known else None
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """lm_eval's command line with `mdlm` registered; `--model mdlm` and `--device auto` where they are not said."""
    from lm_eval.__main__ import cli_evaluate

    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] not in (["ls"], ["validate"], ["--help"], ["-h"]) and arguments not in ([], ["run"]):
        words = {argument.partition("=")[0] for argument in arguments}
        if not words & {"--config", "-C", "--help", "-h"}:
            arguments += [] if words & {"--model", "-M"} else ["--model", "mdlm"]
            arguments += [] if "--device" in words else ["--device", "auto"]
    sys.argv = [sys.argv[0], *arguments]
    try:
        cli_evaluate()
    except (ValueError, OSError) as error:
        print(f"mdlm.eval.harness: {error}", file=sys.stderr)
        return 1
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
