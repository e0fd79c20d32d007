"""Speed of A, Aᵀ and FBP on one core, side by side with ASTRA's CPU projector where that is installed.

    python tests/benchmarks/bench_operator.py [--json PATH]

64 views, 256 × 256, 512 detectors. Medians of calls in a row, in rounds that alternate between the operators, so that a
slow minute slows them alike; all numbers come from the one run. ASTRA (GPL-3, `pip install .[bench]`) is measured on
existing data, through `astra.algorithm.run`, without setup.
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # read when torch is loaded

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from qnmixer.files import write_text
from qnmixer.physics import FanBeamGeometry, FanBeamProjector

ROUNDS, CALLS = 9, 7
BATCHES = (1, 4)
GEOMETRY = FanBeamGeometry.paper(64)
Calls = dict[str, Callable[[], object]]


def our_calls(projector: FanBeamProjector) -> Calls:
    """A, Aᵀ and FBP for each batch size, by the name of their row."""
    calls: Calls = {}
    for batch in BATCHES:
        x = torch.rand(batch, 1, GEOMETRY.image_size, GEOMETRY.image_size)
        y = projector(x)
        calls[f"A × {batch}"] = partial(projector, x)
        calls[f"Aᵀ × {batch}"] = partial(projector.adjoint, y)
        calls[f"FBP × {batch}"] = partial(projector.fbp, y)
    return calls


def astra_calls() -> Calls:
    """ASTRA's forward and back-projection of one image with `line_fanflat`; none if it cannot be imported."""
    try:
        import astra  # type: ignore[import-not-found]  # an optional extra
    except ImportError as error:
        Console().print(
            f"ASTRA is absent ({error}): only our own times are shown. Install it by: pip install .\\[bench]"
        )
        return {}
    half = GEOMETRY.image_size * GEOMETRY.pixel_size / 2
    volume = astra.create_vol_geom(GEOMETRY.image_size, GEOMETRY.image_size, -half, half, -half, half)
    scan = astra.create_proj_geom(
        "fanflat",
        GEOMETRY.detector_pitch,
        GEOMETRY.n_detectors,
        GEOMETRY.angles(),
        GEOMETRY.source_to_axis,
        GEOMETRY.axis_to_detector,
    )
    projector = astra.create_projector("line_fanflat", scan, volume)
    image = torch.rand(GEOMETRY.image_size, GEOMETRY.image_size).numpy()
    image_id, sinogram_id = astra.data2d.create("-vol", volume, image), astra.data2d.create("-sino", scan)
    forward, backward = astra.astra_dict("FP"), astra.astra_dict("BP")
    forward.update(ProjectorId=projector, ProjectionDataId=sinogram_id, VolumeDataId=image_id)
    backward.update(ProjectorId=projector, ProjectionDataId=sinogram_id, ReconstructionDataId=image_id)
    forward_id, backward_id = astra.algorithm.create(forward), astra.algorithm.create(backward)
    return {
        "ASTRA A": lambda: astra.algorithm.run(forward_id),
        "ASTRA Aᵀ": lambda: astra.algorithm.run(backward_id),
    }


def median_times(calls: Calls) -> dict[str, float]:
    """Median seconds of each call over all rounds; the first of each round warms the caches and does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            call()
            for _ in range(CALLS):
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def report(seconds: dict[str, float]) -> list[dict[str, object]]:
    """One row per call of ours: milliseconds per call and per image, and how many times faster than ASTRA per image."""
    rows: list[dict[str, object]] = []
    for name in (name for name in seconds if not name.startswith("ASTRA")):
        operator, batch = name.split(" × ")
        per_image = seconds[name] / int(batch)
        reference = seconds.get(f"ASTRA {operator}")
        rows.append(
            {
                "operator": operator,
                "batch": int(batch),
                "ms": seconds[name] * 1e3,
                "ms_per_image": per_image * 1e3,
                "astra_ms_per_image": reference * 1e3 if reference else None,
                "times_faster_per_image": reference / per_image if reference else None,
            }
        )
    return rows


def show(rows: list[dict[str, object]], build_seconds: float) -> None:
    """Print the table."""
    table = Table(title=f"64 views, 256 × 256, 512 detectors, one core; matrices built in {build_seconds:.2f} s")
    for heading in ("operator", "batch", "ms", "ms per image", "ASTRA ms per image", "times faster"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else "–" if v is None else str(v) for v in row.values()))
    Console().print(table)


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    path = parser.parse_args().json
    torch.set_num_threads(1)
    start = time.perf_counter()
    projector = FanBeamProjector(GEOMETRY)
    build_seconds = time.perf_counter() - start
    rows = report(median_times(our_calls(projector) | astra_calls()))
    show(rows, build_seconds)
    if path:
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1}
        record = {"machine": machine, "build_s": build_seconds, "rows": rows}
        write_text(path, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
