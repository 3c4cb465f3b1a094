"""Compressed gradients: LoCo and PowerSGD against float64, whatever DDP's buckets; threads stand for processes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from reference_outer import int_code
from simulated_islands import Link, Network, on_islands
from torch import Tensor, nn
from torch.futures import Future

from mdlm.training.hooks import CompressedGradients
from mdlm.training.outer_config import CompressConfig, OuterConfig
from mdlm.training.routes import exchange

SHAPES = {"a": (10, 20), "b": (300,), "c": (7,), "d": (12, 9)}
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())
ORDERS = {"one": [["a", "b", "c", "d"]], "many": [["d"], ["c", "b"], ["a"]], "mixed": [["c", "a"], ["d", "b"]]}
LOCO = CompressConfig(codec="int4", feedback="loco", decay=0.8, reset_every=5, store="int8")
POWER = CompressConfig(projection="low_rank", rank=2, feedback="classic")


def gradients(worker: int, step: int) -> np.ndarray:
    """Random gradients whose scale differs by parameter and step."""
    random = np.random.default_rng(1000 * worker + step)
    scale = np.concatenate([np.full(int(np.prod(s)), 10.0**-i) for i, s in enumerate(SHAPES.values())])
    return random.normal(size=SIZE) * scale * (1 + step % 3)


@dataclass
class Part:
    """A bucket as DDP would hand it over."""

    names: list[str]
    model: dict[str, nn.Parameter]
    flat: Tensor
    last: bool

    def buffer(self) -> Tensor:
        return self.flat

    def parameters(self) -> list[Tensor]:
        return [self.model[name] for name in self.names]

    def gradients(self) -> list[Tensor]:
        sizes = [self.model[name].numel() for name in self.names]
        return [part.view(self.model[n].shape) for n, part in zip(self.names, self.flat.split(sizes))]

    def is_last(self) -> bool:
        return self.last


def refuse(bucket: Any) -> Future[Tensor]:
    raise AssertionError("no dense step was asked for")


class Worker:
    """One process: parameters, link and hook."""

    def __init__(self, compress: CompressConfig, network: Network, number: int, plain: Any = refuse, **o: Any) -> None:
        self.number = number
        self.parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        config = OuterConfig(engine="gradients", every=1, compress=compress, **o)
        self.link = Link(network, number)
        self.exchange = exchange(config, self.link)
        self.hook = CompressedGradients(self.parameters, config, self.exchange, plain)

    def backward(self, values: np.ndarray, order: Sequence[Sequence[str]]) -> np.ndarray:
        """What DDP makes of these gradients, in the order of SHAPES."""
        start, whole = 0, {}
        for name, shape in SHAPES.items():
            stop = start + int(np.prod(shape))
            whole[name] = torch.tensor(values[start:stop], dtype=torch.float32)
            start = stop
        parts = [
            Part(list(names), self.parameters, torch.cat([whole[n] for n in names]), names is order[-1])
            for names in order
        ]
        futures = [self.hook.hook(None, part) for part in parts]
        found = {}
        for part, future in zip(parts, futures):
            assert future.value().data_ptr() == part.flat.data_ptr()
            found |= {n: g.reshape(-1) for n, g in zip(part.names, part.gradients())}
        return torch.cat([found[n] for n in SHAPES]).double().numpy()


def run(compress: CompressConfig, workers: int, steps: int, order: str = "one", **o: Any) -> np.ndarray:
    """[workers, steps, values]: the reduced gradients."""
    network = Network(workers)

    def work(number: int) -> np.ndarray:
        worker = Worker(compress, network, number, **o)
        found = np.stack([worker.backward(gradients(number, n), ORDERS[order]) for n in range(steps)])
        worker.exchange.close()
        return found

    return np.stack(on_islands(workers, work))


def loco(workers: int, steps: int, beta: float, reset: int) -> np.ndarray:
    """LoCo in float64: h = g + e; q = Q4(h); e = Q8(beta e + (1 - beta)(h - q)), zero after every `reset` messages; the
    mean of the q goes through the same once more."""
    e, up, out = [np.zeros(SIZE) for _ in range(workers)], np.zeros(SIZE), []

    def remember(old: np.ndarray, error: np.ndarray, n: int) -> np.ndarray:
        return np.zeros(SIZE) if (n + 1) % reset == 0 else int_code(beta * old + (1 - beta) * error, 8)

    for n in range(steps):
        h = [gradients(i, n) + e[i] for i in range(workers)]
        q = [int_code(x, 4) for x in h]
        e = [remember(e[i], h[i] - q[i], n) for i in range(workers)]
        meant = sum(q) / workers + up
        out.append(int_code(meant, 4))
        up = remember(up, meant - out[-1], n)
    return np.stack(out)


@pytest.mark.parametrize("workers", [2, 3])
def test_loco_is_its_formula_with_every_value_coded_twice(workers: int) -> None:
    found = run(LOCO, workers, 12)
    expected = loco(workers, 12, 0.8, 5)
    assert np.abs(found[0] - expected).max() < 1e-5
    assert (found == found[0]).all()
    assert np.abs(expected - loco(workers, 12, 0.8, 10**9)).max() > 1e-2  # the reset does something


@pytest.mark.parametrize("order", ["many", "mixed"])
@pytest.mark.parametrize("compress", [LOCO, POWER], ids=["loco", "powersgd"])
def test_buckets_do_not_matter_to_a_compressor_that_remembers(compress: CompressConfig, order: str) -> None:
    assert (run(compress, 2, 6, order) == run(compress, 2, 6)).all()


def test_residuals_stay_with_their_parameters_when_ddp_cuts_its_buckets_anew() -> None:
    """DDP reorders its buckets after the first step of every launch."""
    network = Network(2)

    def work(number: int) -> np.ndarray:
        worker = Worker(LOCO, network, number)
        orders = [ORDERS["one"], *[ORDERS["many"]] * 5]
        found = [worker.backward(gradients(number, n), order) for n, order in enumerate(orders)]
        worker.exchange.close()
        return np.stack(found)

    assert (np.stack(on_islands(2, work)) == run(LOCO, 2, 6)).all()


def test_pytorch_58467_powersgd_works_with_several_buckets_and_follows_its_formula() -> None:
    """P spans mean(U) Q, the result is P P' mean(U), each worker keeps U_i - P P' U_i, and Q becomes mean(U)' P."""
    workers, steps, rank = 3, 8, 2
    found = run(POWER, workers, steps, "many")
    assert (found == found[0]).all()
    starts = np.cumsum([0, *[int(np.prod(s)) for s in SHAPES.values()]])
    for (name, shape), start, stop in zip(SHAPES.items(), starts, starts[1:]):
        if name not in ("a", "d"):  # vectors travel as they are
            mean = np.mean([[gradients(i, n)[start:stop] for n in range(steps)] for i in range(workers)], axis=0)
            assert found[0][:, start:stop] == pytest.approx(mean, abs=1e-5)
            continue
        e = [np.zeros(shape) for _ in range(workers)]
        basis = None
        for n in range(steps):
            u = [gradients(i, n)[start:stop].reshape(shape) + e[i] for i in range(workers)]
            mean = sum(u) / workers
            reduced = found[0][n, start:stop].reshape(shape)
            left, values, _ = np.linalg.svd(reduced)
            assert values[rank] < 1e-5 * values[0]
            p = left[:, :rank]
            if basis is not None:
                q, _ = np.linalg.qr(mean @ basis)
                assert np.abs(p @ p.T - q @ q.T).max() < 1e-4
            assert np.abs(reduced - p @ p.T @ mean).max() < 1e-4 * np.abs(mean).max()
            e = [x - p @ p.T @ x for x in u]
            basis = mean.T @ p


