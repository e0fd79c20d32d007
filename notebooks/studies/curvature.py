"""Does curvature pay? Arms that branch from the same first-order networks, and the page with what came out.

    python notebooks/studies/curvature.py RUN [SLICES SPLIT]

SLICES has PATIENT/slices.npy, [N, 512, 512] in HU. SPLIT is a file with data.split=explicit data.val_patients=[…]
data.test_patients=[…]. With both the study goes on where it stopped: each seed that is done stays in RUN. Then, and
without them, RUN/curvature.md and RUN/curvature.png are written from what is there.

`PLAN` was committed before the first run, and is the first part of the page: claim, arms, criterion, order and stop.
"""

import copy
import itertools
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.optim import Optimizer

from qnmixer.data.datamodule import SliceDataModule
from qnmixer.evaluation.metrics import psnr
from qnmixer.evaluation.statistics import Scores, difference, half_width, spread
from qnmixer.files import atomic_file, write_text
from qnmixer.models import QNMixer
from qnmixer.models.data_term import safe_step_size
from qnmixer.models.qn_mixer import QNState
from qnmixer.module.build import build_data_module
from qnmixer.parallel.tracker import PeakTracker
from qnmixer.reconstruction.checkpoints import load_run
from qnmixer.reconstruction.weights import find_checkpoint
from qnmixer.runs.tables import NOTHING, Table
from qnmixer.schedules import cosine
from qnmixer.steps import Config, build_module, build_optimizer, config_of

