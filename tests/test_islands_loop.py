"""The outer step in the training loop of one process: identities, options, refusals, and links between two islands."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from test_islands import free_ports
from torch import nn
from toy_islands import Toy
from training_runs import assert_same, configure, fresh_accelerate, records, tensors, write_texts

from mdlm.training import islands as islands_module
from mdlm.training.config import parse_config
from mdlm.training.islands import Islands
from mdlm.training.links import Control, Gloo, IslandLost, Links, Patience, connect
from mdlm.training.loop import train
from mdlm.training.outer_config import PRESETS, OuterConfig
from mdlm.training.team import Team


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(autouse=True)
def _fresh_accelerate() -> Iterator[None]:
    with fresh_accelerate():
        yield


def run(texts: Path, output: Path, **options: Any) -> Path:
    with fresh_accelerate():
        checkpoint = train(configure(texts, output, **options))
    assert checkpoint is not None
    return checkpoint


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_one_island_exchanging_every_step_at_rate_1_is_plain_training(
    texts: Path, tmp_path: Path, optimizer: str
) -> None:
    """Bit for bit, weights and inner optimizer, published and raw."""
    plain = tensors(run(texts, tmp_path / "plain", optim__name=optimizer))
    own = {"outer__preset": "local_sgd", "outer__every": 1, "optim__name": optimizer}
    outer = tensors(run(texts, tmp_path / "outer", **own))
    for name in plain:
        assert torch.equal(plain[name], outer[name]), name
    published = {k: t for k, t in plain.items() if k.startswith("model")}
    for name, tensor in published.items():
        assert torch.equal(tensor, outer[f"train_state/{name}"])


def test_one_island_with_momentum_is_snoo(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """m = mu m + d; a = a - lr (d + mu m), d = a - local, in float64 from the local weights of each round's end."""
    ends: list[np.ndarray] = []
    original = Islands.after_step

    def flat(model: nn.Module) -> np.ndarray:
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double().numpy().copy()

    def after_step(self: Islands, step: int, *rest: Any) -> Any:
        if step == 1:
            ends.append(self.outer.anchors[0].double().numpy().copy())
        if step % 3 == 0 or step == 8:
            ends.append(flat(self.outer.model))
        return original(self, step, *rest)

    monkeypatch.setattr(Islands, "after_step", after_step)
    checkpoint = run(texts, tmp_path, outer__preset="diloco", outer__every=3)
    anchor, momentum = ends[0], 0.0
    for local in ends[1:]:  # after 3, 6 and, at the end of training, what was left of the round
        delta = anchor - local
        momentum = 0.9 * momentum + delta
        anchor = anchor - 0.7 * (delta + 0.9 * momentum)
    saved = {k.partition(":")[2]: t for k, t in tensors(checkpoint).items() if k.startswith("model.safetensors")}
    names = [name for name in _parameter_names(checkpoint)]
    published = torch.cat([saved[name].reshape(-1) for name in names]).double().numpy()
    assert np.abs(published - anchor).max() < 2e-6
    assert np.abs(published - ends[-1]).max() > 1e-3


def _parameter_names(checkpoint: Path) -> list[str]:
    from mdlm.modeling import MDLMForMaskedLM

    return [name for name, _ in MDLMForMaskedLM.from_pretrained(checkpoint).named_parameters()]


def test_the_outer_step_counts_optimizer_steps_and_not_micro_batches(texts: Path, tmp_path: Path) -> None:
    """accelerate's LocalSGD counts micro-batches; torch's post-local SGD once ran its counter ahead."""
    one = run(texts, tmp_path / "one", outer__preset="diloco", outer__every=3)
    run(texts, tmp_path / "two", outer__preset="diloco", outer__every=3, train__micro_batch=2)
    assert [r["step"] for r in records(one.parent, "outer")] == [3, 6, 8]
    assert [r["step"] for r in records(tmp_path / "two", "outer")] == [3, 6, 8]


