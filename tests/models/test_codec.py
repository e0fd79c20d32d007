from functools import partial
from typing import Any

import pytest
import torch

from qnmixer.models.codec import OrthonormalCodec, StridedCodec


def test_full_orthonormal_codec_starts_as_the_identity() -> None:
    codec = OrthonormalCodec(factor=4, channels=16, kernel_size=1)
    g = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(codec.decode(codec.encode(g)), g)
    torch.testing.assert_close(codec.encode(g).norm(), g.norm())


def test_a_wider_kernel_starts_as_if_it_were_not() -> None:
    torch.manual_seed(0)
    codec = OrthonormalCodec(factor=4, channels=16, kernel_size=1)
    torch.manual_seed(0)
    wider = OrthonormalCodec(factor=4, channels=16, kernel_size=3)
    g = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(wider.encode(g), codec.encode(g))
    torch.testing.assert_close(wider.decode(wider.encode(g)), g)
    wider.encode(g).sum().backward()
    assert wider.encoder.weight.grad is not None
    assert wider.encoder.weight.grad[..., 0, 0].abs().max() > 0  # and can learn to differ


def test_smaller_orthonormal_codec_starts_as_a_projection() -> None:
    codec = OrthonormalCodec(factor=4, channels=5, kernel_size=1)
    once = codec.decode(codec.encode(torch.randn(1, 1, 16, 16)))
    torch.testing.assert_close(codec.decode(codec.encode(once)), once)


@pytest.mark.parametrize(
    "make", [partial(OrthonormalCodec, kernel_size=1), partial(OrthonormalCodec, kernel_size=3), StridedCodec]
)
@pytest.mark.parametrize("factor", [2, 4])
def test_latent_has_the_shape_it_says(make: Any, factor: int) -> None:
    codec = make(factor, 3)
    code = codec.encode(torch.randn(2, 1, 16, 16))
    assert code.shape == (2, 3, 16 // factor, 16 // factor)
    assert codec.decode(code).shape == (2, 1, 16, 16)


def test_strided_codec_starts_as_a_contraction_with_its_transpose() -> None:
    codec = StridedCodec(factor=4, channels=3)
    g, s = torch.randn(2, 1, 16, 16), torch.randn(2, 3, 4, 4)
    torch.testing.assert_close((codec.encode(g) * s).sum(), (g * codec.decode(s)).sum())
    for _ in range(30):
        g = codec.decode(codec.encode(g / g.norm()))
    assert 0.05 < g.norm() <= 1.0 + 1e-6
