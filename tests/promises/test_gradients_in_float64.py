"""Promise 3: DDP, FSDP, pipeline, accumulation with a partial last window: the gradient of one process.

In float64, where rounding hides nothing: of a step of four slices in a window for eight, the last of an epoch. Its
weight of 2 is exact in the float32 of a batch: with 4/3 all gradients differ by 3e-8, from that of all slices at once.
"""

from typing import Any

import numpy as np
import pytest
import torch

from qnmixer.data.phantoms.phantoms import phantom
from qnmixer.measurement.build import build_projector
from qnmixer.settings.compose import compose
from qnmixer.settings.run import parse

from ..warm import Warm
from .test_gradients_of_one_process import COMPETITORS, MODEL, TINY, train

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parity")]

SLICES = "data.n_train=4 trainer.max_steps=1 optimizer=sgd"  # the step comes after what is compared
# Two at the demo's size, where parts that only act on large tensors act; the others, long, on images of 16 pixels.
# Three iterations, and not the demo's six: two devices have another number each.
DEMO = "experiment=demo model.n_iterations=3 "
DEMO += " ".join(word for word in TINY.split() if not word.startswith(("data.im", "geometry")))
LONG = {name: f"{TINY} {model}" for name, model in {"qn_mixer": MODEL, **COMPETITORS}.items()}
TWO = MODEL.replace("n_iterations=4", "n_iterations=2")
SINOGRAMS = "data=sinograms data.root=scans data.unit=value monitor=val/residual"
NETWORKS = {
    "qn_mixer of the demo": DEMO,
    "learn of the demo": f"{DEMO} model=learn model.n_iterations=3 model.channels=16",
    "without truth": f"{TINY} {TWO} module=equivariant module.parts=2 {SINOGRAMS}",
    "without truth in stages": f"{TINY} {TWO} module._target_=tests.own.OfSinograms {SINOGRAMS}",
} | LONG
WHOLE = f"{SLICES} data.batch_size=4"
WINDOW = f"{SLICES} trainer.accumulate_grad_batches=4"  # of which it has two
DEVICES = "trainer.devices=2 data.batch_size=1"
WAYS = {
    "recompute": (1, f"{WHOLE} memory=recompute"),
    "accumulation": (1, f"{WINDOW} data.batch_size=2"),
    "ddp": (2, f"{WINDOW} strategy=ddp memory=offload {DEVICES}"),
    "fsdp": (2, f"{WINDOW} strategy=fsdp memory=recompute {DEVICES}"),
    "pipeline": (2, f"{WINDOW} strategy=pipeline {DEVICES}"),
}
REFUSED = {("fbpconvnet", "pipeline"), ("without truth", "pipeline")}
REFUSED |= {("without truth in stages", way) for way in WAYS if way != "pipeline"}  # they are not refused, but alike
CASES = [(name, way) for name in NETWORKS for way in WAYS if (name, way) not in REFUSED]


@pytest.fixture(scope="module")
def recorded(
    tmp_path_factory: pytest.TempPathFactory, warm: Warm, request: pytest.FixtureRequest
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """What every rank recorded, by network and way; "whole" is one process with all slices at once."""
    folder = tmp_path_factory.mktemp("float64")
    (folder / "scans").mkdir()
    projector = build_projector(parse(compose("train", TINY.split())))
    for number in range(6):
        x = torch.from_numpy(phantom(16, seed=0, part="val", index=number)).clamp(-1000, 2000) / 3000 + 1 / 3
        np.save(folder / "scans" / f"{number}.npy", projector(x[None, None].float())[0, 0].numpy())
    jobs: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    places = {}
    for name, way in [*((name, "whole") for name in NETWORKS), *CASES]:
        if name in LONG and "not long" in request.config.option.markexpr:
            continue
        count, overrides = WAYS.get(way, (1, WHOLE))
        place = places[name, way] = folder / f"{name} {way}"
        place.mkdir()
        words = f"{NETWORKS[name]} {overrides}".replace("=scans", f"={folder / 'scans'}").split()
        if SINOGRAMS.split()[0] in words:  # four of its six files are for training
            words = [word for word in words if not word.startswith(("data.n_t", "data.n_v"))]
        jobs[count].append({"config": parse(compose("train", words)).plain(), "folder": str(place), "exact": True})
    for n_processes, tasks in jobs.items():
        train(folder, n_processes, tasks, warm)
    return {case: [torch.load(file) for file in sorted(place.glob("rank_*.pt"))] for case, place in places.items()}


@pytest.mark.parametrize(
    ("name", "way"), [pytest.param(name, way, marks=[pytest.mark.long] * (name in LONG)) for name, way in CASES]
)
def test_every_tensor_has_the_gradient_of_one_process(
    recorded: dict[tuple[str, str], list[dict[str, Any]]], name: str, way: str
) -> None:
    (reference,) = recorded[name, "whole"]
    expected = reference["gradients"]
    largest_norm = max(float(gradient.norm()) for gradient in expected.values())
    assert largest_norm > 0
    assert len(recorded[name, way]) == WAYS[way][0]
    for record in recorded[name, way]:
        assert record["gradients"].keys() == expected.keys()
        for key, gradient in expected.items():
            assert gradient.dtype == torch.float64
            error = float((record["gradients"][key] - gradient).norm())
            assert error <= max(1e-9 * float(gradient.norm()), 1e-12 * largest_norm), key
