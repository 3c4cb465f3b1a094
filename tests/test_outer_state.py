"""State of the outer step: resume in mid-flight, failures, dtypes, membership, robustness; public bugs by symptom."""

from __future__ import annotations

import dataclasses
import io
import threading
from typing import Any

import numpy as np
import pytest
import torch
from simulated_islands import Network, on_islands
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from toy_islands import Island, Toy, flat, quadratic_, train_islands

from mdlm.training.outer import OuterStep
from mdlm.training.outer_config import PRESETS, CompressConfig, MergeConfig, OuterConfig

INT4 = CompressConfig(codec="int4", feedback="classic")
CONFIGS = {
    "diloco": OuterConfig(every=5, compress=INT4),
    "streaming": OuterConfig(every=6, fragments=3, overlap="streaming", tau=3, alpha=0.5, compress=INT4),
    "one_step": dataclasses.replace(PRESETS["diloco_x"], every=5),
    "low_rank": OuterConfig(
        every=5, compress=CompressConfig(codec="int8", projection="low_rank", rank=1, adaptive=True, feedback="classic")
    ),
    "eager": OuterConfig(every=5, overlap="eager"),
    "pairs": dataclasses.replace(PRESETS["noloco"], every=5),
    "edit": dataclasses.replace(PRESETS["edit"], every=5, merge=MergeConfig(rule="edit", z_warmup=2)),
    "sparse": dataclasses.replace(PRESETS["sparse_loco"], every=5),
    "adam": OuterConfig(every=5, optimizer="adam", lr=0.1, merge=MergeConfig(weights="tokens")),
    "delayed": OuterConfig(every=3, optimizer="delayed_nesterov", buffer=2, lr=0.3),
    "loco": OuterConfig(every=5, compress=CompressConfig(codec="int4", feedback="loco", decay=0.2, store="int8")),
    "cyclic": OuterConfig(every=5, compress=CompressConfig(projection="cyclic_topk", density=0.2, feedback="classic")),
}


def saved_bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def saved(island: Island) -> bytes:
    return saved_bytes({"model": island.model.state_dict(), "outer": island.outer.state_dict()})


def resumed(config: OuterConfig, network: Network, island: int, blob: bytes, **options: Any) -> Island:
    state = torch.load(io.BytesIO(blob), weights_only=True)
    one = Island(config, network, island)
    one.model.load_state_dict(state["model"])
    one.outer.load_state_dict(state["outer"], **options)
    return one


@pytest.mark.parametrize("stop", [10, 13, 16])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_torchft_238_opendiloco_resume_in_mid_round_or_mid_flight_is_exact(name: str, stop: int) -> None:
    """Anchors, momenta, residuals, averages, messages in flight and counters are all in the checkpoint.

    Also torchft #222, #245, #277, atorch's anomaly statistics, PowerSGD's bases, torch's averager step.
    """
    config, islands = CONFIGS[name], 2
    straight = train_islands(config, islands, 31)
    network, later = Network(islands), Network(islands)

    def work(island: int) -> Island:
        one = Island(config, network, island)
        one.train(range(1, stop + 1))
        for future in list(one.exchange._pending):
            future.exception()  # what is in flight has arrived, but has not been taken up
        blob = saved(one)
        one.train(range(stop + 1, stop + 8))  # what happens after the save must not leak into it
        one.exchange.close()
        two = resumed(config, later, island, blob)
        two.train(range(stop + 1, 32))
        two.exchange.close()
        return two

    for a, b in zip(straight, on_islands(islands, work)):
        assert np.array_equal(flat(a.model), flat(b.model))
        assert all(torch.equal(x, y) for x, y in zip(a.outer.anchors, b.outer.anchors))


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - {"pairs"}))
def test_an_error_surfaces_before_the_update_and_the_round_can_be_sent_again(name: str) -> None:
    """torchft #39, #47: errors surface at the end of a round, after the update. Nothing is applied twice or lost."""
    config, islands = CONFIGS[name], 2
    straight = train_islands(config, islands, 26)
    network = Network(islands)
    failures = []

    def work(island: int) -> Island:
        one = Island(config, network, island)
        n = 1
        while n < 27:
            if n == 9:
                network.victim, network.cut_at = 1, one.link.calls + 1
            quadratic_(one.model, island, n)
            before = [a.clone() for a in one.outer.anchors]
            try:
                one.outer.step(n, tokens=1 + island * (n % 4))
            except (ConnectionError, RuntimeError):  # threading.BrokenBarrierError is a RuntimeError
                failures.append(island)
                assert all(torch.equal(a, b) for a, b in zip(before, one.outer.anchors))
                if config.landing:
                    one.exchange.rewind()  # what was queued behind must not run when the network is repaired
                meeting.wait(20)
                if island == 0:
                    network.repair()
                meeting.wait(20)
                one.link.calls = 10_000
                one.outer.relaunch()
                one.outer.land(n)
            n += 1
        one.exchange.close()
        return one

    meeting = threading.Barrier(islands)
    finished = on_islands(islands, work)
    assert sorted(failures) == [0, 1]
    for a, b in zip(straight, finished):
        assert np.array_equal(flat(a.model), flat(b.model))
        if not config.landing:  # nothing is in flight at the end: the memories are those of a run without failure
            assert saved_bytes(a.exchange.state_dict()) == saved_bytes(b.exchange.state_dict())