PLAN = """\
# Does curvature pay?

## Written down before the first run

**Claim.** With as many parameters, a quasi-Newton step reaches better images than a first-order step with a memory.

**Setting.** Real slices, 64 × 64 pixels, simulated from 128 × 128 with `noise=field`; a flat fan, 32 views of an arc
of 120°; A† = Aᵀ/‖A‖², which does not precondition; x₀ = 0; one J: one regulariser G, one λ and one data step for all
iterations, without detail convolutions. C = 16, 16,900 weights. Muon and learning rates as in `second_order`, clip
0.1, squared error, one slice a step, turned and flipped at random. 56 patients (122 slices) for training, five (24
slices) for the test. The last weights are tested: nothing is chosen on the five validation patients (21 slices), so
they are a second test.

**Branches.** For each seed, 1,000 steps of H = I at one rate after a warm-up of 45. Then each arm takes these weights
and the state of the optimizer, and 500 steps more, with a cosine to 0. In a step all arms get the same slice, turn and
noise. The seed draws weights, order of slices, turns and noise, also those of the test.

| arm | step | new scalars | at the branch |
|---|---|---|---|
| H = I | s = −r | none | the parent goes on |
| momentum | s = −r + β s of the step before | T − 1 | β = 0: the image of the parent |
| gradients | s = −r − Σ α_k r_k, all earlier gradients (as in DeMUN) | T (T − 1)/2 | α = 0: the image of the parent |
| paper's H | s = −H r, BFGS over all pairs | none | see below |
| trust | s = −(1 − τ) r − τ H r, τ learned | T − 1 | τ = 0: the image of the parent |

The paper's H has no scalar that could switch it off: after its first pair it is not I, so at the branch its image is
another one than the parent's. So it is brought in: a τ that is not learned rises from 0 to 1 over the first 100 of the
500 steps. In the other 400 steps, and in the test, it is H itself. The safeguards of H (damping, skipped pairs) are
ours: without them training diverged. The latent is an orthonormal one of as many numbers as the image.

**Criterion.** For each T: d = PSNR of the arm − PSNR of momentum; for each seed the mean over the test patients, each
the mean of its slices. Curvature (the paper's H, or trust) *pays* if the mean of d over ten seeds is at least 0.2 dB,
the 95 % interval over seeds (Student) is above 0, and p, corrected by Holm over the 20 pairs of arms (ten for each T),
is below 0.05. It *does not pay* if the upper end of that interval is below 0.2 dB. Else it is *not decided*. A pair
that was not run counts in the 20, with p = 1. An image that is not finite counts as x = 0.

**Order and stop.** T = 4, seeds 1 to 10; then the shipped network (below); then T = 8, seeds 1 to 10. If time is left:
T = 4 over 360° from x₀ = FBP, without a verdict. It stops there, or 90 minutes after its start in the middle of a
seed, which is then left out. No result is looked at to decide this. A T with fewer than ten seeds gets no verdict.

**What curvature can add to a given network.** All weights of each trained H = I network (T = 4, 1,500 steps) are
frozen. Only β, α or τ are fitted, from 0, by Adam, for 200 steps at a rate of 0.03 with a cosine; λ alone as a control
(the rate is that of λρ), since any further fit may gain. The shipped network (256 × 256, 64 views, T = 10) is taken
with H = I, and fitted for 24 steps. The unit is the patient.

**Beside it.** λρ with ρ = 1, the largest eigenvalue of A†A (a step is stable below 2); cos(z, s) of the pairs before
damping, and the share of skipped pairs; the scalars; CPU time of a step, in which all arms take turns; the most bytes
in the tensors of a step; PSNR of each iterate.

**What it cannot show.** Another start than first-order weights, long training, the paper's size, its latent.

**Before this was written**, H = I alone was trained for 200 steps, to time a step and to see that λ stays stable, and
BFGS for ten, to time a step. All arms were run for 6 steps after 6 of the parent, to test the program. No longer
comparison was made.
"""
NOT_AS_PLANNED = """\
**Not as planned.** A second commit, also before the first run, changed the fits of the shipped network: their number
of steps, and the rate of λ. The 90 minutes were of a shared machine. They ended before T = 8 began, and 41 seconds
before the fits of the shipped network did, which are kept. So T = 8 was run 50 minutes later, by commit 845eef2c0c82,
in 38 minutes more. The results of T = 4 had been read by then. Nothing of the plan was changed for it, and none of its
results was read before its ten seeds were done. The 360° from x₀ = FBP were not run."""
ARMS = {"H = I": "identity", "momentum": "momentum", "gradients": "gradients", "paper's H": "bfgs", "trust": "bfgs"}
"""`hessian` of each arm."""
FITS = {
    "λ": ("H = I", "step_sizes"),
    "β": ("momentum", "momenta"),
    "α": ("gradients", "mixes"),
    "τ": ("trust", "trust"),
}
"""What is fitted to frozen weights: the arm, and its scalars."""
N_PARENT, N_ARM, N_WARMUP, N_RAMP, N_FIT, N_FIT_SHIPPED = 1000, 500, 45, 100, 200, 24
FIT_RATE, CLIP, MARGIN, N_SEEDS, N_PAIRS = 0.03, 0.1, 0.2, 10, 20
_ARC = f"geometry.angle_span={2 * math.pi / 3}"
SETTINGS = {
    "arc_4": ("T = 4, 120°, x₀ = 0", ["model.n_iterations=4", _ARC]),
    "arc_8": ("T = 8, 120°, x₀ = 0", ["model.n_iterations=8", _ARC]),
    "turn_4": ("T = 4, 360°, x₀ = FBP", ["model.n_iterations=4"]),
}
Networks = dict[str, QNMixer]
CLAIMS = ("paper's H", "momentum"), ("trust", "momentum")
FIGURE = "curvature.png"


class FromZero(QNMixer):
    """QN-Mixer from x₀ = 0, so that no FBP helps it."""

    def start(self, y: Tensor) -> QNState:
        """x₀ = 0, and no pairs."""
        size = self.projector.geometry.image_size
        return QNState(y.new_zeros(len(y), 1, size, size))


# The experiment


def branch(parent: QNMixer, arm: str, settings: Mapping[str, Any]) -> QNMixer:
    """A network of an arm with the weights of its parent, of H = I. Its new scalars are 0: it gives the same image."""
    words = {**settings, "hessian": ARMS[arm], "learned_trust": True}
    network = type(parent)(parent.projector, **words)
    weights = {name: value for name, value in parent.state_dict().items() if not name.startswith("trust")}
    lacking = network.load_state_dict(weights, strict=False).missing_keys
    assert all(name.split(".")[0] in ("momenta", "mixes", "trust") for name in lacking)
    if arm == "paper's H":
        network.trust.requires_grad_(False)
    return network


def bring_in(arm: str, network: QNMixer, k: int) -> None:
    """Before step k of an arm: the paper's H gets its share, from 0 to all."""
    if arm == "paper's H":
        for share in network.trust:
            share.data.fill_(min(1.0, k / N_RAMP))


