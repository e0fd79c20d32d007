"""Networks that were trained with truth, adapted to another scanner by its sinograms alone, by two modules.

    python notebooks/studies/adaptation.py OUTPUT SLICES SPLIT BASE …

BASE is `pretrained` (256 × 256, 64 views), or networks that without_truth.py has trained with truth for 24 views: one
for each seed. SLICES and SPLIT are as there. The sinograms are of the val patients of SPLIT, on whom no BASE was
trained, and are simulated on a 2 times finer grid. The test patients are scored. It goes on where it was stopped, and
writes OUTPUT/adaptation.md, with the tables of all bases that OUTPUT has.
"""

import sys
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

import qnmixer
from any_scan import at_size, psnr, split_in
from many_scans import trained
from qnmixer.evaluation.statistics import Scores, difference, spread
from qnmixer.measurement.build import build_noise, build_projector
from qnmixer.measurement.measurement import Measurement
from qnmixer.models import TotalVariation
from qnmixer.physics import FanBeamProjector, KeyedNoise
from qnmixer.steps import config_of, override
from without_truth import best_power, of_difference, row

SCANNERS = {
    "25,000 photons": ["noise=physical", "noise.photons=25000"],
    "detector off by 0.25 bins, unknown": ["noise=field"],
    "three quarters of the views": ["noise=field"],
}
OFF, FEWER = [*SCANNERS][1:]
CURED, MODULES = "cured", {"split": (60, 40), "equivariant": (180, 10)}
"""The steps of an adaptation by each module, of one slice each, and by what it divides the learning rates of the base.

Seen by patients of val: with a quarter of the rates 60 steps cost 1 to 3 dB, and split does harm after 300 steps too.
"""
TRAINING = (
    "data.unit=value data.augment=false data.simulation_factor=1 monitor=val/residual callbacks=none "
    "logger=csv data.batch_size=1 trainer.max_steps={0} trainer.val_every_n_steps={0} test_after_training=false"
)
KINDS = {True: "The shipped weights", False: "Small networks"}
"""Whether the base is `pretrained`: the heading of its table."""
_CAPTION = (
    "PSNR in dB: means over {n} test patients, one slice of each, and {n_bases} network(s). Truths are scaled as in "
    "training. The noise is that of the field, but in the first row. Cured: the network with truth for {views} views "
    "at {size} × {size}, with the cures of other scans. {adaptations}, each with the sinograms of {n_val} other "
    "patients ({n_slices} slices; a patient each is left for validation and test). TV: 400 iterations, the best weight "
    "for these patients with truth. Differences: ± half of the 95 % interval for "
    "other patients / for other networks."
)
_NOTE = (
    "The residual is that of views that are held out, in units of the noise: no truth is needed for it. Written by "
    "notebooks/studies/adaptation.py."
)


class Scanner:
    """A scanner that differs from that of a base: its sinograms, with their noise, and what is known of it."""

    def __init__(self, name: str, words: list[str], output: Path, root: Path, split: dict[str, list[str]]) -> None:
        self.root, self.split, of_base = root, split, config_of(*words, *slices_in(root))
        n_views = of_base.geometry.n_views * 3 // 4 if name == FEWER else of_base.geometry.n_views
        self.change: dict[str, Any] = {} if n_views == of_base.geometry.n_views else {"n_views": n_views}
        self.words = [*words, *SCANNERS[name], f"geometry.n_views={n_views}"]
        config = override(of_base, " ".join(self.words[len(words) :]))
        self.noise: KeyedNoise = build_noise(config)
        self.projector, self.size = build_projector(config), config.data.image_size
        geometry, fine_size = self.projector.geometry, 2 * self.size
        pixel_size, offset = geometry.field_of_view / fine_size, 0.25 * (name == OFF)
        self._finer = FanBeamProjector(
            replace(geometry, image_size=fine_size, pixel_size=pixel_size, detector_offset=offset)
        )
        self.sinograms, self.n_slices = output / "sinograms", 0
        for k, patient in enumerate(split["val"]):
            y, _ = self.measured(patient, slice(None), k)
            self.n_slices += len(y)
            (self.sinograms / patient).mkdir(parents=True, exist_ok=True)
            if not (file := self.sinograms / patient / "scans.npy").exists():
                np.save(file, y[:, 0].numpy())

    @torch.no_grad()
    def measured(self, patient: str, which: slice, key: int) -> tuple[Tensor, Tensor]:
        """Noisy sinograms of some slices of a patient, [N, 1, V, D], and the slices, [N, 1, S, S]."""
        hu = np.load(self.root / patient / "slices.npy", mmap_mode="r")[which].astype(np.float32)
        images = torch.from_numpy(hu)[:, None].clamp(-1000, 2000) / 3000 + 1 / 3
        y = self.noise(self._finer(at_size(images, 2 * self.size)), [(2, key, k) for k in range(len(images))])
        return y, at_size(images, self.size)

    def middle(self, part: str) -> tuple[Tensor, Tensor]:
        """The noisy sinogram and the truth of the middle slice of each patient of a part."""
        pairs = []
        for k, patient in enumerate(self.split[part]):
            n = len(np.load(self.root / patient / "slices.npy", mmap_mode="r")) // 2
            pairs.append(self.measured(patient, slice(n, n + 1), 100 + k))
        y, truth = (torch.cat(tensors) for tensors in zip(*pairs, strict=True))
        return y, truth


