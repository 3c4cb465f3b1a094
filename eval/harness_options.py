"""What decides the answer to a request of the evaluation harness, and the presets that say it per public model.

Options are flat: those of the likelihood (`Likelihoods`), those of the text (`Texts`), the arguments of `generate` and
the knobs of the strategy, in the words of `generate`. A preset (`eval/harness_presets/*.yaml`) gives some for a model
and some per task, by a pattern over task names. What a caller says beats the task's, which beats the model's.
Read next: `harness.py`.
"""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from fnmatch import fnmatchcase
from importlib.resources import files
from typing import Any, Literal

import yaml

from mdlm.samplers.arguments import conform, one_of
from mdlm.samplers.generate import DEFAULT_STRATEGY, generate
from mdlm.samplers.presets import PRESETS, build_strategy, unknown_strategy

DRAWS: dict[str, int] = {"count": 128, "nelbo": 128, "any_order": 8}
"""`mc_num` of each estimator where it is not given."""


@dataclass(frozen=True)
class Likelihoods:
    """How the likelihood of an answer given its prompt is estimated (`harness_score.py`)."""

    estimator: Literal["count", "nelbo", "any_order"] = "count"
    """`count`: exactly k masked tokens, k spread evenly (LLaDA's protocol); `nelbo`: independent masks at stratified
    times; `any_order`: the chain rule along random orders. All three have the same expectation."""
    mc_num: int | None = None
    """Draws of masks per answer (any_order: orders, each of as many evaluations as the answer has tokens); None: 128
    (any_order: 8)."""
    group: int = 8
    """count and nelbo: draws that are stratified together; divides mc_num. The spread over groups is the error."""
    exact: bool = True
    """count: sum over all masks where that takes no more evaluations than mc_num (answers of up to 7 tokens by
    default); the error is 0 then."""

    def __post_init__(self) -> None:
        one_of("estimator", self.estimator, DRAWS)
        if self.draws < 1 or self.group < 1:
            raise ValueError(f"mc_num and group must be 1 or more, got mc_num={self.draws} and group={self.group}")
        if self.estimator != "any_order" and self.draws >= self.group and self.draws % self.group:
            raise ValueError(f"group must divide mc_num, got mc_num={self.draws} and group={self.group}")

    @property
    def draws(self) -> int:
        """`mc_num`, or the estimator's own."""
        return DRAWS[self.estimator] if self.mc_num is None else self.mc_num

    @property
    def stratum(self) -> int:
        """Draws per group: `group`, or all where there are fewer."""
        return min(self.group, self.draws)


@dataclass(frozen=True)
class Texts:
    """How texts become tokens."""

    add_bos_token: bool = False
    """Put the tokenizer's beginning-of-sequence token in front of every prompt that does not begin with it."""
    prefix_token_id: int | None = None
    """Given token in front of a text without context; None: the beginning-of-sequence token, else the end token."""


GENERATION: dict[str, Any] = {
    name: parameter.default
    for name, parameter in inspect.signature(generate).parameters.items()
    if name not in ("model", "tokenizer", "prompts", "strategy", "seed", "batch_size", "knobs")
} | {"max_new_tokens": None}
"""Arguments of `generate` that are options here, with their defaults. `max_new_tokens` None: what the task asks for."""

_HINTS = typing.get_type_hints(generate) | {"max_new_tokens": int | None}


@dataclass(frozen=True)
class RequestOptions:
    """Everything that decides an answer beside the request, the model and the seed."""

    likelihood: Likelihoods
    texts: Texts
    strategy: str
    knobs: dict[str, Any]
    generation: dict[str, Any]
    """Of `GENERATION`, those that were given."""

    def given(self, name: str) -> Any:
        """A value of `GENERATION`, or its default."""
        return self.generation.get(name, GENERATION[name])

    def describe(self) -> dict[str, Any]:
        """All of it as plain values, the strategy's knobs with their defaults."""
        parameters = inspect.signature(PRESETS[self.strategy]).parameters
        return {
            "likelihood": {**asdict(self.likelihood), "mc_num": self.likelihood.draws},
            "texts": asdict(self.texts),
            "strategy": self.strategy,
            "knobs": {**{knob: parameter.default for knob, parameter in parameters.items()}, **self.knobs},
            "generation": {**GENERATION, **self.generation},
        }


def resolve(options: Mapping[str, Any], default: tuple[str, Mapping[str, Any]] | None = None) -> RequestOptions:
    """The flat options sorted and checked; what belongs to nothing else is a knob of the strategy.

    `default`: strategy and knobs where the options name none (a checkpoint's own); None: `threshold`. Raises ValueError
    for an unknown option or strategy, and for values out of range.
    """
    rest = dict(options)
    name = rest.pop("strategy", None)
    own: Mapping[str, Any] = {}
    if name is None:
        name, own = (DEFAULT_STRATEGY, {}) if default is None else default
    if name not in PRESETS:
        raise unknown_strategy(name)
    parts = {kind: _taken(kind, rest) for kind in (Likelihoods, Texts)}
    knobs = dict(inspect.signature(PRESETS[name]).parameters)
    generation = {key: rest.pop(key) for key in list(rest) if key in GENERATION and key not in knobs}
    stray = [key for key in rest if key not in knobs]
    if stray:
        known = [*(f.name for kind in parts for f in fields(kind)), "strategy", *GENERATION, *knobs]
        near = difflib.get_close_matches(stray[0], known, n=1)
        try:
            build_strategy(name, **rest)
        except ValueError as error:
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{error}.{hint} Options of every strategy: {', '.join(GENERATION)}") from error
    build_strategy(name, **{**own, **rest})
    return RequestOptions(
        likelihood=Likelihoods(**parts[Likelihoods]),
        texts=Texts(**parts[Texts]),
        strategy=name,
        knobs={**own, **rest},
        generation={key: conform(key, value, _HINTS[key]) for key, value in generation.items()},
    )


def _taken(kind: type, rest: dict[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass, taken out of `rest`, in their types."""
    hints = typing.get_type_hints(kind)
    return {f.name: conform(f.name, rest.pop(f.name), hints[f.name]) for f in fields(kind) if f.name in rest}


@dataclass(frozen=True)
class Preset:
    """How a public model is evaluated."""

    name: str
    about: str
    """Model, source and what differs from it."""
    apply_chat_template: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    tasks: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Pattern of task names -> options of these tasks, `num_fewshot` among them; the first that matches counts."""

    def of(self, task: str | None) -> dict[str, Any]:
        """The options for a task, without `num_fewshot`."""
        own = self._match(task)
        return {**self.options, **{key: value for key, value in own.items() if key != "num_fewshot"}}

    def num_fewshot(self, task: str | None) -> int | None:
        """Examples in the prompt; None: the task's own number."""
        return self._match(task).get("num_fewshot")

    def _match(self, task: str | None) -> dict[str, Any]:
        return next((own for pattern, own in self.tasks.items() if fnmatchcase(task or "", pattern)), {})


def preset_names() -> list[str]:
    """All presets."""
    folder = files("mdlm.eval.harness_presets")
    return sorted(path.name.removesuffix(".yaml") for path in folder.iterdir() if path.name.endswith(".yaml"))


def load_preset(name: str) -> Preset:
    """The preset of this name. Raises ValueError that lists them if there is none."""
    names = preset_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        raise ValueError(f"there is no preset {name!r}{hint} There are: {', '.join(names)}")
    text = files("mdlm.eval.harness_presets").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
    return Preset(name=name, **yaml.safe_load(text))
