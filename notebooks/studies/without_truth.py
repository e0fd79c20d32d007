"""Training without truth, on real slices: FBP, TV, module=split, module=equivariant, both, and training with truth.

    python notebooks/studies/without_truth.py OUTPUT SLICES SPLIT [KEY=VALUE …]

SLICES has PATIENT/slices.npy, [N, 512, 512] in HU; SPLIT is as in any_scan.py. Further words change all
trainings, as trainer.max_steps=3000. The middle slice of each test patient is simulated on a 2 times finer grid. Only
validation reads a truth: it weighs TV and the equivariance, and judges the choices by the residual. It goes on where it
was stopped, and writes OUTPUT/without_truth.md after each seed, with what is there.
"""

import csv
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor

import qnmixer
from any_scan import at_size, middle_slices, psnr, split_in
from many_scans import trained
from qnmixer.evaluation.statistics import Scores, Statistic, difference, spread
from qnmixer.measurement.build import build_noise, build_projector
from qnmixer.models import TotalVariation
from qnmixer.physics import FanBeamProjector
from qnmixer.steps import config_of

SCANS = {
    f"{n} views, {noise} noise": [f"geometry.n_views={n}", f"noise={noise}"]
    for noise in ("field", "physical")
    for n in (24, 48)
}
EQUIVARIANT, BOTH, TRUTH = "equivariant", "both", "with truth"
METHODS = {
    "split": ["module=split"],
    EQUIVARIANT: ["module=equivariant"],
    BOTH: ["module=equivariant", "module.parts=2"],
    TRUTH: [],
}
SEEDS = (1, 2, 3)
ALPHAS, SHORT = (1e3, 1e4, 1e5), ["trainer.max_steps=100", "trainer.val_every_n_steps=100"]
"""Weights of the equivariance, and the trainings that choose one."""
_CAPTION = (
    "PSNR in dB at {size} × {size}: means over {n} test patients, one slice of each, and the seeds. Simulated from a 2 "
    "times finer grid. Truths are scaled as in training. The networks have T = {T} and {steps} steps of batch {batch}; "
    "each is as after its last step. "
    "Differences: ± half of the 95 % interval for other patients / for other seeds. TV: 400 iterations, the best "
    "weight for {n_val} other patients with truth, in steps of 10^(1/3). Written by notebooks/studies/without_truth.py."
)
_ON_CHOICES = (
    "val/residual chooses among the validations of each training, and val/psnr does. Same: how often both choose the "
    "same one. Costs: how much lower PSNR is, on the same validation slices, where the residual chose; the mean, and "
    "the most. Last column: how much lower PSNR is in the one that has the best residual of all validations of all "
    "networks that were trained for the scan, than in the best one."
)
_ON_ALPHA = "PSNR in dB of validation after 100 steps, 24 views, field noise, one seed, by module.alpha."


def validations(folder: Path) -> list[tuple[float, float]]:
    """Residual and PSNR of each validation of a run."""
    with (folder / "metrics.csv").open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["val/psnr"]]
    return [(float(row["val/residual"]), float(row["val/psnr"])) for row in rows]


def cost_of_choice(values: list[tuple[float, float]]) -> float:
    """The best PSNR minus that of the best residual."""
    return max(psnr for _, psnr in values) - min(values)[1]


def best_power(score: Callable[[float], float], first: float) -> float:
    """Of first · 10^(k/3) the one with the highest score: k goes on while the best is at an edge."""
    scores = {k: score(first * 10 ** (k / 3)) for k in (-1, 0, 1)}
    while (best := max(scores, key=scores.__getitem__)) in (edges := (min(scores), max(scores))):
        k = best + (1 if best == edges[1] else -1)
        scores[k] = score(first * 10 ** (k / 3))
    return first * 10 ** (best / 3)