def optimizer_of(config: Config, network: QNMixer, parent: QNMixer, before: Optimizer) -> Optimizer:
    """The optimizer of an arm, with the state that it had for the parent."""
    optimizer, weights = build_optimizer(config.optimizer, network), dict(parent.named_parameters())
    for name, weight in network.named_parameters():
        if name in weights and weights[name] in before.state:
            optimizer.state[weight] = copy.deepcopy(before.state[weights[name]])
    return optimizer


def train(
    module: Any,
    networks: Networks,
    optimizers: Mapping[str, Optimizer],
    batches: Iterable[Any],
    rate: Callable[[int], float],
    before_step: Callable[[str, QNMixer, int], None] = lambda *_: None,
) -> dict[str, float]:
    """Train networks on the same batches, in turns. Returns CPU seconds of a step of each, a mean."""
    seconds = dict.fromkeys(networks, 0.0)
    for optimizer in optimizers.values():
        for group in optimizer.param_groups:
            group["first_rate"] = group["lr"]
    n = 0
    for k, batch in enumerate(batches):
        for name, network in networks.items():
            before_step(name, network, k)
            for group in optimizers[name].param_groups:
                group["lr"] = rate(k) * group["first_rate"]
            start = time.process_time()
            one_step(module, network, optimizers[name], batch)
            seconds[name] += time.process_time() - start
        n = k + 1
    return {name: total / n for name, total in seconds.items()}


def one_step(module: Any, network: QNMixer, optimizer: Optimizer, batch: Any) -> None:
    """An optimizer step of a network."""
    module.network = network
    optimizer.zero_grad()
    module.training_step(batch, 0).backward()
    nn.utils.clip_grad_norm_(network.parameters(), CLIP)
    optimizer.step()


def batches_of(data: SliceDataModule) -> Iterator[Any]:
    """Training batches without end."""
    loader: Any = data.train_dataloader()
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)
        yield from loader


def memory_of(module: Any, network: QNMixer, optimizer: Optimizer, batch: Any) -> float:
    """MiB of all tensors in an optimizer step, at its peak. The step is taken."""
    with PeakTracker() as tracker:
        tracker.track(network, optimizer)
        one_step(module, network, optimizer, batch)
    return sum(tracker.peak.values()) / 2**20


@torch.no_grad()
def scores_of(network: QNMixer, batches: Sequence[Any]) -> dict[str, Any]:
    """PSNR of x_0 … x_T by patient, and what the pairs are like."""
    values: dict[str, list[list[float]]] = {}
    notes: list[dict[str, float]] = []
    for batch in batches:
        state, images = network.trajectory(batch["sinogram"])
        (patient,) = {name.split("/")[0] for name in batch["name"]}
        of_slice = [float(psnr(image.nan_to_num(0, 0, 0), batch["image"])) for image in images]
        values.setdefault(patient, []).append(of_slice)
        notes.append({name: float(value) for name, value in network.diagnostics(state).items()})
    by_patient = {patient: [mean(column) for column in zip(*rows, strict=True)] for patient, rows in values.items()}
    return {"psnr": by_patient, **{name: mean(note[name] for note in notes) for name in notes[0]}}


def scalars_of(network: QNMixer) -> dict[str, list[float]]:
    """λρ, and of each t the sum of its other scalars."""
    safe = safe_step_size(network.projector, network.data_term)
    values = {letter: [float(p.detach().sum()) for p in part] for letter, part in network.scalars().items()}
    return values | {"lambda": [value / safe for p in network.step_sizes for value in p.detach().tolist()]}


def fitted(module: Any, parent: QNMixer, settings: Any, batches: Sequence[Any], test: Sequence[Any]) -> dict[str, Any]:
    """What the scalars alone add to a frozen network of H = I: scores before, and after each fit."""
    networks = {letter: branch(parent, arm, settings) for letter, (arm, _) in FITS.items()}
    optimizers: dict[str, Optimizer] = {}
    for letter, network in networks.items():
        scalars = [*getattr(network.requires_grad_(False), FITS[letter][1])]
        unit = safe_step_size(network.projector, network.data_term) if letter == "λ" else 1.0
        optimizers[letter] = torch.optim.Adam([scalar.requires_grad_() for scalar in scalars], lr=FIT_RATE * unit)
    train(module, networks, optimizers, batches, lambda k: cosine(k, len(batches), 0))
    after = {
        letter: scores_of(network, test) | {"scalars": scalars_of(network)} for letter, network in networks.items()
    }
    return {"before": scores_of(parent, test), **after}