def test_saved_with_another_number_of_islands_is_refused_or_goes_on_from_the_anchors() -> None:
    config = CONFIGS["streaming"]
    old = train_islands(config, 3, 16)
    blobs = [saved(one) for one in old]
    anchors = old[0].outer.anchors
    network = Network(2)

    def work(island: int) -> None:
        with pytest.raises(ValueError, match="3 islands and there are 2"):
            resumed(config, network, island, blobs[island])
        one = resumed(config, network, island, blobs[island], new_islands=True)
        assert all(torch.equal(a, b) for a, b in zip(anchors, one.outer.anchors))
        with one.outer.averaged():
            held = flat(one.model)
        assert np.array_equal(held, flat(one.model)), "training goes on from the anchors"
        assert one.exchange.state_dict() == {}, "residuals of the old islands are dropped"
        one.train(range(17, 40))
        one.exchange.close()

    on_islands(2, work)


def test_another_layout_is_refused() -> None:
    state = OuterStep(Toy(), OuterConfig(every=4)).state_dict()
    with pytest.raises(ValueError, match="other fragments"):
        OuterStep(Toy(), OuterConfig(every=4, fragments=2)).load_state_dict(state)


def test_the_learning_rate_of_a_resumed_run_is_the_configured_one() -> None:
    model = Toy()
    outer = OuterStep(model, OuterConfig(every=1, lr=0.7))
    outer.step(1)
    other = OuterStep(model, OuterConfig(every=1, lr=0.1))
    other.load_state_dict(outer.state_dict())
    assert other.optimizers[0].param_groups[0]["lr"] == 0.1
    assert outer.anchors[0].data_ptr() != other.anchors[0].data_ptr()
    ours, theirs = (o.optimizers[0].state[o.optimizers[0].param_groups[0]["params"][0]] for o in (outer, other))
    assert ours["momentum_buffer"].data_ptr() != theirs["momentum_buffer"].data_ptr()


def test_torchtitan_1136_a_state_dict_made_once_goes_stale() -> None:
    outer = OuterStep(Toy(), OuterConfig(every=2))
    outer.step(1)
    first = outer.state_dict()["last"]
    outer.step(2)
    assert (first, outer.state_dict()["last"]) == (1, 2)


# Signs, dtypes, memory ----------------------------------------------------------------------------------------------


def test_torchft_233_torchtitan_1507_the_outer_step_goes_the_wrong_way() -> None:
    model = nn.Linear(4, 4)
    outer = OuterStep(model, OuterConfig(every=1, lr=0.5, momentum=0.0))
    start = flat(model)
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(1.0)
    outer.step(1)
    np.testing.assert_allclose(flat(model), start - 0.5, atol=1e-6)


def test_torchtitan_1407_an_outer_step_of_one_fragment_consumes_inner_gradients_of_another() -> None:
    model = Toy()
    outer = OuterStep(model, OuterConfig(every=2, fragments=2))
    for p in model.parameters():
        p.grad = torch.full_like(p, 100.0)  # left over: the step comes before zero_grad
    before = flat(model)
    outer.step(1)  # fragment 0: the layers
    assert np.array_equal(flat(model), before)
    assert all(p.grad is not None and bool((p.grad == 100.0).all()) for p in model.parameters())