def test_without_memory_bf16_messages_give_the_rounded_mean_bucket_by_bucket() -> None:
    def bf16(x: np.ndarray) -> np.ndarray:
        return torch.tensor(x, dtype=torch.float32).to(torch.bfloat16).double().numpy()

    expected = np.stack([bf16((bf16(gradients(0, n)) + bf16(gradients(1, n))) / 2) for n in range(4)])
    for order in ORDERS:
        assert (run(CompressConfig(codec="bf16"), 2, 4, order) == expected).all()


def test_without_compression_it_is_the_mean() -> None:
    expected = np.stack([(gradients(0, n) + gradients(1, n)) / 2 for n in range(4)])
    assert run(CompressConfig(), 2, 4, "many")[1] == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("order", ["one", "many"])
@pytest.mark.parametrize("compress", [LOCO, POWER, CompressConfig(codec="bf16")], ids=["loco", "powersgd", "bf16"])
def test_a_gradient_that_is_not_finite_spoils_the_step_everywhere_and_nothing_else(
    compress: CompressConfig, order: str
) -> None:
    """The loop skips such a step by its norm: all processes must see it. The next step is as if it had not been."""
    network = Network(2)

    def work(number: int, spoilt: bool, network: Network) -> np.ndarray:
        worker = Worker(compress, network, number)
        worker.backward(gradients(number, 0), ORDERS[order])
        bad = gradients(number, 1)
        bad[3 if number else 500] = np.inf if number else bad[500]
        if spoilt:
            assert not np.isfinite(worker.backward(bad, ORDERS[order]).sum())
        worker.hook._steps = 2  # rounds seed the random bases
        found = worker.backward(gradients(number, 2), ORDERS[order])
        worker.exchange.close()
        return found

    with_it = on_islands(2, lambda i: work(i, True, network))
    clean = Network(2)
    without = on_islands(2, lambda i: work(i, False, clean))
    assert (np.stack(with_it) == np.stack(without)).all()