def run_seed(config: Config, kind: type[QNMixer], weights_file: Path) -> dict[str, Any]:
    """Train the parent and the arms of one seed, and test them."""
    torch.manual_seed(config.seed)
    module: Any = build_module(config)
    data: Any = build_data_module(config)
    batches = batches_of(data)
    tests = {part: [*data.loader(part)] for part in ("test", "val")}
    settings = config.model.settings()
    parent = kind(module.projector, **{**settings, "hessian": "identity"})
    optimizer = build_optimizer(config.optimizer, parent)
    of_parent = itertools.islice(batches, N_PARENT)
    train(module, {"": parent}, {"": optimizer}, of_parent, lambda k: min(1, (k + 1) / N_WARMUP))
    networks = {arm: branch(parent, arm, settings) for arm in ARMS}
    optimizers = {arm: optimizer_of(config, network, parent, optimizer) for arm, network in networks.items()}
    pairs_at_branch = scores_of(networks["trust"], tests["test"])  # with τ = 0 it goes where the parent goes
    of_arms, of_fits = ([*itertools.islice(batches, n)] for n in (N_ARM, N_FIT))
    seconds = train(module, networks, optimizers, of_arms, lambda k: cosine(k, N_ARM, 0), bring_in)
    record: dict[str, Any] = {"arms": {}, "parent": pairs_at_branch}
    for arm, network in networks.items():
        record["arms"][arm] = {part: scores_of(network, test) for part, test in tests.items()}
        record["arms"][arm] |= {"scalars": scalars_of(network), "seconds": seconds[arm]}
    if config.model.settings()["n_iterations"] == 4:
        record["fits"] = fitted(module, networks["H = I"], settings, of_fits, tests["test"])
    states = {"parent": parent.state_dict(), **{arm: network.state_dict() for arm, network in networks.items()}}
    torch.save(states, weights_file)
    for arm, network in networks.items():  # last: it takes a step
        record["arms"][arm]["mib"] = memory_of(module, network, optimizers[arm], of_arms[0])
    return record


def config_for(slices: str, split: Sequence[str], *words: str) -> Config:
    """The config of a run on real slices."""
    return config_of(
        "data=numpy", f"data.root={slices}", "data.num_workers=0", "data.simulation_factor=2", "noise=field",
        "data.batch_size=1", "data.augment=true", *split, *words,
    )  # fmt: skip


def config_at(name: str, seed: int, slices: str, split: Sequence[str]) -> Config:
    """The config of a seed of a setting."""
    return config_for(
        slices, split, "data.image_size=64", "geometry=paper_64", "geometry.n_views=32", "model.channels=16",
        "model.detail_channels=0", "model.data_steps=1", "model.shared_step_size=true", "model.data_term=adjoint",
        "optimizer=muon", *SETTINGS[name][1], f"seed={seed}", f"data.seed={seed}",
    )  # fmt: skip


def run_shipped(slices: str, split: Sequence[str]) -> dict[str, Any]:
    """Fit the scalars of the shipped network."""
    trained: Any = load_run(find_checkpoint("pretrained"), "best")
    network, settings = trained.network, trained.config.model.settings()
    config = config_for(slices, split, "data.image_size=256", "geometry.n_views=64", "seed=1", "data.seed=1")
    module: Any = build_module(config)
    data: Any = build_data_module(config)
    parent = branch(network, "H = I", settings)
    return fitted(
        module, parent, settings, [*itertools.islice(batches_of(data), N_FIT_SHIPPED)], [*data.loader("test")]
    )


