"""What E and D are at their start."""

import pytest
import torch

from qnmixer.models.codec import OrthonormalCodec, StridedCodec


@pytest.mark.parametrize("kernel_size", [1, 3])
def test_a_full_orthonormal_codec_starts_as_the_identity(kernel_size: int) -> None:
    codec = OrthonormalCodec(factor=4, channels=16, kernel_size=kernel_size)
    g = torch.randn(2, 1, 16, 16)
    code = codec.encode(g)
    torch.testing.assert_close(codec.decode(code), g)
    torch.testing.assert_close(code.norm(), g.norm())
    code.sum().backward()
    assert codec.encoder.weight.grad[..., 0, 0].abs().max() > 0  # also the zeros of a wider kernel can learn


@pytest.mark.parametrize("codec", [OrthonormalCodec(4, 5, 1), OrthonormalCodec(4, 5, 3), StridedCodec(4, 5)])
def test_a_smaller_codec_starts_as_a_contraction_with_its_transpose(codec: OrthonormalCodec | StridedCodec) -> None:
    g, s = torch.randn(2, 1, 16, 16), torch.randn(2, 5, 4, 4)
    assert codec.encode(g).shape == s.shape
    torch.testing.assert_close((codec.encode(g) * s).sum(), (g * codec.decode(s)).sum())
    for _ in range(30):
        g = codec.decode(codec.encode(g / g.norm()))
    assert 0.05 < g.norm() <= 1.0 + 1e-5
