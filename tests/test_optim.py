"""Muon against a float64 singular value decomposition, AdamW against its textbook form, and who updates what."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mdlm.config import MDLMConfig
from mdlm.modeling import MDLMForMaskedLM
from mdlm.training.optim import (
    Muon,
    OptimConfig,
    build_optimizer,
    muon_scale,
    newton_schulz,
    parameter_groups,
    set_learning_rate,
)

A, B, C = 3.4445, -4.7750, 2.0315


def random_matrix(rows: int, columns: int, seed: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def orthogonalised_by_svd(matrix: Tensor, steps: int = 5) -> Tensor:
    """U p(S / |G|) V' in float64, p applied to the singular values as plain numbers."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / matrix.double().norm()
    for _ in range(steps):
        s = A * s + B * s**3 + C * s**5
    return u @ torch.diag(s) @ vh


@pytest.mark.parametrize("shape", [(24, 24), (16, 40), (40, 16), (1, 7), (7, 1)])
def test_newton_schulz_is_the_polynomial_of_the_singular_values(shape: tuple[int, int]) -> None:
    matrices = torch.stack([random_matrix(*shape, seed) for seed in range(3)])
    expected = torch.stack([orthogonalised_by_svd(m) for m in matrices])
    torch.testing.assert_close(newton_schulz(matrices).double(), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_newton_schulz_is_nearly_orthogonal_and_keeps_the_singular_vectors(dtype: torch.dtype) -> None:
    matrix = random_matrix(32, 64, 0)
    result = newton_schulz(matrix[None], dtype=dtype)[0].double()
    singular_values = torch.linalg.svdvals(result)
    assert 0.66 < singular_values.min() <= singular_values.max() < 1.15
    u, _, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    core = u.T @ result @ vh.T  # diagonal if the singular vectors are the same
    off_diagonal = core - torch.diag(core.diagonal())
    assert off_diagonal.abs().max() < (1e-4 if dtype == torch.float32 else 0.06)


def test_newton_schulz_ignores_the_size_of_the_matrix_and_keeps_zero() -> None:
    matrix = random_matrix(8, 8, 1)
    torch.testing.assert_close(newton_schulz(matrix[None] * 1e-6), newton_schulz(matrix[None]), rtol=1e-4, atol=1e-5)
    assert torch.equal(newton_schulz(torch.zeros(1, 4, 4)), torch.zeros(1, 4, 4))


def muon(parameters: list[nn.Parameter], **options: Any) -> Muon:
    return Muon([{"params": parameters, "algorithm": "muon"}], **options)


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_steps_follow_the_definition(nesterov: bool) -> None:
    """Three steps on two matrices of one shape and one of another, against the update rule in float64."""
    shapes = [(6, 10), (6, 10), (12, 4)]
    lr, decay, momentum = 0.02, 0.1, 0.9
    parameters = [nn.Parameter(random_matrix(*shape, i)) for i, shape in enumerate(shapes)]
    reference = [p.detach().double() for p in parameters]
    buffers = [torch.zeros_like(r) for r in reference]
    optimizer = muon(parameters, lr=lr, weight_decay=decay, momentum=momentum, nesterov=nesterov, scale="spectral")
    for step in range(3):
        for i, p in enumerate(parameters):
            p.grad = random_matrix(*shapes[i], 100 * step + i)
            gradient = p.grad.double()
            buffers[i] = momentum * buffers[i] + (1 - momentum) * gradient
            update = gradient + momentum * (buffers[i] - gradient) if nesterov else buffers[i]
            rows, columns = shapes[i]
            scale = math.sqrt(max(1, rows / columns))
            reference[i] = (1 - lr * decay) * reference[i] - lr * scale * orthogonalised_by_svd(update)
        optimizer.step()
    for p, r in zip(parameters, reference, strict=True):
        torch.testing.assert_close(p.detach().double(), r, rtol=0, atol=1e-5)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon of its own to compare with")
def test_muon_agrees_with_torchs_own() -> None:
    ours, theirs = (nn.Parameter(random_matrix(16, 48, 0)) for _ in range(2))
    one = muon([ours], lr=0.02, weight_decay=0.1, momentum=0.95, precision="bfloat16")
    other = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        ours.grad, theirs.grad = random_matrix(16, 48, step + 1), random_matrix(16, 48, step + 1)
        one.step()
        other.step()
    largest_step = 0.02 * muon_scale("match_rms", 16, 48)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0.02 * largest_step)  # bfloat16 keeps 8 bits


def test_match_rms_makes_entries_as_large_as_adamws() -> None:
    """0.2 sqrt(max(rows, columns)) times a matrix with orthonormal rows has entries of root mean square 0.2."""
    orthogonal = newton_schulz(random_matrix(64, 256, 0)[None])[0]
    rms = (orthogonal * muon_scale("match_rms", 64, 256)).square().mean().sqrt()
    assert rms == pytest.approx(0.2, rel=0.2)