def go_on(run: Path, slices: str, split_file: str) -> None:
    """Run what is not done, in the order of the plan."""
    words = "git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"
    commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    split = Path(split_file).read_text().split()
    seeds = {name: [(name, seed) for seed in range(1, N_SEEDS + 1)] for name in SETTINGS}
    for name, seed in [*seeds["arc_4"], ("shipped", 0), *seeds["arc_8"], *seeds["turn_4"]]:
        file = run / f"{name}_{seed}.json"
        if file.exists():
            continue
        record: dict[str, Any] = {"began": datetime.now().astimezone().isoformat(timespec="seconds"), "commit": commit}
        if name == "shipped":
            record |= {"fits": run_shipped(slices, split)}
        else:
            kind = QNMixer if name.startswith("turn") else FromZero
            record |= run_seed(config_at(name, seed, slices, split), kind, run / f"{name}_{seed}.pt")
        write_text(file, json.dumps(record))


# The page


def p_value(values: Sequence[float]) -> float:
    """Student's two-sided p of a mean of 0. With t = √ν tan θ the density is cos^(ν−1) θ, which is summed."""
    n = len(values)
    if n < 2 or not (s := stdev(values)):
        return 1.0
    edges = np.linspace(0, np.pi / 2, 200_001)
    middles = (edges[1:] + edges[:-1]) / 2
    density = np.cos(middles) ** (n - 2)
    theta = math.atan(abs(mean(values)) * math.sqrt(n) / s / math.sqrt(n - 1))
    return float(density[middles > theta].sum() / density.sum())


def holm(p_values: Mapping[Any, float], n_tests: int) -> dict[Any, float]:
    """p corrected by Holm over so many tests. Those that were not made count as p = 1."""
    corrected, largest = {}, 0.0
    for rank, key in enumerate(sorted(p_values, key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (n_tests - rank) * p_values[key]))
        corrected[key] = largest
    return corrected


def verdict(d: Sequence[float], p: float) -> str:
    """What the criterion says of the differences of ten seeds."""
    half = half_width(d)
    if len(d) < N_SEEDS or half is None:
        return "no verdict: fewer than ten seeds"
    if mean(d) >= MARGIN and mean(d) - half > 0 and p < 0.05:
        return "pays"
    return "does not pay" if mean(d) + half < MARGIN else "not decided"


def records_of(run: Path, name: str) -> dict[int, Any]:
    """The records of the seeds that are done."""
    files = {seed: run / f"{name}_{seed}.json" for seed in range(N_SEEDS + 1)}
    return {seed: json.loads(file.read_text()) for seed, file in files.items() if file.exists()}


def scores_in(records: Mapping[int, Any], *place: str, t: int = -1) -> Scores:
    """PSNR of x_t by seed and patient, of an arm or a fit."""
    scores = {}
    for seed, record in records.items():
        for key in place:
            record = record[key]
        scores[seed, seed] = {patient: of_t[t] for patient, of_t in record["psnr"].items()}
    return scores


def of_seeds(own: Scores, rival: Scores) -> list[float]:
    """Differences of the means over patients, seed by seed."""
    return [mean(own[seed].values()) - mean(rival[seed].values()) for seed in own]


def in_db(value: float, half: float | None = None) -> str:
    """A difference in dB, with half of its interval."""
    return f"{value:+.3f}" + ("" if half is None else f" ± {half:.3f}")


def means(rows: Iterable[Sequence[float]]) -> str:
    """The mean of each column, or the ends of their range if they are many."""
    values = [f"{mean(column):.2f}" for column in zip(*rows, strict=True)]
    return ", ".join(values) if len(values) < 12 else f"{min(values, key=float)} to {max(values, key=float)}"


def arms_table(records: Mapping[int, Any]) -> Table:
    """A row for each arm, with its difference from H = I."""
    rows, first = [], "H = I"
    for arm in ARMS:
        own, rival, val, rival_val = (
            scores_in(records, "arms", of, part) for part in ("test", "val") for of in (arm, first)
        )
        minus, of_val = difference(own, rival), difference(val, rival_val)
        total = spread(own)
        assert minus is not None
        assert of_val is not None
        own_cells = [f"{total.mean:.2f}" + ("" if total.over_seeds is None else f" ± {total.over_seeds:.2f}")]
        cells = [
            in_db(minus.mean, minus.over_seeds),
            f"{minus.over_patients:.3f}",
            in_db(of_val.mean, of_val.over_seeds),
        ]
        rows.append([arm, *own_cells, *([NOTHING] * 3 if arm == first else cells)])
    headings = ["arm", "PSNR, dB", "minus H = I, ± seeds", "± patients", "the same, val patients"]
    return Table(headings, rows)