@pytest.mark.parametrize("compress", [LOCO, POWER], ids=["loco", "powersgd"])
def test_a_resumed_process_goes_on_bit_for_bit(compress: CompressConfig) -> None:
    network = Network(2)

    def work(number: int) -> np.ndarray:
        first = Worker(compress, network, number)
        for n in range(3):
            first.backward(gradients(number, n), ORDERS["one"])
        saved = copy.deepcopy(first.hook.state_dict())
        first.exchange.close()
        second = Worker(compress, network, number)
        second.link.calls = first.link.calls
        second.hook.load_state_dict(saved)
        found = [second.backward(gradients(number, n), ORDERS["many"]) for n in range(3, 6)]
        second.exchange.close()
        return np.stack(found)

    assert (np.stack(on_islands(2, work)) == run(compress, 2, 6)[:, 3:]).all()


def test_another_number_of_processes_drops_residuals_and_another_model_is_refused() -> None:
    two, one = Worker(LOCO, Network(2), 0), Worker(LOCO, Network(3), 0)
    state = {**two.hook.state_dict(), "steps": 7, "exchange": {0: {"push": "of another world"}}}
    one.hook.load_state_dict(state)
    assert (one.hook.state_dict()["steps"], one.hook.state_dict()["exchange"]) == (7, {})
    with pytest.raises(ValueError, match="other parameters"):
        two.hook.load_state_dict({**state, "layout": state["layout"][1:]})


def test_dense_steps_are_left_to_the_plain_all_reduce() -> None:
    calls: list[bool] = []

    def plain(bucket: Part) -> Future[Tensor]:
        calls.append(bucket.is_last())
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    network = Network(2)

    def work(number: int) -> np.ndarray:
        worker = Worker(LOCO, network, number, plain, start_step=2)
        found = np.stack([worker.backward(gradients(number, n), ORDERS["many"]) for n in range(3)])
        assert worker.hook.bytes_sent == worker.link.bytes_out > 0
        worker.exchange.close()
        return found

    found = on_islands(2, work)
    assert calls.count(True) == 4
    assert len(calls) == 12
    assert found[0][:2] == pytest.approx(np.stack([gradients(0, 0), gradients(0, 1)]), rel=1e-6)
    assert (found[0][2] == found[1][2]).all()