class Study:
    """The folders, slices and words of all runs."""

    def __init__(self, output: Path, root: Path, split_file: Path, words: list[str]) -> None:
        self.output, self.root, self.split = output, root, split_in(split_file)
        studies = Path(__file__).resolve().parent
        self.words = [
            f"hydra.searchpath=[file://{studies}]",
            "experiment=without_truth",
            f"data.root={root}",
            "logger=csv",
        ]
        self.words += [f"data.cache_dir={output / 'cache'}", *split_file.read_text().split(), *words]
        self.config = config_of(*self.words)
        self.size = self.config.data.image_size

    def network(self, name: str, *words: str) -> Path:
        """The folder of a trained network."""
        folder: Path = trained(self.output / name.replace(" ", "_").replace(",", ""), [*self.words, *words])
        return folder

    @cache  # noqa: B019  # there is one study
    def slices(self, scan: str, part: str) -> tuple[FanBeamProjector, Tensor, Tensor]:
        """A at a scan, and noisy sinograms and truths of a part: one slice of each patient."""
        config = config_of(*self.words, *SCANS[scan])
        projector = build_projector(config)
        geometry, fine_size = projector.geometry, 2 * self.size
        finer = FanBeamProjector(replace(geometry, image_size=fine_size, pixel_size=geometry.field_of_view / fine_size))
        slices = middle_slices(self.root, self.split[part])
        keys = [(part == "test", k) for k in range(len(slices))]
        return projector, build_noise(config)(finer(at_size(slices, fine_size)), keys), at_size(slices, self.size)

    @torch.no_grad()
    def classical(self, scan: str) -> dict[str, Scores]:
        """PSNR of FBP and TV for the test patients."""
        file = self.output / f"{scan}.csv"
        if not file.exists():

            def tv(part: str, weight: float) -> list[float]:
                projector, y, truth = self.slices(scan, part)
                return psnr(TotalVariation(projector, 400, weight, gap=0)(y), truth)

            weight = best_power(lambda weight: mean(tv("val", weight)), 7.2e-4)
            projector, y, truth = self.slices(scan, "test")
            rows = {"FBP": psnr(projector.fbp(y), truth), "TV": tv("test", weight)}
            with file.open("w", newline="") as stream:
                csv.writer(stream).writerows([name, *values] for name, values in rows.items())
        with file.open(newline="") as stream:
            return {name: self._scores({0: [*map(float, values)]}) for name, *values in csv.reader(stream)}

    @torch.no_grad()
    def scores(self, scan: str, folders: dict[int, Path]) -> Scores:
        """PSNR of a method's networks by seed, after their last step, for the test patients."""
        _, y, truth = self.slices(scan, "test")
        return self._scores(
            {
                seed: psnr(qnmixer.load_pretrained(folder / "checkpoints/last.ckpt")(y), truth)
                for seed, folder in folders.items()
            }
        )

    def _scores(self, values: dict[int, list[float]]) -> Scores:
        return {(seed, 0): dict(zip(self.split["test"], row, strict=True)) for seed, row in values.items()}

    def best_alpha(self) -> dict[str, dict[float, float]]:
        """PSNR of validation by alpha, of both methods that have one."""
        return {
            method: {
                alpha: validations(
                    self.network(f"alpha {method} {alpha:g}", *METHODS[method], f"module.alpha={alpha}", *SHORT)
                )[-1][1]
                for alpha in ALPHAS
            }
            for method in (EQUIVARIANT, BOTH)
        }

    def page(self, runs: dict[str, dict[str, dict[int, Path]]], alphas: dict[str, dict[float, float]]) -> str:
        """The tables of what is trained: runs by scan, method and seed."""
        config = self.config
        caption = _CAPTION.format(
            size=self.size, n=len(self.split["test"]), n_val=len(self.split["val"]), T=config.model.T,
            steps=config.trainer.max_steps, batch=config.data.batch_size,
        )  # fmt: skip
        rivals = ("split − TV", "both − split", f"split − {TRUTH}")
        lines = ["# Training without truth", "", caption, "", row("scan", "seeds", "FBP", "TV", *METHODS, *rivals)]
        lines.append("|" + "---|" * (4 + len(METHODS) + len(rivals)))
        for scan, of_method in runs.items():
            scores = self.classical(scan) | {name: self.scores(scan, folders) for name, folders in of_method.items()}
            cells = [f"{spread(of).mean:.2f}" for of in scores.values()]
            cells += [of_difference(difference(*(scores[name] for name in rival.split(" − ")))) for rival in rivals]
            lines.append(row(scan, len(of_method[TRUTH]), *cells))
        if missing := [scan for scan in SCANS if scan not in runs]:
            lines += ["", f"Not yet run: {'; '.join(missing)}."]
        lines += ["", "## The choice without truth", "", _ON_CHOICES, ""]
        lines += [row("scan", "network", "same", "costs, dB", "at most", "of all networks, dB"), "|" + "---|" * 6]
        for scan, of_method in runs.items():
            values = [value for folders in of_method.values() for f in folders.values() for value in validations(f)]
            for method, folders in of_method.items():
                costs = [cost_of_choice(validations(folder)) for folder in folders.values()]
                same = f"{costs.count(0)} of {len(costs)}"
                cells = [f"{cost:.2f}" for cost in (mean(costs), max(costs), cost_of_choice(values))]
                lines.append(row(scan, method, same, *cells))
        lines += ["", "## The weight of the equivariance", "", _ON_ALPHA, ""]
        lines += [row("network", *(f"{alpha:g}" for alpha in ALPHAS)), "|" + "---|" * (1 + len(ALPHAS))]
        lines += [row(method, *(f"{value:.2f}" for value in of.values())) for method, of in alphas.items()]
        return "\n".join([*lines, ""])

    def run(self) -> None:
        """Train and score what is missing, and write the page after each seed."""
        alphas = self.best_alpha()
        runs: dict[str, dict[str, dict[int, Path]]] = {}
        for scan in SCANS:
            for seed in SEEDS:
                of_seed = {}
                for method, words in METHODS.items():
                    best = [f"module.alpha={max(of, key=of.__getitem__)}" for of in [alphas.get(method)] if of]
                    name = f"{scan} {method} {seed}"
                    of_seed[method] = self.network(name, *SCANS[scan], *words, *best, f"seed={seed}")
                for method, folder in of_seed.items():
                    runs.setdefault(scan, {}).setdefault(method, {})[seed] = folder
                (self.output / "without_truth.md").write_text(self.page(runs, alphas))


def row(*cells: object) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def of_difference(statistic: Statistic | None) -> str:
    """A mean difference ± half of its intervals over patients / over seeds, if there are several."""
    assert statistic is not None
    widths = statistic.over_patients, statistic.over_seeds
    return f"{statistic.mean:+.2f} ± {' / '.join('–' if w is None else f'{w:.2f}' for w in widths)}"


def main() -> None:
    """Run the study of these folders."""
    output, root, split_file, *words = sys.argv[1:]
    Study(Path(output).resolve(), Path(root), Path(split_file), words).run()


if __name__ == "__main__":
    main()
