import torch

from qnmixer.models.nonnegative import nonnegative


def test_the_image_is_that_of_the_plain_clamp() -> None:
    x = torch.randn(2, 1, 8, 8)
    assert torch.equal(nonnegative(x), x.clamp_min(0))


def test_the_gradient_leaves_out_only_what_would_darken_a_black_pixel() -> None:
    x = torch.tensor([-1.0, -1.0, 0.0, 0.0, 2.0, 2.0], requires_grad=True)
    wanted = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    (gradient,) = torch.autograd.grad(nonnegative(x), x, wanted)
    assert gradient.tolist() == [0, -1, 0, -1, 1, -1]


def test_an_image_that_is_black_everywhere_comes_back() -> None:
    """Where the plain clamp has no gradient at all, and stays black."""
    truth = torch.rand(1, 1, 8, 8)
    shift = torch.tensor(-3.0, requires_grad=True)
    for _ in range(200):
        (gradient,) = torch.autograd.grad((nonnegative(truth + shift) - truth).square().mean(), shift)
        shift.data -= 0.5 * gradient
    assert abs(float(shift.detach())) < 1e-2
