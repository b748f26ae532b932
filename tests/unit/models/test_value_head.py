import pytest
import torch

from vlarl.models.value_head import ValueHead


def test_fresh_weights_depend_on_the_seed_alone():
    a, b, c = (ValueHead(32, 8) for _ in range(3))
    a.reset(1)
    b.reset(1)
    c.reset(2)
    x = torch.randn(4, 32)
    assert torch.equal(a(x), b(x))
    assert not torch.equal(a(x), c(x))


def test_fresh_weights_are_small_and_reach_every_layer():
    head = ValueHead(1024, 1)
    head.reset(0)
    assert head.mlp[0].weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert (head.mlp[0].bias == 0).all()
    assert head.mlp[4].bias is None
    out = head(torch.randn(16, 1024))
    assert out.abs().max() < 1
    out.sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in head.parameters())


def test_values_are_float32_under_autocast():
    head = ValueHead(32, 1)
    x = torch.randn(4, 32, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = head(x)
    assert got.dtype == torch.float32
    assert torch.equal(got, head(x.float()))
