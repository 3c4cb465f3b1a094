"""Every preset against the float64 oracle over several rounds, with real exchanges between islands in threads."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import reference_outer as ref
import torch
from toy_islands import LAYERS, Toy, flat, quadratic, quadratic_, train_islands

from mdlm.training.merge import pair_of
from mdlm.training.outer_config import PRESETS, CompressConfig, MergeConfig, OuterConfig

ENDS = dict(zip(LAYERS, np.cumsum(list(LAYERS.values()))))
PLACES = {name: np.arange(ENDS[name] - size, ENDS[name]) for name, size in LAYERS.items()}
WHOLE = np.arange(88)


def cut(every: int, groups: list[list[str]]) -> list[tuple[np.ndarray, int]]:
    """Fragments by hand: positions, and the first start of fragment f of P, (f + 1) every / P."""
    count = len(groups)
    return [(np.concatenate([PLACES[n] for n in g]), (f + 1) * every // count) for f, g in enumerate(groups)]


def of(config: OuterConfig) -> ref.Outer:
    return ref.Outer(config.optimizer, config.lr, config.momentum, config.beta2, config.eps)


def compare(config: OuterConfig, setup: ref.Setup, steps: int, rtol: float = 2e-5) -> None:
    theta, anchors = ref.run(setup, flat(Toy()), quadratic, steps)
    islands = train_islands(config, setup.islands, steps)
    for i, island in enumerate(islands):
        held = np.zeros(88)
        for fragment, anchor in zip(island.outer.fragments, island.outer.anchors):
            for piece in fragment:
                held[PLACES[piece.name.removesuffix(".weight")]] = piece.of(anchor).reshape(-1).numpy()
        np.testing.assert_allclose(held, anchors[i], rtol=rtol, atol=rtol)
        np.testing.assert_allclose(flat(island.model), theta[i], rtol=rtol, atol=rtol)
    assert np.abs(anchors[0] - flat(Toy())).max() > 0.05, "nothing was learnt: the comparison would be empty"


def shorter(name: str, every: int, **changes: Any) -> OuterConfig:
    """A preset with a round short enough for a test."""
    return dataclasses.replace(PRESETS[name], every=every, **changes)


@pytest.mark.parametrize("islands", [1, 2, 3])
@pytest.mark.parametrize("name", ["local_sgd", "diloco", "muloco"])
def test_plain_presets(name: str, islands: int) -> None:
    config = shorter(name, 5)
    compare(config, ref.Setup(islands, 5, [(WHOLE, 5)], lambda: of(config)), 23)


@pytest.mark.parametrize("optimizer", ["heavy_ball", "adam", "nesterov", "sgd"])
def test_every_outer_optimizer(optimizer: Any) -> None:
    config = OuterConfig(every=4, optimizer=optimizer, lr=0.3, momentum=0.6)
    compare(config, ref.Setup(2, 4, [(WHOLE, 4)], lambda: of(config)), 17)


def test_streaming_with_fragments_overlap_mixing_and_fp4() -> None:
    config = shorter("streaming", 6, fragments=3, tau=2)
    groups = [["layers.0", "layers.2"], ["layers.1"], ["embed", "head"]]
    setup = ref.Setup(
        2, 6, cut(6, groups), lambda: of(config), tau=2, alpha=0.5, code=ref.e3m0_code, pull_code=ref.e3m0_code
    )
    compare(config, setup, 29)


def test_fragments_of_different_age_and_exact_codec() -> None:
    config = shorter("streaming", 7, fragments=4, tau=3, alpha=0.25, compress=CompressConfig())
    groups = [["layers.0"], ["layers.1"], ["layers.2"], ["embed", "head"]]
    setup = ref.Setup(3, 7, cut(7, groups), lambda: of(config), tau=3, alpha=0.25)
    compare(config, setup, 30)


@pytest.mark.parametrize("islands", [2, 3])
def test_eager_updates(islands: int) -> None:
    config = shorter("eager", 5)
    compare(config, ref.Setup(islands, 5, [(WHOLE, 5)], lambda: of(config), overlap="eager"), 27)


def test_one_step_delay_with_int4_and_error_feedback() -> None:
    compress = CompressConfig(codec="int4", feedback="classic")
    config = shorter("diloco_x", 5, compress=compress)
    code = lambda x: ref.int_code(x, 4)  # noqa: E731
    setup = ref.Setup(3, 5, [(WHOLE, 5)], lambda: of(config), overlap="one_step", code=code, pull_code=code, decay=1.0)
    compare(config, setup, 33)


def test_diloco_x_as_it_stands_follows_the_exact_delayed_step_closely() -> None:
    """Rank 64 is no compression for 4 x 4 matrices, which then travel whole: what is left is int4 with feedback."""
    config = shorter("diloco_x", 5)
    plain = dataclasses.replace(config, compress=CompressConfig())
    lossy, clean = (flat(train_islands(c, 2, 40)[0].model) for c in (config, plain))
    assert 0 < np.abs(lossy - clean).max() < 0.15


def test_noloco_pairs() -> None:
    config = shorter("noloco", 4)
    islands = 3

    def merge(i: int, number: int, sent: list[np.ndarray], anchors: list[np.ndarray]) -> np.ndarray:
        j = pair_of(i, number, islands, 0)
        pull = config.merge.pull / config.lr * (anchors[i] - (anchors[i] + anchors[j]) / 2)
        return (sent[i] + sent[j]) / 2 + pull

    compare(config, ref.Setup(islands, 4, [(WHOLE, 4)], lambda: of(config), merge=merge), 25)


def test_sparse_loco_top_k_two_bits_and_decaying_feedback() -> None:
    config = shorter("sparse_loco", 4, compress=dataclasses.replace(PRESETS["sparse_loco"].compress, density=0.1))
    code = lambda x: ref.topk_code(x, 0.1, lambda v: ref.codebook_code(v, 2))  # noqa: E731
    compare(config, ref.Setup(3, 4, [(WHOLE, 4)], lambda: of(config), code=code, decay=0.95), 29)


def per_tensor(rule: Any, lengths: list[int]) -> Any:
    """A merge that applies `rule(vectors)` tensor by tensor."""

    def merge(i: int, number: int, sent: list[np.ndarray], anchors: list[np.ndarray]) -> np.ndarray:
        ends = np.cumsum(lengths)
        return np.concatenate([rule([v[e - n : e] for v in sent]) for n, e in zip(lengths, ends)])

    return merge


def test_edit_weights_islands_by_the_softmax_of_their_negative_norms_and_clips() -> None:
    config = shorter("edit", 5, merge=MergeConfig(rule="edit", clip=0.8))

    def rule(vectors: list[np.ndarray]) -> np.ndarray:
        weights = np.exp(-np.array([np.linalg.norm(v) for v in vectors]))
        merged = sum(w * v for w, v in zip(weights / weights.sum(), vectors))
        return merged * min(1.0, 0.8 / np.linalg.norm(merged))

    merge = per_tensor(rule, list(LAYERS.values()))
    compare(config, ref.Setup(3, 5, [(WHOLE, 5)], lambda: of(config), merge=merge), 23)


def test_radial_merge_of_layers_and_plain_mean_of_embeddings() -> None:
    config = OuterConfig(every=5, lr=0.5, momentum=0.5, merge=MergeConfig(rule="radial"))

    def merge(i: int, number: int, sent: list[np.ndarray], anchors: list[np.ndarray]) -> np.ndarray:
        parts = []
        for name, place in PLACES.items():
            vectors = [v[place] for v in sent]
            parts.append(sum(vectors) / 3 if name == "embed" else ref.radial_mean(vectors, [1.0] * 3))
        return np.concatenate(parts)

    compare(config, ref.Setup(3, 5, [(WHOLE, 5)], lambda: of(config), merge=merge), 23)


@pytest.mark.parametrize("name", [name for name in sorted(PRESETS) if PRESETS[name].engine == "islands"])
def test_islands_agree_bit_for_bit_where_the_algorithm_says_so(name: str) -> None:
    fragments = 4 if name == "streaming" else 1
    islands = train_islands(shorter(name, 4, fragments=fragments), 3, 12)
    same = [
        all(torch.equal(a, b) for a, b in zip(islands[0].outer.anchors, other.outer.anchors)) for other in islands[1:]
    ]
    assert all(same) != (name in ("eager", "noloco")), (
        "eager and pairs keep anchors of their own, all others share them"
    )
    if name not in ("eager", "noloco", "streaming"):
        assert all(np.array_equal(flat(islands[0].model), flat(other.model)) for other in islands[1:])


@pytest.mark.parametrize("name", [name for name in sorted(PRESETS) if PRESETS[name].engine == "islands"])
def test_every_preset_learns(name: str) -> None:
    """The distance of the anchors' mean to the common optimum falls, whatever the method."""
    goal = np.mean([np.full(88, 0.7)], axis=0)

    def inner(model: torch.nn.Module, island: int, step: int) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * (p - 0.7))

    config = shorter(name, 4, fragments=4 if name == "streaming" else 1)
    if name == "sparse_loco":
        config = dataclasses.replace(config, compress=dataclasses.replace(config.compress, density=0.25))
    islands = train_islands(config, 2, 60, inner)
    before = np.abs(flat(Toy()) - goal).mean()
    for island in islands:
        with island.outer.averaged():
            assert np.abs(flat(island.model) - goal).mean() < 0.35 * before


def test_negative_control_heavy_ball_is_not_nesterov() -> None:
    a, b = (train_islands(OuterConfig(every=5, optimizer=o), 2, 20)[0] for o in ("nesterov", "heavy_ball"))
    assert np.abs(flat(a.model) - flat(b.model)).max() > 0.05


@pytest.mark.parametrize("name", ["diloco", "streaming", "sparse_loco", "diloco_x", "noloco"])
def test_bytes_counted_equal_the_bytes_on_the_link(name: str) -> None:
    config = shorter(name, 4, fragments=4 if name == "streaming" else 1)
    for island in train_islands(config, 3, 13, finish=True):
        assert sum(report.stats.bytes_sent for report in island.landed) == island.link.bytes_out > 0


def test_quadratic_steps_of_product_and_oracle_are_the_same() -> None:
    model = Toy()
    before = flat(model)
    quadratic_(model, 1, 3)
    np.testing.assert_allclose(flat(model), quadratic(1, 3, before), atol=1e-6)