def beside_table(records: Mapping[int, Any]) -> Table:
    """What the networks of each arm are like, means over seeds."""
    rows, first = [], [of["arms"]["H = I"] for of in records.values()]
    parents = [of["parent"] for of in records.values()]
    step_of_first = mean(own["seconds"] for own in first)
    for arm in ARMS:
        of_arm = [of["arms"][arm] for of in records.values()]
        letter = next((letter for letter in ("beta", "alpha", "tau") if letter in of_arm[0]["scalars"]), None)
        scalars = means(own["scalars"][letter] for own in of_arm) if letter else NOTHING
        noted = parents if arm == "H = I" else [own["test"] for own in of_arm]
        pairs = [f"{mean(of[key] for of in noted):.2f}" if key in noted[0] else NOTHING for key in _OF_PAIRS]
        step = mean(own["seconds"] for own in of_arm)
        cost = [f"{1000 * step:.1f} ({step / step_of_first:.2f})", f"{mean(own['mib'] for own in of_arm):.1f}"]
        rows.append([arm, means(own["scalars"]["lambda"] for own in of_arm), scalars, *pairs, *cost])
    headings = ["arm", "λρ", "β, Σ α or τ, t ≥ 1", "cos(z, s)", "skipped", "step, ms of CPU (× H = I)", "step, MiB"]
    note = (
        "Means over seeds. cos(z, s) and the share of skipped pairs: of the test slices. In the row H = I they are of "
        "the pairs that H would have had in the parent, at the branch. The arms take turns in a step, but other work "
        "ran on the machine: compare times within a table only."
    )
    return Table(headings, rows, note=note)


_OF_PAIRS = "cosine_zs", "skipped_pairs"


def differences(run: Path) -> dict[tuple[str, str, str], list[float]]:
    """Of the pairs of arms of each T: the differences seed by seed."""
    return {
        (name, arm, rival): of_seeds(*(scores_in(records, "arms", of, "test") for of in (arm, rival)))
        for name in SETTINGS
        if name.startswith("arc") and (records := records_of(run, name))
        for arm, rival in itertools.combinations(reversed(ARMS), 2)
    }


def pairs_table(run: Path, name: str) -> Table:
    """All pairs of a T, with p."""
    all_pairs = differences(run)
    p_values = {pair: p_value(d) for pair, d in all_pairs.items()}
    corrected, rows = holm(p_values, N_PAIRS), []
    for pair in (pair for pair in all_pairs if pair[0] == name):
        d = all_pairs[pair]
        is_claim = pair[1:] in CLAIMS
        p_cells = [f"{p:.2g}" for p in (p_values[pair], corrected[pair])]
        rows.append(
            [*pair[1:], in_db(mean(d), half_width(d)), *p_cells, verdict(d, corrected[pair]) if is_claim else ""]
        )
    headings = ["arm", "minus", "PSNR, dB, ± seeds", "p", "p, Holm", "by the criterion"]
    return Table(headings, rows, note="± half of the 95 % interval over seeds, not corrected; Holm over 20 pairs.")


def fits_table(run: Path) -> Table:
    """What fitted scalars add to frozen networks."""
    rows = []
    for name, title in {**{name: of[0] for name, of in SETTINGS.items()}, "shipped": "shipped, 256 × 256"}.items():
        records = {seed: of for seed, of in records_of(run, name).items() if "fits" in of}
        for letter in FITS if records else ():
            before, after = (scores_in(records, "fits", of) for of in ("before", letter))
            minus = difference(after, before)
            assert minus is not None
            key = {"λ": "lambda", "β": "beta", "α": "alpha", "τ": "tau"}[letter]
            values = means(of["fits"][letter]["scalars"][key] for of in records.values())
            cells = [f"{spread(before).mean:.2f}", in_db(minus.mean, minus.over_patients)]
            over_seeds = NOTHING if minus.over_seeds is None else f"{minus.over_seeds:.3f}"
            rows.append([title, str(len(records)), letter, *cells, over_seeds, values])
    headings = [
        "network",
        "seeds",
        "fitted",
        "PSNR before",
        "gain, dB, ± patients",
        "± seeds",
        "values (λρ, β, Σ α, τ)",
    ]
    return Table(headings, rows)