def slices_in(root: Path) -> list[str]:
    """The words for slices in a folder."""
    return ["data=numpy", f"data.root={root}"]


def score(name: str, output: Path, root: Path, split: dict[str, list[str]], bases: list[str]) -> tuple[str, int]:
    """The row of a scanner, and the slices of its folder."""
    studies = Path(__file__).resolve().parent
    words = ["experiment=pretrained"]
    if bases != ["pretrained"]:
        words = [f"hydra.searchpath=[file://{studies}]", "experiment=without_truth", "geometry.n_views=24"]
    scanner = Scanner(name, words, output, root, split)
    learning = config_of(*words, *slices_in(root)).optimizer

    def tv(part: str, weight: float) -> list[float]:
        y, truth = scanner.middle(part)
        return psnr(TotalVariation(scanner.projector, 400, weight, gap=0)(y), truth)

    def of_patients(values: list[float]) -> dict[str, float]:
        return dict(zip(split["test"], values, strict=True))

    y, truth = scanner.middle("test")
    scores: dict[str, dict[tuple[int, int], dict[str, float]]] = {name: {} for name in (CURED, *MODULES)}
    residuals: dict[str, list[float]] = {name: [] for name in scores}
    for k, base in enumerate(bases):
        networks = {CURED: qnmixer.load_pretrained(base, **scanner.change)}
        for module, (steps, divisor) in MODULES.items():
            training = [
                *scanner.words,
                f"optimizer.lr={learning.lr / divisor}",
                f"optimizer.adamw_lr={learning.arguments['adamw_lr'] / divisor}",
                *TRAINING.format(steps).split(),
                "data=sinograms",
                f"data.root={scanner.sinograms}",
            ]
            folder = trained(output / f"{module}_{k}", [*training, f"module={module}", f"finetune={base}"])
            networks[module] = qnmixer.load_pretrained(folder / "checkpoints/last.ckpt")
        with torch.no_grad():
            for of, network in networks.items():
                scores[of][k, 0] = of_patients(psnr(network(y), truth))
                residuals[of].append(float(Measurement(network.projector, scanner.noise).residual(network, y).mean()))
    with torch.no_grad():
        total: Scores = {(0, 0): of_patients(tv("test", best_power(lambda weight: mean(tv("val", weight)), 7.2e-4)))}
    means = [f"{spread(values).mean:.2f}" for values in (total, *scores.values())]
    gains = [of_difference(difference(scores[module], scores[CURED])) for module in MODULES]
    return row(name, *means, *gains, *(f"{mean(values):.2f}" for values in residuals.values())), scanner.n_slices


def main() -> None:
    """Adapt and score what is missing, and write the table after each scanner."""
    folder, slices, split_file, *bases = sys.argv[1:]
    output, root, split = Path(folder).resolve(), Path(slices), split_in(Path(split_file))
    of_kind = output / KINDS[bases == ["pretrained"]].replace(" ", "_")
    heads = ["scanner", "TV", CURED, *MODULES, *(f"{module} − {CURED}" for module in MODULES)]
    heads += [f"residual, {CURED}", *MODULES]
    lines = [row(*heads), "|" + "---|" * len(heads)]
    for name in SCANNERS:
        line, n_slices = score(name, of_kind / name.replace(" ", "_").replace(",", ""), root, split, bases)
        lines.append(line)
        geometry = qnmixer.load_pretrained(bases[0]).projector.geometry
        caption = _CAPTION.format(
            n=len(split["test"]), n_bases=len(bases), views=geometry.n_views, size=geometry.image_size,
            n_val=len(split["val"]), n_slices=n_slices,
            adaptations=", ".join(
                f"{module}: {steps} further steps of one slice at 1/{divisor} of its learning rates"
                for module, (steps, divisor) in MODULES.items()
            ),
        )  # fmt: skip
        (of_kind / "table.md").write_text("\n".join([caption, "", *lines]))
        page = ["# Adaptation to another scanner"]
        for heading in KINDS.values():
            table = output / heading.replace(" ", "_") / "table.md"
            page += [f"## {heading}", table.read_text() if table.exists() else "Not yet run."]
        (output / "adaptation.md").write_text("\n\n".join([*page, _NOTE]) + "\n")


if __name__ == "__main__":
    main()