def test_the_adamw_groups_of_muon_equal_torchs_adamw_bit_for_bit() -> None:
    ours, theirs = ([nn.Parameter(random_matrix(5, 3, 0)), nn.Parameter(random_matrix(1, 4, 1)[0])] for _ in range(2))
    one = Muon([{"params": ours, "algorithm": "adamw"}], lr=1e-2, weight_decay=0.1)
    other = torch.optim.AdamW(theirs, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95), fused=True)
    for step in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = random_matrix(1, p.numel(), step)[0].view_as(p)
            q.grad = p.grad.clone()
        one.step()
        other.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)


def test_muon_refuses_what_is_no_matrix() -> None:
    with pytest.raises(ValueError, match=r"matrices.*\(4,\)"):
        muon([nn.Parameter(torch.zeros(4))], lr=0.1)


def test_parameters_without_gradient_stay() -> None:
    still, moved = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3, 3))
    optimizer = muon([still, moved], lr=0.1)
    moved.grad = random_matrix(3, 3, 0)
    optimizer.step()
    assert torch.equal(still, torch.ones(3, 3))
    assert not torch.equal(moved, torch.ones(3, 3))
    assert still not in optimizer.state


def test_state_dict_continues_bit_for_bit() -> None:
    def make() -> tuple[list[nn.Parameter], Muon]:
        parameters = [nn.Parameter(random_matrix(4, 6, 0)), nn.Parameter(random_matrix(1, 6, 1)[0])]
        groups = [{"params": parameters[:1], "algorithm": "muon"}, {"params": parameters[1:], "algorithm": "adamw"}]
        return parameters, Muon(groups, lr=0.02)

    def steps(parameters: list[nn.Parameter], optimizer: Muon, first: int, last: int) -> None:
        for step in range(first, last):
            for p in parameters:
                p.grad = random_matrix(1, p.numel(), step)[0].view_as(p)
            optimizer.step()

    straight, optimizer = make()
    steps(straight, optimizer, 0, 4)
    before, first_half = make()
    steps(before, first_half, 0, 2)
    after, second_half = make()
    second_half.load_state_dict(first_half.state_dict())
    with torch.no_grad():
        for p, q in zip(after, before, strict=True):
            p.copy_(q)
    steps(after, second_half, 2, 4)
    for p, q in zip(straight, after, strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("tied", [True, False])
def test_who_updates_what(tiny_config: MDLMConfig, tied: bool) -> None:
    config = MDLMConfig(**{**tiny_config.to_dict(), "tie_word_embeddings": tied, "qkv_bias": True})
    model = MDLMForMaskedLM(config)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = {
        g["name"]: (g, {names[id(p)] for p in g["params"]})
        for g in parameter_groups(model, OptimConfig(name="muon", lr=1e-3, muon_lr=0.02, weight_decay=0.3))
    }
    assert set(groups) == {"muon", "decay", "no_decay"}
    ends = {names[id(model.get_input_embeddings().weight)], names[id(model.get_output_embeddings().weight)]}
    assert len(ends) == (1 if tied else 2)
    assert groups["decay"][1] == ends
    assert all(model.get_parameter(name).ndim == 2 for name in groups["muon"][1])
    assert all(model.get_parameter(name).ndim == 1 for name in groups["no_decay"][1])
    every = [name for _, members in groups.values() for name in members]
    assert sorted(every) == sorted(names.values())
    assert [groups[name][0]["weight_decay"] for name in ("muon", "decay", "no_decay")] == [0.3, 0.3, 0.0]
    assert [groups[name][0]["base_lr"] for name in ("muon", "decay", "no_decay")] == [0.02, 1e-3, 1e-3]


def test_frozen_parameters_are_left_out(tiny_config: MDLMConfig) -> None:
    model = MDLMForMaskedLM(tiny_config)
    model.get_input_embeddings().weight.requires_grad_(False)
    trained = {id(p) for g in parameter_groups(model, OptimConfig(name="muon")) for p in g["params"]}
    assert trained == {id(p) for p in model.parameters() if p.requires_grad}
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameter"):
        build_optimizer(model, OptimConfig())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_learning_rate_is_each_groups_peak_times_the_factor(tiny_config: MDLMConfig, name: Any) -> None:
    optimizer = build_optimizer(MDLMForMaskedLM(tiny_config), OptimConfig(name=name, lr=1e-3, muon_lr=0.02))
    for factor in (0.5, 0.25):
        set_learning_rate(optimizer, factor)
        rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
        assert rates.pop("muon", 0.02 * factor) == 0.02 * factor
        assert set(rates.values()) == {1e-3 * factor}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("lr", math.inf),
        ("muon_lr", -1.0),
        ("clip_norm", 0.0),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("betas", (0.9, 1.0)),
        ("muon_momentum", 1.0),
    ],
)
def test_bad_values_name_the_flag(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"--optim\.{field} is "):
        OptimConfig(**{field: value})
