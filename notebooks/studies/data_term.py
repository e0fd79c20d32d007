"""The table of experiment=data_term: python notebooks/studies/data_term.py SWEEP [SWEEP …] > data_term.md

Each sweep has been evaluated by qnmixer.compare, whose images.csv gives PSNR by seed and patient. τ_t, β_t and α_t are
read from the weights. The eigenvalues of A†A are computed for the scan of the sweep. Jobs that are not done are left
out, and the table says how many seeds each row has.
"""

import csv
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

from qnmixer.evaluation.statistics import Scores, difference, spread
from qnmixer.physics import FanBeamProjector
from qnmixer.physics.fbp import matched_gain, ramp_response
from qnmixer.reconstruction.checkpoints import load_run
from qnmixer.runs.records import read_results
from qnmixer.runs.sweeps import jobs_of
from qnmixer.runs.tables import Table, in_digits

RESULTS = [
    "A†",
    "H",
    "seeds",
    "PSNR, dB",
    "minus H = I, dB",
    "± seeds",
    "minus momentum, dB",
    "± seeds",
    "scalars, t ≥ 1",
]
ACROSS = ["method", "minus", "PSNR, dB", "± seeds", "seeds"]
EIGENVALUES = ["A†", "largest", "next", "above 1/2", "above 1/10", "above 1/100", "above 1/1000"]
NOTE = """\
PSNR: mean over seeds of the mean over patients, ± standard deviation over seeds. Differences on the same patients and
seeds, ± half of the 95 % interval for other patients; next that for other seeds. A difference is clear if it is larger
than both. Scalars of t = 1, 2, …: means over seeds. With τ = 0 BFGS is H = I, with τ = 1 it is H."""
EARLIER = """\
An earlier part of [Does curvature pay?](curvature.md), the later experiment. What was wrong in this part:

- What it calls BFGS is (1 − τ) I + τ H with a learned τ from 0. The paper's H alone was not trained.
- It has three seeds. With t(2) = 4.3 it cannot see 0.3 dB, and fifteen differences are tested with no correction.
- With FBP, BFGS − momentum is −0.04 ± 0.02 / 0.03: *clearly worse* by the rule of this page, but too small to matter.
- 0.06 ± 0.84 dB between the operators does not show that BFGS needs no good FBP: nothing tested that they are equal.
- The one clear difference between the operators was left out of the text at first: gradients, −0.52 ± 0.15 / 0.12.
- x₀ is FBP in all rows, also where the data term has Aᵀ."""
SYMBOLS = {"trust": "τ", "momentum": "β", "gradients": "sum of α"}


def scores_of(sweep: Path) -> dict[str, Scores]:
    """PSNR by method of the comparison, seeds and patient."""
    values: dict[str, Any] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with (sweep / "comparison" / "images.csv").open() as stream:
        for row in csv.DictReader(stream):
            seeds = int(row["seed"]), int(row["data_seed"])
            values[row["method"]][seeds][row["patient"]].append(float(row["psnr"]))
    return {
        method: {
            seeds: {name: mean(psnrs) for name, psnrs in patients.items()} for seeds, patients in of_method.items()
        }
        for method, of_method in values.items()
    }


def scalars_of(sweep: Path) -> dict[tuple[str, str], list[list[float]]]:
    """(A†, H) → for each seed τ_t, β_t, or for each t the sum of α_tk over k."""
    scalars = defaultdict(list)
    for folder, overrides in jobs_of(sweep).items():
        if read_results(folder).get("status") == "done":
            chosen = dict(word.lstrip("+").split("=", 1) for word in overrides)
            network: Any = load_run(str(folder), "best").network
            parameters = [*network.trust, *network.momenta, *network.mixes]
            key = chosen["model.data_term"], chosen["experiment/curvature"]
            scalars[key].append([float(p.detach().sum()) for p in parameters])
    return scalars


def method_of(scores: dict[str, Scores], data_term: str, curvature: str) -> Scores:
    """The scores of one arm; none if it is not there."""
    for name, of_method in scores.items():
        if {f"data_term={data_term}", f"curvature={curvature}"} <= set(name.split()):
            return of_method
    return {}


def rows_of(sweep: Path) -> list[list[str]]:
    """A row for each arm of a sweep."""
    scores, scalars, rows = scores_of(sweep), scalars_of(sweep), []
    for data_term in ("fbp", "adjoint"):
        for curvature in ("identity", "momentum", "gradients", "trust"):
            if not (own := method_of(scores, data_term, curvature)):
                continue
            statistic = spread(own)
            cells = [f"{statistic.n_seeds}", in_digits(statistic.mean, statistic.over_seeds)]
            for control in ("identity", "momentum"):
                other = method_of(scores, data_term, control)
                seeds = own.keys() & other.keys() if control != curvature else set()
                minus = difference(*({key: of[key] for key in seeds} for of in (own, other))) if seeds else None
                cells += ["–", "–"] if minus is None else [
                    in_digits(minus.mean, minus.over_patients, 10), in_digits(minus.over_seeds, reference=10)
                ]  # fmt: skip
            of_seeds = scalars[data_term, curvature]
            means = [mean(column) for column in zip(*of_seeds, strict=True)]
            shown = f"{SYMBOLS[curvature]}: {', '.join(f'{value:.2f}' for value in means)}" if means else "–"
            rows.append([data_term, name_of(curvature), *cells, shown])
    return rows


