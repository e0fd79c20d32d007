"""With deepinv: our scan as its physics, our network as its reconstructor, and what it has that is not here.

For those who want its losses, its plug and play or its posterior samplers on this scan. A small QN-Mixer trains by
deepinv's equivariant loss, on sinograms alone, and so does not see a true image. A denoiser that is trained here is the
prior of plug and play and of a diffusion sampler, which take any scan. It takes about a minute on one CPU core.

    pip install deepinv  # 0.5; with its torchvision, which must fit your torch
    python notebooks/examples/with_deepinv.py
"""

from typing import Any

import deepinv as dinv
import numpy as np
import torch
from torch import Tensor

import qnmixer
from qnmixer.models import QNMixer
from qnmixer.physics import FanBeamGeometry, FanBeamProjector

# Raise the steps: none of these is trained to its end.
STEPS, DENOISER_STEPS, BATCH = 120, 300, 2
N_TEST, SAMPLES = 3, 4
SCAN = FanBeamGeometry(
    image_size=64, pixel_size=6.25, n_views=24, n_detectors=128, detector_pitch=7.5, source_to_axis=600.0,
    axis_to_detector=290.0,
)  # fmt: skip
NOISE = 0.5  # standard deviation of a ray, in value × mm
SEED = 0


class Scan(dinv.physics.LinearPhysics):  # type: ignore[misc]  # deepinv has no types here
    """A / ‖A‖ with white noise: deepinv's algorithms take steps for operators of norm 1."""

    def __init__(self, projector: FanBeamProjector) -> None:
        norm = float(projector.operator_norm())
        super().__init__(noise_model=dinv.physics.GaussianNoise(NOISE / norm, rng=torch.Generator().manual_seed(SEED)))
        self.projector, self.norm = projector, norm

    def A(self, x: Tensor, **_: Any) -> Tensor:
        """Sinograms [B, 1, V, D] of images [B, 1, S, S]."""
        return self.projector(x) / self.norm

    def A_adjoint(self, y: Tensor, **_: Any) -> Tensor:
        """The exact transpose."""
        return self.projector.adjoint(y) / self.norm

    def A_dagger(self, y: Tensor, **_: Any) -> Tensor:
        """FBP, in place of deepinv's least squares, which would fit the noise."""
        return self.projector.fbp(y * self.norm)


class Network(dinv.models.Reconstructor):  # type: ignore[misc]
    """A network of ours, which knows the scan by its projector."""

    def __init__(self, network: QNMixer) -> None:
        super().__init__()
        self.network = network

    def forward(self, y: Tensor, physics: Scan, **_: Any) -> Tensor:
        """Images [B, 1, S, S] of sinograms [B, 1, V, D]."""
        return self.network(y * physics.norm)


def images(part: str, start: int, n: int) -> Tensor:
    """Phantoms as attenuation from 0 to 1, [n, 1, S, S]."""
    hu = np.stack([qnmixer.phantom(SCAN.image_size, seed=SEED, part=part, index=start + k) for k in range(n)])
    return torch.from_numpy((hu[:, None] + 1000) / 3000).clamp(0, 1).float()


def equivariant(physics: Scan) -> Network:
    """A QN-Mixer, trained on sinograms alone: A x̂ fits y, and a shifted x̂ is found again."""
    model = Network(QNMixer(physics.projector, n_iterations=4, channels=24))
    fit, again = dinv.loss.MCLoss(), dinv.loss.EILoss(dinv.transform.Shift(shift_max=0.2))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(STEPS):
        y = physics(images("train", BATCH * step, BATCH))
        x = model(y, physics)
        loss = (fit(y, x, physics) + again(x, physics, model)).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
    return model.eval()


def denoiser() -> torch.nn.Module:
    """A small DRUNet for any noise level, trained on images: the prior of the two below."""
    model = dinv.models.DRUNet(1, 1, nc=(16, 32, 48, 64), nb=1, pretrained=None)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for step in range(DENOISER_STEPS):
        x = images("train", BATCH * step, BATCH)
        sigma = 10 ** (2.5 * torch.rand(BATCH) - 2.3)  # 0.005 to 1.6
        noisy = x + sigma[:, None, None, None] * torch.randn_like(x)
        loss = ((model(noisy, sigma) - x).square().mean((1, 2, 3)) / sigma).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def main() -> None:
    """Print PSNR of each method on the same sinograms."""
    torch.manual_seed(SEED)
    physics, fidelity = Scan(FanBeamProjector(SCAN)), dinv.optim.L2()
    truth = images("test", 0, N_TEST)
    y = physics(truth)
    with torch.enable_grad():
        network, prior = equivariant(physics), denoiser()
    pnp = dinv.optim.HQS(
        fidelity, dinv.optim.PnP(prior), stepsize=300.0, sigma_denoiser=0.02, max_iter=20,
        custom_init=lambda y, physics: physics.A_dagger(y),
    )  # fmt: skip
    sampler = dinv.sampling.DiffPIR(prior, fidelity, sigma=NOISE / physics.norm, max_iter=30)
    samples = torch.stack([sampler(y, physics, x_init=physics.A_dagger(y)) for _ in range(SAMPLES)])
    results = {
        "FBP": physics.A_dagger(y),
        "QN-Mixer, equivariant loss, no truth": network(y, physics),
        "plug and play (HQS)": pnp(y, physics),
        "a sample (DiffPIR)": samples[0],
        f"mean of {SAMPLES} samples": samples.mean(0),
    }
    print("| method | PSNR, dB |\n|---|---|")
    for name, x in results.items():
        print(f"| {name} | {dinv.metric.PSNR()(x, truth).mean():.2f} |")


if __name__ == "__main__":
    main()