def test_pytorch_74737_the_averager_is_called_once_per_parameter() -> None:
    outer = OuterStep(Toy(), OuterConfig(every=5))
    outer.step(1)
    with pytest.raises(ValueError, match="takes each step once"):
        outer.step(1)


def test_torch_averager_points_parameters_at_new_memory() -> None:
    model = Toy()
    addresses = [p.data_ptr() for p in model.parameters()]
    outer = OuterStep(model, OuterConfig(every=1))
    for n in range(1, 4):
        quadratic_(model, 0, n)
        outer.step(n)
    assert [p.data_ptr() for p in model.parameters()] == addresses


@pytest.mark.parametrize("optimizer", ["nesterov", "sgd"])
def test_a_bfloat16_anchor_loses_small_steps(optimizer: Any) -> None:
    """Rounds that each move the anchor by less than bfloat16 can hold add up; rounding itself is not progress."""
    model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    nn.init.constant_(model.weight, 1.0)
    outer = OuterStep(model, OuterConfig(every=1, optimizer=optimizer, lr=0.01, momentum=0.0))
    assert outer.anchors[0].dtype == torch.float32
    for n in range(1, 41):
        with torch.no_grad():
            model.weight.sub_(2.0**-7)  # the smallest step below 1 that bfloat16 holds here
        outer.step(n)
    np.testing.assert_allclose(outer.anchors[0].numpy(), 1 - 40 * 0.01 * 2**-7, rtol=1e-4)


def test_offloaded_state_gives_the_same_training() -> None:
    a, b = (train_islands(OuterConfig(every=4, offload=o), 2, 13)[0] for o in (False, True))
    assert np.array_equal(flat(a.model), flat(b.model))
    assert b.outer.anchors[0].device.type == "cpu"


def test_averaged_gives_the_anchors_and_restores_even_after_an_error() -> None:
    island = train_islands(OuterConfig(every=5), 2, 12)[0]
    before = flat(island.model)
    anchor = island.outer.anchors[0].double().numpy()
    with pytest.raises(KeyError), island.outer.averaged():  # noqa: PT012
        assert np.array_equal(flat(island.model), anchor)
        raise KeyError
    assert np.array_equal(flat(island.model), before)
    assert not np.array_equal(before, anchor)


def test_the_dense_phase_leaves_everything_alone_and_ends_with_new_anchors() -> None:
    model = Toy()
    outer = OuterStep(model, OuterConfig(every=3, start_step=4))
    for n in range(1, 7):
        quadratic_(model, 0, n)
        before = flat(model)
        assert outer.step(n) == []
        assert np.array_equal(flat(model), before)
        if n == 4:
            assert np.array_equal(outer.anchors[0].double().numpy(), before)
    quadratic_(model, 0, 7)
    assert [landed.round for landed in outer.step(7)] == [0]


def test_prime_diloco_13_islands_start_from_different_weights() -> None:
    config = OuterConfig(every=5)
    assert OuterStep(Toy(0), config).fingerprint() == OuterStep(Toy(0), config).fingerprint()
    assert OuterStep(Toy(0), config).fingerprint() != OuterStep(Toy(1), config).fingerprint()
    assert OuterStep(Toy(0), config).fingerprint() != OuterStep(Toy(0), OuterConfig(every=6)).fingerprint()


def test_torchft_197_sharded_parameters_are_handled_shard_by_shard() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        plain, sharded = Toy(), Toy()
        for module in sharded.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0)]))
        one, two = OuterStep(plain, OuterConfig(every=1)), OuterStep(sharded, OuterConfig(every=1))
        for n in range(1, 4):
            quadratic_(plain, 0, n)
            with torch.no_grad():
                for p, q in zip(plain.parameters(), sharded.parameters()):
                    assert isinstance(q, DTensor)
                    q.to_local().copy_(p)
            one.step(n)
            two.step(n)
        for p, q in zip(plain.parameters(), sharded.parameters()):
            assert isinstance(q, DTensor)
            assert torch.equal(p, q.to_local())
    finally:
        torch.distributed.destroy_process_group()
