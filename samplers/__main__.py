"""`mdlm sample CHECKPOINT --prompt "def " --strategy threshold --threshold 0.8 --show`, or `--html out.html`.

Every argument of `generate` is an option, and so are the knobs of the chosen strategy: `--strategy NAME --help` lists
them, `--strategies` all strategies. Read next: `generate.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from mdlm.samplers.generate import DEFAULT_STRATEGY, generate, stream
from mdlm.samplers.presets import PRESETS, unknown_strategy

PROG = "mdlm sample"
_JSON = "print one JSON object per answer: prompt, text, tokens, step_map, log_probs, counts, finish"
_OURS = {"model", "tokenizer", "prompts", "strategy", "knobs"}


@dataclasses.dataclass(frozen=True)
class SampleOptions:
    """What the command adds to the arguments of `generate`."""

    checkpoint: str
    """A checkpoint folder, or the output_dir of a run (its newest checkpoint)."""
    prompt: list[str]
    prompt_file: str | None = None
    """File with one prompt per line, after those of --prompt."""
    samples: int = 1
    """Answers to each prompt."""
    show: bool = False
    colour: Literal["step", "confidence"] = "step"
    """With --show: colour tokens by the step they were written in, or by the model's confidence in them."""
    delay: float = 0.0
    """With --show: seconds to wait after each step."""
    html: str | None = None
    """File for a page that plays the unmasking in a browser, with what else each token could have been."""
    compare: str | None = None
    """With --html: a second strategy, shown beside the first."""
    compare_knobs: dict[str, Any] | None = None
    """What is different for it: its knobs and options of every strategy, e.g. '{"threshold": 0.5, "seed": 1}'."""
    json: bool = False
    dtype: str = "float32"
    """Precision of the weights: float32, bfloat16, float16 or float64."""
    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:1, ..."""

    def __post_init__(self) -> None:
        """Raises ValueError naming the flag."""
        if self.samples < 1:
            raise ValueError(f"--samples is {self.samples}; it must be 1 or more")
        if not self.delay >= 0:
            raise ValueError(f"--delay is {self.delay}; it must be 0 or more seconds")
        if self.show and self.json:
            raise ValueError("--show and --json both want the output; give one of them")
        if self.html is not None and (self.show or self.json):
            raise ValueError("--html writes a page instead of --show and --json; give one of the three")
        if self.compare is not None and self.html is None:
            raise ValueError("--compare puts two strategies side by side on a page: give its file with --html")
        if self.compare_knobs is not None and self.compare is None:
            raise ValueError("--compare_knobs belong to a second strategy: name it with --compare")

    def prompts(self) -> list[str]:
        """All prompts, each as often as asked for."""
        lines = [] if self.prompt_file is None else Path(self.prompt_file).read_text(encoding="utf-8").splitlines()
        return [prompt for prompt in ([*self.prompt, *lines] or [""]) for _ in range(self.samples)]


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `mdlm sample` and `python -m mdlm.samplers`; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--strategies" in arguments:
        print(list_strategies())
        return 0
    try:
        name = chosen_strategy(arguments)
        options, shared, knobs = parse(arguments, name)
        sample(options, name, shared, knobs)
    except (ValueError, OSError) as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 1
    return 0


def chosen_strategy(arguments: list[str]) -> str | None:
    """The value of --strategy, needed before the rest can be parsed; None: the checkpoint's own.

    Raises ValueError if there is no such strategy.
    """
    first = argparse.ArgumentParser(prog=PROG, add_help=False, allow_abbrev=False)
    first.add_argument("--strategy")
    name: str | None = first.parse_known_args(arguments)[0].strategy
    if name is not None and name not in PRESETS:
        raise unknown_strategy(name)
    return name


def parse(arguments: list[str], name: str | None) -> tuple[SampleOptions, dict[str, Any], dict[str, Any]]:
    """Options of the command, arguments of `generate`, and the strategy's knobs that were given."""
    from jsonargparse import ArgumentParser, set_parsing_settings

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    knobs = {} if name is None else dict(inspect.signature(PRESETS[name]).parameters)
    shared = [p for p in inspect.signature(generate).parameters if p not in _OURS]
    parser = ArgumentParser(prog=PROG, description="Generate text from a checkpoint.", allow_abbrev=False)
    prompt = "text to continue; may be given several times, each is one answer (default: an empty prompt)"
    parser.add_argument("--prompt", action="append", default=[], help=prompt)
    text = f"how to unmask (default: the checkpoint's own, else {DEFAULT_STRATEGY}); its options follow below"
    parser.add_argument("--strategy", choices=list(PRESETS), help=text)
    parser.add_argument("--strategies", action="store_true", help="list all strategies and end")
    for flag, text in (("show", "watch the text unmask in the terminal"), ("json", _JSON)):
        parser.add_argument(f"--{flag}", action="store_true", help=text)
    parser.add_class_arguments(SampleOptions, as_group=False, as_positional=True, skip={"prompt", "show", "json"})
    every = parser.add_argument_group("options of every strategy")
    every.add_function_arguments(generate, as_group=False, skip={*_OURS, *knobs})
    if name is not None and knobs:
        own = parser.add_argument_group(f"options of the strategy {name!r}")
        own.add_function_arguments(PRESETS[name], as_group=False)
    given = parser.parse_args(arguments)
    values = vars(parser.instantiate(given))
    options = SampleOptions(**{f.name: values[f.name] for f in dataclasses.fields(SampleOptions)})
    return options, {p: values[p] for p in shared if p not in knobs}, {knob: values[knob] for knob in knobs}


