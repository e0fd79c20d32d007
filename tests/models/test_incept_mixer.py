import torch
from torch.nn import functional as F

from qnmixer.models.incept_mixer import Inception, MixerLayer, PatchExpansion


def test_patch_expansion_equals_linear_shuffle_and_one_by_one() -> None:
    """The lean product form against the two layers it stands for, made at full resolution."""
    expansion = PatchExpansion(channels=8, patch_size=4)
    torch.nn.init.normal_(expansion.project)
    x = torch.randn(2, 3, 5, 8)
    wide = torch.einsum("bhwc,pkc->bkphw", x, expansion.expand)  # [B, C/4, P², h, w]
    full = F.pixel_shuffle(wide.flatten(1, 2), 4)  # [B, C/4, P·h, P·w]
    expected = torch.einsum("bkhw,k->bhw", full, expansion.project)[:, None]
    torch.testing.assert_close(expansion(x), expected)


def test_mixer_layer_follows_the_figure() -> None:
    """One residual over height and width together, a second over the channels."""
    layer = MixerLayer(grid=4, channels=8, ratio=2.0)
    x = torch.randn(2, 4, 4, 8)
    normed = layer.spatial_norm(x)
    tall = layer.height_mlp.layers(normed.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    wide = layer.width_mlp.layers(tall.permute(0, 1, 3, 2)).permute(0, 1, 3, 2)
    mixed = x + wide
    expected = mixed + layer.channel_mlp.layers(layer.channel_norm(mixed))
    torch.testing.assert_close(layer(x), expected)


def test_branches_in_patches_equal_the_figure_joined_then_cut() -> None:
    """The lean sum against the join to C channels at full resolution and one P × P convolution; gradients too."""
    embedding = Inception(channels=8, patch_size=4).double()
    x = torch.rand(2, 1, 16, 24, dtype=torch.float64, requires_grad=True)
    features, kernels = [], []
    for branch, image in zip(embedding.branches, (x, x, x, F.max_pool2d(x, 3, stride=1, padding=1)), strict=True):
        image = F.conv2d(image, branch.pixel.weight[..., None, None], branch.pixel.bias).relu()
        if branch.spatial is not None:
            image = branch.spatial(image).relu()
        features.append(image)
        kernels.append(branch.patchify.weight.view(8, 4, 4, 2).permute(0, 3, 1, 2))
    expected = F.conv2d(torch.cat(features, 1), torch.cat(kernels, 1), embedding.bias, stride=4).permute(0, 2, 3, 1)
    found = embedding(x)
    torch.testing.assert_close(found, expected)
    leaves, weights = [x, *embedding.parameters()], torch.randn_like(found)
    torch.testing.assert_close(*(torch.autograd.grad((y * weights).sum(), leaves) for y in (found, expected)))