def test_the_average_follows_the_anchors(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps after the third move it as three updates towards the new anchor would."""
    seen: list[tuple[Tensor64, Tensor64]] = []
    original = Islands.after_step
    options = {"outer__preset": "diloco", "outer__every": 4, "train__ema": 0.5, "train__steps": 8}

    def after_step(self: Islands, step: int, *rest: Any) -> Any:
        moment = original(self, step, *rest)
        if moment.moved:
            seen.append((moment.moved, self.outer.anchors[0].double().clone()))
        return moment

    monkeypatch.setattr(Islands, "after_step", after_step)
    start: list[Any] = []
    make = islands_module.OuterStep.__init__

    def init(self: Any, *arguments: Any, **more: Any) -> None:
        make(self, *arguments, **more)
        start.append(self.anchors[0].double().clone())

    monkeypatch.setattr(islands_module.OuterStep, "__init__", init)
    checkpoint = run(texts, tmp_path, **options)
    average, updates = start[0], 0
    for moved, anchor in seen:
        for _ in range(moved):
            keep = min(0.5, (1 + updates) / (10 + updates))
            average = keep * average + (1 - keep) * anchor
            updates += 1
    assert [moved for moved, _ in seen] == [4, 4]
    saved = {k.partition(":")[2]: t for k, t in tensors(checkpoint).items() if k.startswith("model.safetensors")}
    published = torch.cat([saved[name].reshape(-1).double() for name in _parameter_names(checkpoint)])
    assert (published - average).abs().max() < 1e-6


Tensor64 = Any


@pytest.mark.parametrize("preset", ["diloco", "streaming", "diloco_x", "eager"])
def test_one_island_resumes_in_mid_round(texts: Path, tmp_path: Path, preset: str) -> None:
    """Checkpoint 3 of rounds of 4: messages of streaming, eager and one-step delay are in flight at 5 of 4 + 1."""
    own = {"outer__preset": preset, "outer__every": 4, "checkpoint__every": 5, "checkpoint__keep_last": 9}
    own |= {"outer__fragments": 2} if preset == "streaming" else {}
    straight = run(texts, tmp_path / "straight", train__steps=10, **own)
    resumed = run(texts, tmp_path / "resumed", train__steps=10, resume=straight.parent / "checkpoint-5", **own)
    assert_same(straight, resumed)


def test_a_checkpoint_without_outer_step_is_not_resumed_with_one(texts: Path, tmp_path: Path) -> None:
    plain = run(texts, tmp_path / "plain", train__steps=2)
    with pytest.raises(ValueError, match=r"an outer step .--outer.preset. was None, is True"):
        run(texts, tmp_path / "other", resume=plain, outer__preset="diloco")


def test_other_fragments_are_refused_on_resume(texts: Path, tmp_path: Path) -> None:
    saved = run(texts, tmp_path / "one", train__steps=2, outer__preset="diloco")
    with pytest.raises(ValueError, match="other fragments or shapes"):
        run(texts, tmp_path / "two", resume=saved, outer__preset="diloco", outer__fragments=2)


def test_a_checkpoint_of_another_number_of_islands_is_refused_or_taken_over(texts: Path, tmp_path: Path) -> None:
    """Saved as if by two islands: refused; on request the new set of islands goes on from the anchors."""
    own = {"outer__preset": "diloco", "outer__every": 4, "checkpoint__every": 6, "checkpoint__keep_last": 9}
    saved = run(texts, tmp_path / "one", **own).parent / "checkpoint-6"
    from mdlm.training import packed

    path = saved / "train_state" / "outer-0.safetensors"
    state = packed.read(path)
    state["outer"]["islands"] = 2
    size = path.stat().st_size
    packed.write(path, state)
    assert path.stat().st_size == size, "the manifest knows it"
    with pytest.raises(ValueError, match="saved with 2 islands and there are 1"):
        run(texts, tmp_path / "two", resume=saved, **own)
    again = run(texts, tmp_path / "two", resume=saved, outer__new_islands="true", **own, train__steps=6 + 1)
    first = records(again.parent, "train")[0]
    assert first["step"] == 7


def test_another_islands_checkpoint_is_refused(texts: Path, tmp_path: Path) -> None:
    """An island that loads the file of another has its residuals and weights, and not its own."""
    own = {"outer__preset": "diloco"}
    saved = run(texts, tmp_path / "one", train__steps=2, **own)
    from mdlm.training import packed

    path = saved / "train_state" / "outer-0.safetensors"
    state = packed.read(path)
    state["island"] = 3
    packed.write(path, state)
    with pytest.raises(ValueError, match=r"belongs to island 3 .here 0"):
        run(texts, tmp_path / "two", resume=saved, **own)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_gives_defaults_and_the_command_line_overrides_them(preset: str, tmp_path: Path) -> None:
    own = [f"--output_dir={tmp_path}", f"--outer.preset={preset}"]
    if PRESETS[preset].engine == "syncer":
        own += ["--outer.rendezvous=host:1", "--outer.island=0"]
    parsed = parse_config(own).outer
    launch = {"rendezvous": None, "island": None}
    assert dataclasses.replace(parsed, **launch) == PRESETS[preset]
    changed = parse_config([*own, "--outer.timeout=7"]).outer
    assert dataclasses.replace(changed, timeout=None) == parsed


def test_a_file_comes_before_the_preset(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"output_dir: {tmp_path}\nouter:\n  preset: streaming\n  every: 40\n  compress:\n    codec: int8\n"
    )
    parsed = parse_config([f"--config={recipe}", "--outer.tau=3"]).outer
    assert (parsed.every, parsed.compress.codec, parsed.tau) == (40, "int8", 3)
    assert (parsed.fragments, parsed.alpha) == (8, 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--outer.every=5"], "no effect without --outer.preset"),
        (["--outer.preset=muloco", "--optim.name=adamw"], "muloco is Muon inside"),
        (["--outer.preset=diloco", "--outer.islands=2", "--outer.island=1"], "belong together"),
        (["--outer.preset=diloco", "--outer.rendezvous=host", "--outer.island=0"], "must be host:port"),
        (["--outer.preset=diloco", "--outer.rendezvous=h:1", "--outer.island=1"], "in \\[0, islands = 1"),
        (["--outer.preset=diloco", "--outer.islands=0"], "1 or more"),
        (["--outer.preset=diloco", "--outer.timeout=0"], "positive"),
    ],
)
def test_options_that_do_not_go_together(options: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config([f"--output_dir={tmp_path}", *options])


def test_islands_that_do_not_divide_the_processes_are_refused(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--outer.islands 2 does not divide the 1 process"):
        run(texts, tmp_path, outer__preset="diloco", outer__islands=2)


@pytest.mark.parametrize("island", [0, 1])
def test_an_island_that_never_comes_is_an_error_after_the_time_out(island: int) -> None:
    """gloo's own first connection waits for half an hour, or for ever."""
    config = OuterConfig(rendezvous=f"127.0.0.1:{free_ports(1)[0]}", island=island, islands=2, timeout=1.0)
    with pytest.raises(IslandLost, match="another island did not answer"):
        connect(config, Accelerator(cpu=True))


def two_islands(work: Callable[[Links], Any]) -> list[Any]:
    """work(links) on two islands, each a thread with gloo groups of its own."""
    store, results, errors = dist.HashStore(), [None, None], [None, None]

    def one(island: int) -> None:
        groups = [
            dist.ProcessGroupGloo(dist.PrefixStore(name, store), island, 2, timedelta(seconds=20)) for name in "wc"
        ]
        patience = Patience(10.0)
        wide, control = (Gloo(group, island, 2, patience) for group in groups)
        links = Links(island, 2, Team(0, 1, torch.device("cpu")), True, patience, wide, Control(control))
        try:
            results[island] = work(links)
        except Exception as error:  # noqa: BLE001 - raised below
            errors[island] = error

    threads = [threading.Thread(target=one, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results


@pytest.mark.parametrize("difference", ["initial weights", "seed", None])
def test_islands_that_start_with_different_weights_or_options_are_refused(difference: str | None) -> None:
    """Different initial weights on every worker: deltas of different models would be averaged for ever."""

    def work(links: Links) -> None:
        model = Toy(links.island if difference == "initial weights" else 0)
        outer = Islands(model, OuterConfig(islands=2), links, sharded=False)
        try:
            outer.verify({"seed": links.island if difference == "seed" else 0})
        finally:
            outer.close()

    if difference is None:
        two_islands(work)
    else:
        with pytest.raises(ValueError, match=f"{difference} of island 1 differ"):
            two_islands(work)


def test_the_time_out_follows_the_measured_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time-outs shorter than a round of local steps end healthy runs: it is five times the longest one so far."""
    clock = iter([0.0, 100.0, 1100.0, 1200.0])
    monkeypatch.setattr(islands_module.time, "monotonic", lambda: next(clock))
    links = Links(0, 1, Team(0, 1, torch.device("cpu")))
    outer = Islands(Toy(), OuterConfig(every=2, fragments=2), links, sharded=False)
    waits = []
    for step in range(1, 4):
        outer.after_step(step, 1, False, False)
        waits.append(links.patience.seconds)
    assert waits == [1000.0, 10000.0, 10000.0]


def test_an_island_that_is_ahead_keeps_what_the_others_can_resume_from() -> None:
    """Checkpoints every 2 of rounds of 10, one kept: one that lags in round 2 may only have those of round 1."""

    def work(links: Links) -> list[int | None]:
        outer = Islands(Toy(), OuterConfig(every=10, islands=2), links, sharded=False)
        known = []
        for step in range(1, 22):
            outer.after_step(step, 1, False, False)
            known.append(outer.common_step())
        outer.close()
        return known

    known, _ = two_islands(work)
    assert known[8] == 0, "nobody has been heard of before the first exchange"
    assert known[9:19] == [10] * 10
    assert known[19] == 20


def test_noloco_publishes_the_mean_of_islands_that_differ() -> None:
    """Replicas are never equal: no single one is the model."""

    def work(links: Links) -> tuple[Any, Any]:
        outer = Islands(Toy(), PRESETS["noloco"], links, sharded=False)
        with torch.no_grad():
            outer.outer.anchors[0].add_(1.0 + links.island)
        before = [p.clone() for p in outer.outer.model.parameters()]
        with outer.published(None):
            inside = [p.clone() for p in outer.outer.model.parameters()]
        assert all(torch.equal(p, q) for p, q in zip(before, outer.outer.model.parameters()))
        outer.close()
        return before, inside

    (before, one), (_, two) = two_islands(work)
    for start, a, b in zip(before, one, two):
        assert torch.equal(a, b)
        assert (a - (start + 1.5)).abs().max() < 1e-6


def test_a_stop_asked_of_one_island_stops_both_at_the_same_landing() -> None:
    """Asked in the middle of round 1, obeyed by both at its landing, and not before."""

    def work(links: Links) -> list[int]:
        outer = Islands(Toy(), OuterConfig(every=4, islands=2), links, sharded=False)
        stops = []
        for step in range(1, 13):
            if outer.after_step(step, 1, links.island == 1 and step >= 6, False).stop:
                stops.append(step)
                break
        outer.close()
        return stops

    assert two_islands(work) == [[8], [8]]


def test_the_documentation_has_a_row_for_every_preset() -> None:
    """With the values that it has."""
    text = (Path(__file__).parents[1] / "docs" / "low-communication.md").read_text()
    table = text[text.index("| preset |") :].partition("\n\n")[0]
    rows = {row.split("|")[1].strip(" `"): row.split("|") for row in table.splitlines() if row.startswith("| `")}
    assert set(rows) == set(PRESETS)
    for name, preset in PRESETS.items():
        assert rows[name][3].strip() == str(preset.every), name
        if preset.engine in ("islands", "syncer"):
            assert rows[name][5].split(",")[0].strip() == f"{preset.lr:g}", name
            assert preset.optimizer == "sgd" or rows[name][5].split(",")[1].strip() == f"{preset.momentum:g}", name


@pytest.mark.parametrize("ema", [0.9, None])
def test_the_dense_phase_is_plain_training_and_publishes_the_weights(
    texts: Path, tmp_path: Path, ema: float | None
) -> None:
    """Until `start_step` the anchors are the initial weights, which nobody wants to see or save."""
    options = {"validation__every": 2, "checkpoint__every": 3, "checkpoint__keep_last": 9, "train__ema": ema}
    plain = run(texts, tmp_path / "plain", **options).parent
    outer = run(
        texts, tmp_path / "outer", outer__preset="diloco", outer__every=3, outer__start_step=5, **options
    ).parent
    one, two = ([r["nats_per_token"] for r in records(folder, "validation")] for folder in (plain, outer))
    assert one[:2] == two[:2]
    assert one[3] != two[3]
    one_tensors, two_tensors = (tensors(folder / "checkpoint-3") for folder in (plain, outer))
    for name in one_tensors:
        assert torch.equal(one_tensors[name], two_tensors[name]), name
    for new_islands in ("false", "true"):
        again = run(texts, tmp_path / new_islands, outer__preset="diloco", outer__every=3, outer__start_step=5,
                    outer__new_islands=new_islands, resume=outer / "checkpoint-3", **options)  # fmt: skip
        assert_same(outer / "checkpoint-8", again)
