"""Natural gradients on a GPU: the CPU's numbers, and a host that does not wait for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.config.natural_gradient_keys import NaturalGradientConfig
from paceline.optim import AffineNaturalGradient, OnlineNaturalGradient
from paceline.optim.natural_layers import NaturalGradients

pytestmark = pytest.mark.gpu

A_SECOND = 2 * 10**9
"""In cycles, about."""


def rows(seed: int, num: int = 256, dim: int = 96) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, dim, generator=generator) * torch.linspace(2, 0.1, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_estimates_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    here, there = OnlineNaturalGradient(20, update_period=2), OnlineNaturalGradient(20, update_period=2)
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    for seed in range(24):
        x = rows(seed).to(dtype)
        wanted, wanted_scale = here.precondition(x)
        found, scale = there.precondition(x.cuda())
        torch.testing.assert_close(found.cpu(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))
        torch.testing.assert_close(scale.cpu(), wanted_scale, rtol=tolerance, atol=0)


def model(device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 8)).to(device)
    NaturalGradients(NaturalGradientConfig(update_period=1), lambda num_rows: num_rows).adopt(layers)
    return layers


def backward(layers: nn.Module, x: Tensor) -> list[Any]:
    layers.zero_grad()
    layers(x).square().mean().backward()
    return [parameter.grad for parameter in layers.parameters()]


def test_gradients_are_those_of_the_cpu() -> None:
    here, there = model("cpu"), model("cuda")
    for seed in range(12):
        for wanted, found in zip(backward(here, rows(seed)), backward(there, rows(seed).cuda()), strict=True):
            torch.testing.assert_close(found.cpu(), wanted, rtol=1e-3, atol=1e-3 * float(wanted.abs().max()))


def test_halves_are_divided_as_on_the_cpu() -> None:
    """There the product of their rows is computed in fp32, here a kernel gives it out of bf16."""
    here, there = AffineNaturalGradient(96, 64, alpha=1.0), AffineNaturalGradient(96, 64, alpha=1.0)
    for seed in range(8):
        x, dy = (30 + rows(seed)).bfloat16(), rows(100 + seed, dim=64).bfloat16()
        for wanted, found in zip(here.gradients(x, dy), there.gradients(x.cuda(), dy.cuda()), strict=True):
            assert wanted is not None
            assert found is not None
            assert (found.cpu().float() - wanted.float()).norm() < 4e-3 * wanted.float().norm()


def test_the_host_does_not_wait_for_the_device() -> None:
    """Not in a backward that updates every estimate: all of it is queued behind a kernel that takes a second."""
    layers = model("cuda")
    x = rows(0).cuda()
    torch.cuda._sleep(1)
    for _ in range(3):
        backward(layers, x)
    torch.cuda.synchronize()
    torch.cuda._sleep(A_SECOND)
    slept = torch.cuda.Event()
    slept.record()
    backward(layers, x)
    assert not slept.query()
    torch.cuda.synchronize()