def across(sweep: Path) -> list[list[str]]:
    """Rows that compare the adjoint with FBP, on the same seeds and patients."""
    scores, rows = scores_of(sweep), []
    pairs = [(curvature, curvature) for curvature in ("identity", "momentum", "gradients", "trust")]
    for of_adjoint, of_fbp in [*pairs, ("trust", "identity")]:
        own, other = method_of(scores, "adjoint", of_adjoint), method_of(scores, "fbp", of_fbp)
        seeds = own.keys() & other.keys()
        minus = difference(*({key: of[key] for key in seeds} for of in (own, other))) if seeds else None
        if minus is not None:
            names = (f"{kind}, {name_of(of)}" for kind, of in (("adjoint", of_adjoint), ("fbp", of_fbp)))
            digits = in_digits(minus.mean, minus.over_patients, 10), in_digits(minus.over_seeds, reference=10)
            rows.append([*names, *digits, str(minus.n_seeds)])
    return rows


def name_of(curvature: str) -> str:
    """The name of an H in the tables."""
    return {"trust": "BFGS", "identity": "H = I"}.get(curvature, curvature)


def eigenvalues(projector: FanBeamProjector) -> dict[str, np.ndarray]:
    """All eigenvalues of A†A that are not 0 by construction, the largest first: A Aᵀ and F^½ A Aᵀ F^½ have the same."""
    geometry = projector.geometry
    shape = 1, geometry.n_views, geometry.n_detectors
    size = geometry.n_views * geometry.n_detectors
    gram = torch.cat([projector(projector.adjoint(rays.view(-1, *shape))) for rays in torch.eye(size).split(256)])
    gram = gram.view(size, size).double()
    bins = np.arange(geometry.n_detectors)
    kernel = np.fft.irfft(matched_gain(geometry) * ramp_response(geometry, projector.fbp_filter))
    values, vectors = np.linalg.eigh(kernel[np.abs(bins[:, None] - bins)])
    root = torch.from_numpy(vectors * np.sqrt(values.clip(0)) @ vectors.T)
    filtered = (gram.view(-1, geometry.n_detectors) @ root).view(size, size)
    filtered = (filtered.T.reshape(-1, geometry.n_detectors) @ root).view(size, size)
    of_adjoint = torch.linalg.eigvalsh(gram / projector.operator_norm() ** 2)
    return {"fbp": torch.linalg.eigvalsh(filtered).flip(0).numpy(), "adjoint": of_adjoint.flip(0).numpy()}


def write(sweeps: list[Path]) -> None:
    """Print the page."""
    print(f"# Does second order pay where the data term is not preconditioned?\n\n{EARLIER}")
    for sweep in sweeps:
        done = [folder for folder in jobs_of(sweep) if read_results(folder).get("status") == "done"]
        module = load_run(str(done[0]), "best")
        steps = {read_results(folder)["steps"] for folder in done}
        data_steps = module.config.model.settings()["data_steps"]
        title = re.search(r"^## (.*)", (sweep / "comparison" / "comparison.md").read_text(), re.MULTILINE)
        assert title
        print(
            f"\n## Steps along the data term in an iteration: {data_steps}; of training: {', '.join(map(str, steps))}"
        )
        print(f"\n{title[1]}. Jobs that are done: {len(done)} of {len(jobs_of(sweep))}.\n")
        print(f"{Table(RESULTS, rows_of(sweep)).markdown()}\n\n{Table(ACROSS, across(sweep)).markdown()}")
    print(f"\n{NOTE}\n\n{spectrum(module.projector)}")


def spectrum(projector: FanBeamProjector) -> str:
    """How the eigenvalues of both kinds of A†A are spread."""
    geometry, rows = projector.geometry, []
    n_pixels, n_rays = geometry.image_size**2, geometry.n_views * geometry.n_detectors
    for data_term, values in eigenvalues(projector).items():
        counts = [f"{(values > values[0] / ratio).sum():,}" for ratio in (2, 10, 100, 1000)]
        rows.append([data_term, f"{values[0]:.3g}", f"{values[1]:.3g}", *counts])
    return (
        f"## Eigenvalues of A†A, {geometry.image_size} × {geometry.image_size}, {geometry.n_views} views\n\n"
        f"{Table(EIGENVALUES, rows).markdown()}\n\n"
        f"How many are above a fraction of the largest one. At most {n_rays:,} of {n_pixels:,} are not 0,\n"
        "because there are no more rays. The codec starts orthonormal, so the latent has the same before training."
    )


if __name__ == "__main__":
    write([Path(word) for word in sys.argv[1:]])