def page(run: Path) -> str:
    """The whole page."""
    done = {name: records for name in SETTINGS if (records := records_of(run, name))}
    if not done:
        return f"{PLAN}\n## Results\n\nNo seed is done yet.\n"
    first = min((of for records in done.values() for of in records.values()), key=lambda of: of["began"])
    parts = [f"{PLAN}\n## Results", f"The first run began at {first['began']}, by commit {first['commit'][:12]}."]
    all_pairs = differences(run)
    corrected = holm({pair: p_value(d) for pair, d in all_pairs.items()}, N_PAIRS)
    lines = [
        f"- {SETTINGS[name][0]}, {' − '.join(claim)}, {len(d)} seeds: {in_db(mean(d), half_width(d))} dB, "
        f"{verdict(d, corrected[name, *claim])}"
        for name, claim in itertools.product(done, CLAIMS)
        if (d := all_pairs.get((name, *claim)))
    ]
    lines += [f"- {SETTINGS[name][0]}: no seed is done, so no verdict" for name in SETTINGS if name not in done]
    parts += ["\n".join(lines), NOT_AS_PLANNED]
    for name, records in done.items():
        parts += [f"### {SETTINGS[name][0]}: seeds done, {len(records)}", arms_table(records).markdown()]
        parts += [pairs_table(run, name).markdown()] if name.startswith("arc") else []
        parts += [beside_table(records).markdown()]
    parts += ["### PSNR of each iterate", f"![PSNR of the iterates of each arm]({FIGURE})", _CAPTION]
    parts += ["### Scalars fitted to frozen networks of H = I", fits_table(run).markdown(), _NOTE]
    return "\n\n".join(parts) + "\n"


_CAPTION = (
    "Above: means over test patients, then seeds. Below: minus H = I; bars: the 95 % interval over seeds. Only x_T is "
    "trained."
)
_NOTE = "Means over seeds of the five test patients. Written by notebooks/studies/curvature.py."


def draw(run: Path) -> Figure:
    """PSNR of x_1 … x_T of each arm, and minus that of H = I."""
    done = {name: records for name in SETTINGS if (records := records_of(run, name))}
    figure = Figure(figsize=(5 * len(done), 7), layout="constrained")
    axes = figure.subplots(2, len(done), squeeze=False)
    for (above, below), (name, records) in zip(axes.T, done.items(), strict=True):
        length = len(next(iter(next(iter(records.values()))["arms"]["H = I"]["test"]["psnr"].values())))
        for number, arm in enumerate(ARMS):
            of_t = {t: [scores_in(records, "arms", of, "test", t=t) for of in (arm, "H = I")] for t in range(1, length)}
            shifted = [t + 0.06 * (number - 2) for t in of_t]
            values = [[mean(of_seed.values()) for of_seed in own.values()] for own, _ in of_t.values()]
            minus = [of_seeds(own, rival) for own, rival in of_t.values()]
            for axis, columns in ((above, values), (below, minus)):
                halves = [half_width(column) or 0.0 for column in columns]
                axis.errorbar(shifted, [*map(mean, columns)], halves, fmt="o-", ms=3, lw=1, capsize=2, label=arm)
        above.set(title=f"{SETTINGS[name][0]}: {len(records)} seeds", ylabel="PSNR, dB")
        below.set(xlabel="iteration t", ylabel="PSNR minus that of H = I, dB")
        for axis in (above, below):
            axis.set_xticks(range(1, length))
            axis.grid(alpha=0.3)
        above.legend()
    return figure


def write(run: Path) -> None:
    """Write the page and its figure into the run's folder."""
    write_text(run / "curvature.md", page(run))
    if any(records_of(run, name) for name in SETTINGS):
        with atomic_file(run / FIGURE) as path:
            draw(run).savefig(path, dpi=110, format="png")


def main() -> None:
    """Go on with the study, if its data are given, and write the page."""
    folder, *data = sys.argv[1:]
    run = Path(folder)
    run.mkdir(parents=True, exist_ok=True)
    if data:
        torch.set_num_threads(1)
        go_on(run, *data)
    write(run)


if __name__ == "__main__":
    main()
