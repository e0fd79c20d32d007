"""An own step in the latent: Barzilai and Borwein's step, and conjugate gradients, in the place of BFGS.

For those who study optimizers in unrolled networks. QN-Mixer makes its step from the gradient code r_t in the method
`direction`. Two subclasses with another one are trained, from the same weights, on the same slices, and compared with
BFGS and with plain gradients on slices that none of them saw. It takes a quarter of a minute on two CPU cores.

    python notebooks/examples/own_optimizer_step.py FOLDER
"""

import argparse
import logging
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from qnmixer import phantom
from qnmixer.lightning import Measurement, ReconstructionModule, psnr, slices
from qnmixer.models import QNMixer
from qnmixer.physics import FanBeamGeometry, FanBeamProjector, FieldNoise
from qnmixer.steps import difference

# Raise these before you believe a difference: 700 steps at 64 pixels, five seeds, T = 6 and more.
SIZE, VIEWS = 32, 12
ITERATIONS, CHANNELS = 4, 16
STEPS, BATCH = 20, 4
SEEDS = 0, 1
N_TEST = 16
SCAN = FanBeamGeometry(
    image_size=SIZE, pixel_size=400 / SIZE, n_views=VIEWS, n_detectors=2 * SIZE, detector_pitch=480 / SIZE,
    source_to_axis=541.0, axis_to_detector=408.0,
)  # fmt: skip


def dot(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of each sample, [B, 1]."""
    return (a * b).sum(1, keepdim=True)


class BarzilaiBorweinMixer(QNMixer):
    """s_t = −α r_t with α = sᵀz / zᵀz: H is the multiple of I that is nearest to the secant condition H z = s.

    Barzilai and Borwein 1988, eq. 5. BFGS makes H z = s hold, for all pairs.
    """

    def direction(self, t: int, r: Tensor, state: Any) -> tuple[Tensor, tuple[Any, ...]]:
        """s_t [B, L] from r_t [B, L]. The state has s_{t−1} as `scale` times `s`, and r_{t−1} as `r`."""
        if state.s is None:
            return -r, ()  # no step was taken yet
        z = (r - state.r) / state.scale  # the change of the gradient, divided as s is
        # The network is not convex: sᵀz may be negative, and zᵀz nearly 0. A step of any size would end the training.
        alpha = (dot(state.s, z) / dot(z, z).clamp_min(1e-12)).clamp(0.1, 2.0)
        return -r - self.trust[t - 1] * (alpha - 1) * r, ()  # τ_t begins at 0: training begins at −r, as with BFGS


class ConjugateGradientMixer(QNMixer):
    """s_t = −r_t + β s_{t−1} with Hestenes and Stiefel's β = r_tᵀz / sᵀz, which makes s_tᵀz = 0.

    Nocedal and Wright, Numerical Optimization, eq. 5.46. It needs one vector of the past, BFGS all of them. Other forms
    of β want an exact line search. Here a step is as long as the network makes it.
    """

    def direction(self, t: int, r: Tensor, state: Any) -> tuple[Tensor, tuple[Any, ...]]:
        """s_t [B, L] from r_t [B, L]."""
        if state.s is None:
            return -r, ()
        z = (r - state.r) / state.scale
        curvature = dot(state.s, z)
        # β times the scale, as `s` is divided by it. β is from 0 to 1, and 0 where the network curves the wrong way.
        scaled = torch.where(curvature > 1e-6, dot(r, z) / curvature.clamp_min(1e-6), 0)
        return -r + self.trust[t - 1] * scaled.clamp_min(0).minimum(state.scale) * state.s, ()


METHODS: dict[str, tuple[type[QNMixer], str]] = {
    "BFGS": (QNMixer, "bfgs"),
    "Barzilai-Borwein": (BarzilaiBorweinMixer, "bfgs"),  # "bfgs" keeps what the step needs: r_{t−1} and τ_t
    "conjugate gradients": (ConjugateGradientMixer, "bfgs"),
    "gradients": (QNMixer, "identity"),
}


def trained(name: str, seed: int) -> QNMixer:
    """A network of a method after STEPS steps."""
    network_class, hessian = METHODS[name]
    projector = FanBeamProjector(SCAN)
    L.seed_everything(seed, verbose=False)  # the same weights at the start for every method
    network = network_class(projector, n_iterations=ITERATIONS, channels=CHANNELS, hessian=hessian)  # type: ignore[arg-type]  # a text
    module = ReconstructionModule(network, optimizer=lambda network: torch.optim.AdamW(network.parameters(), 3e-3))
    module.measurement = Measurement(projector, FieldNoise(), seed)
    data = slices("phantoms", image_size=SIZE, batch_size=BATCH, n_train=BATCH * STEPS, num_workers=0, seed=seed)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    # A gradient through H can be very long, and one long step can spoil a run: the clip is that of experiment=demo.
    trainer = L.Trainer(
        max_steps=STEPS, accelerator="cpu", devices=1, gradient_clip_val=0.01, limit_val_batches=0,
        enable_checkpointing=False, **quiet,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    return network.eval()


def scores_of(network: QNMixer, x: Tensor, y: Tensor) -> dict[str, float]:
    """PSNR of each test slice, by its number."""
    with torch.no_grad():
        return {str(number): float(value) for number, value in enumerate(psnr(network(y), x))}


def main(folder: Path) -> None:
    """Train every method with every seed, and print one table."""
    folder.mkdir(parents=True, exist_ok=True)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # eight trainings would say the same eight times
    projector = FanBeamProjector(SCAN)
    hu = torch.stack([torch.from_numpy(phantom(SIZE, seed=SEEDS[0], part="test", index=k)) for k in range(N_TEST)])
    x = (hu[:, None].clamp(-1000, 2000) + 1000) / 3000
    y = FieldNoise()(projector(x), keys=[(SEEDS[0], k) for k in range(N_TEST)])

    scores: dict[str, dict[tuple[int, int], dict[str, float]]] = {}
    trust: dict[str, list[float]] = {}
    for name in METHODS:
        scores[name] = {}
        for seed in SEEDS:
            network = trained(name, seed)
            scores[name][seed, 0] = scores_of(network, x, y)
            trust[name] = [value.item() for value in network.trust]
    of_fbp = float(psnr(projector.fbp(y), x).mean())

    columns = "method", "PSNR, dB", "over BFGS, dB", "95 % over slices", "of each seed, dB", "last τ_t"
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for name, of_method in scores.items():
        of_seeds = [sum(values.values()) / N_TEST for values in of_method.values()]
        over = difference(of_method, scores["BFGS"])
        assert over is not None  # all have the same slices
        last = f"{trust[name][-1]:.3f}" if trust[name] else "–"
        seeds = " ".join(f"{value:.2f}" for value in of_seeds)
        mean = sum(of_seeds) / len(of_seeds)
        lines.append(f"| {name} | {mean:.2f} | {over.mean:+.2f} | ± {over.over_patients:.2f} | {seeds} | {last} |")
    lines.append(f"| FBP | {of_fbp:.2f} | – | – | – | – |")
    (folder / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(f"{STEPS} steps, {N_TEST} slices. Where seeds differ by more than methods do, the table decides nothing.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("runs/examples/own_optimizer_step"))
    main(parser.parse_args().folder)