def list_strategies() -> str:
    """Every strategy with its source, when to use it, and its knobs, as Markdown (`docs/strategies.md`)."""
    from docstring_parser import parse as parse_docstring

    parts = []
    for name, preset in PRESETS.items():
        doc = parse_docstring(preset.__doc__ or "")
        text = " ".join(" ".join(filter(None, (doc.short_description, doc.long_description))).split())
        about = {parameter.arg_name: " ".join((parameter.description or "").split()) for parameter in doc.params}
        knobs = [
            f"- `{knob} = {parameter.default!r}`: {about.get(knob, '')}"
            for knob, parameter in inspect.signature(preset).parameters.items()
        ]
        parts.append("\n".join([f"## {name}", "", text, *([""] if knobs else []), *knobs]))
    return "\n\n".join(parts)


def _label(name: str | None, knobs: dict[str, Any]) -> str:
    """A strategy and what of it is not as by default."""
    defaults = {} if name is None else inspect.signature(PRESETS[name]).parameters
    own = [f"{k}={value}" for k, value in knobs.items() if k not in defaults or value != defaults[k].default]
    return " ".join([name or "default strategy", *([f"({', '.join(own)})"] if own else [])])


def sample(options: SampleOptions, strategy: str | None, shared: dict[str, Any], knobs: dict[str, Any]) -> None:
    """Load, generate, print or write the page."""
    from mdlm.load import load_model
    from mdlm.samplers.show import show
    from mdlm.samplers.show_html import Unmasking

    prompts = options.prompts()
    model, tokenizer = load_model(options.checkpoint, options.dtype, options.device)
    start = time.perf_counter()
    streamed = {name: value for name, value in shared.items() if name != "batch_size"}
    if options.html is not None:
        runs = {
            _label(strategy, knobs): stream(model, tokenizer, prompts, strategy=strategy, top=5, **streamed, **knobs)
        }
        if options.compare is not None:
            if options.compare not in PRESETS:
                raise unknown_strategy(options.compare)
            second = options.compare_knobs or {}
            name = _label(options.compare, second)
            if name in runs:
                raise ValueError(f"both sides would be {name}; give the second other knobs with --compare_knobs")
            runs[name] = stream(model, tokenizer, prompts, strategy=options.compare, top=5, **{**streamed, **second})
        print(Unmasking(runs, tokenizer, title=f"Unmasking with {options.checkpoint}").save(options.html))
        return
    if options.show:
        frames = stream(model, tokenizer, prompts, strategy=strategy, **streamed, **knobs)
        show(frames, tokenizer, colour=options.colour, delay=options.delay)
        return
    out = generate(model, tokenizer, prompts, strategy=strategy, **shared, **knobs)
    seconds = time.perf_counter() - start
    for number, prompt in enumerate(prompts):
        if options.json:
            print(json.dumps({"prompt": prompt, **out.as_dict(number), "dtype": options.dtype}))
        else:
            print(("" if number == 0 else "\n") + f"--- {number}\n{prompt}{out.text[number]}")
    written = int(out.new_tokens.sum())
    print(
        f"{strategy or 'default strategy'}: {written} tokens in {seconds:.2f} s, NFE {out.nfe.float().mean():.1f}, "
        f"{written / max(1, int(out.forwards.sum())):.2f} tokens per forward",
        file=sys.stderr,
    )


if __name__ == "__main__":
    sys.exit(main())
