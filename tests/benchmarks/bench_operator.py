"""Speed of A, Aᵀ and FBP on one core, beside ASTRA's CPU projector if it is installed.

    python tests/benchmarks/bench_operator.py [--json PATH] [--views 32 64 …] [--beams fan_flat …]

256 × 256, 512 detectors; parallel beams over π. Medians of calls in rounds that alternate between the operators, so
that a slow minute slows them alike; all numbers come from the one run. ASTRA (GPL-3, `pip install .[bench]`) is
measured on existing data, through `astra.algorithm.run`, without setup, one image at a time, as it takes them; its CPU
has no fan-beam FBP, and no curved detector. The floor of a row is the time in which its bytes, matrix, images and
sinograms once each, could be copied. "Bytes": how many times those of images and
sinograms alone they are, which a kernel that computes the weights itself would move. On a GPU, where arithmetic is free
beside memory, it is the best there is (A by rays; Aᵀ and FBP by pixels).
"""

import os

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # read when torch is loaded

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hardware import copy_bandwidth
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from qnmixer.files import write_text
from qnmixer.physics import FanBeamGeometry, FanBeamProjector
from qnmixer.physics.scan import ScanMatrix

VIEWS = (32, 64, 128, 256, 512)
PAPER = FanBeamGeometry.paper(32)
BEAMS = {
    "fan_flat": PAPER,
    "fan_curved": replace(PAPER, beam="fan_curved"),
    "parallel": replace(PAPER, beam="parallel", angle_span=math.pi, detector_pitch=PAPER.pitch_at_axis),
}
BATCHES = (1, 4, 16)
ROUNDS = 7
SECONDS = 0.04
"""What the calls of one operator take in a round, if more than one fits."""
TIMES_FASTER = {1: 10, 4: 25, 16: 25}
"""How many times faster than ASTRA an image is to be, by the batch; of A and Aᵀ."""
Calls = dict[str, Callable[[], object]]


def our_calls(projector: FanBeamProjector) -> Calls:
    """A, Aᵀ and FBP for each batch size, by the name of their row."""
    size = projector.geometry.image_size
    calls: Calls = {}
    for batch in BATCHES:
        x = torch.rand(batch, 1, size, size)
        y = projector(x)
        calls[f"A × {batch}"] = partial(projector, x)
        calls[f"Aᵀ × {batch}"] = partial(projector.adjoint, y)
        calls[f"FBP × {batch}"] = partial(projector.fbp, y)
    return calls


def astra_calls(geometry: FanBeamGeometry) -> Calls:
    """ASTRA's forward and back-projection of one image along lines; none if it is absent or has no such beam."""
    if geometry.beam == "fan_curved":
        return {}
    try:
        import astra  # type: ignore[import-not-found]  # an optional extra
    except ImportError:
        return {}
    half = geometry.image_size * geometry.pixel_size / 2
    volume = astra.create_vol_geom(geometry.image_size, geometry.image_size, -half, half, -half, half)
    bins = geometry.detector_pitch, geometry.n_detectors, geometry.angles()
    if geometry.is_fan:
        distances = geometry.source_to_axis, geometry.axis_to_detector
        projector = astra.create_projector(
            "line_fanflat", scan := astra.create_proj_geom("fanflat", *bins, *distances), volume
        )
    else:
        projector = astra.create_projector("line", scan := astra.create_proj_geom("parallel", *bins), volume)
    image = torch.rand(geometry.image_size, geometry.image_size).numpy()
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
    """Median seconds of each call over all rounds; in each, the first call warms the caches and does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            begin = time.perf_counter()
            if begin - start > 5 * SECONDS:  # so slow that no cache matters
                times[name].append(begin - start)
                continue
            while time.perf_counter() - begin < SECONDS:
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def bytes_moved(projector: FanBeamProjector, operator: str, batch: int) -> int:
    """Of the matrix the values and their indices, and images and sinograms, each once."""
    matrix: ScanMatrix = projector._backprojection if operator == "FBP" else projector._rays
    values, indices = (matrix.values, matrix.pixels) if operator == "A" else (matrix.values_t, matrix.rays)
    return values.nbytes + indices.nbytes + without_matrix(projector, batch)


def without_matrix(projector: FanBeamProjector, batch: int) -> int:
    """Bytes of images and sinograms alone, each once, in float32."""
    geometry = projector.geometry
    return 4 * batch * (geometry.image_size**2 + geometry.n_views * geometry.n_detectors)


def values_of(projector: FanBeamProjector, operator: str) -> int:
    """Values of the stored matrix of an operator."""
    return (projector._backprojection if operator == "FBP" else projector._rays).values.numel()


def measure(n_views: int, beams: Sequence[str], bandwidth: float) -> list[dict[str, Any]]:
    """One row for each beam, operator and batch: times, ASTRA's, and those of the floor; per image."""
    geometries = {beam: replace(BEAMS[beam], n_views=n_views) for beam in beams}
    projectors = {beam: FanBeamProjector(geometry) for beam, geometry in geometries.items()}
    calls = {beam: our_calls(projectors[beam]) | astra_calls(geometry) for beam, geometry in geometries.items()}
    times = median_times({f"{beam} {name}": call for beam in beams for name, call in calls[beam].items()})
    rows: list[dict[str, Any]] = []
    for beam, name in ((b, name) for b in beams for name in calls[b] if not name.startswith("ASTRA")):
        operator, batch = name.split(" × ")[0], int(name.split(" × ")[1])
        per_image = times[f"{beam} {name}"] / batch
        floor = bytes_moved(projectors[beam], operator, batch) / bandwidth / batch
        astra = times.get(f"{beam} ASTRA {operator}")
        flat = times.get(f"fan_flat {name}")
        per_value = (
            values_of(projectors[beam], operator) / values_of(projectors["fan_flat"], operator) if flat else None
        )
        rows.append(
            {
                "views": n_views,
                "beam": beam,
                "operator": operator,
                "batch": batch,
                "ms_per_image": per_image * 1e3,
                "astra_ms_per_image": astra * 1e3 if astra else None,
                "times_faster": astra / per_image if astra else None,
                "goal": TIMES_FASTER[batch] if astra else None,
                "holds": astra / per_image >= TIMES_FASTER[batch] if astra else None,
                "floor_ms_per_image": floor * 1e3,
                "times_floor": per_image / floor,
                "times_flat_per_value": per_image * batch / flat / per_value if flat and per_value else None,
                "times_bytes": floor * bandwidth * batch / without_matrix(projectors[beam], batch),
            }
        )
    return rows


COLUMNS = {
    "V": "views", "beam": "beam", "": "operator", "B": "batch", "ms": "ms_per_image",
    "ASTRA": "astra_ms_per_image", "faster": "times_faster", "floor": "floor_ms_per_image", "over it": "times_floor",
    "of flat": "times_flat_per_value", "bytes": "times_bytes",
}  # fmt: skip
"""What is printed of a row, under which heading."""


def show(rows: Iterable[dict[str, Any]], bandwidth: float) -> None:
    """Print the table."""
    title = f"256 × 256, 512 detectors, one core; ms per image; a copy moves {bandwidth / 1e9:.1f} GB/s"
    table = Table(title=title, box=SIMPLE, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in COLUMNS:
        table.add_column(heading, justify="right", min_width=10 if heading == "beam" else None)
    for row in rows:
        table.add_row(*(_text(row[key]) for key in COLUMNS.values()))
    Console().print(table)


def _text(value: object) -> str:
    return "–" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    parser.add_argument("--views", type=int, nargs="+", default=VIEWS, help="numbers of views to measure")
    parser.add_argument("--beams", nargs="+", default=list(BEAMS), choices=list(BEAMS), help="beams to measure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bandwidth = copy_bandwidth(torch.device("cpu"))
    rows = [row for n_views in arguments.views for row in measure(n_views, arguments.beams, bandwidth)]
    show(rows, bandwidth)
    missed = [
        f"{row['beam']} {row['operator']} × {row['batch']} at {row['views']} views"
        for row in rows
        if row["holds"] is False
    ]
    if all(row["holds"] is None for row in rows):
        Console().print("ASTRA is absent: only our own times are shown. Install it by: pip install .\\[bench]")
    else:
        Console().print(f"goals missed: {', '.join(missed)}" if missed else "all goals are met")
    if arguments.json:
        machine = {"processor": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1}
        record = {"machine": machine, "copy_bytes_per_second": bandwidth, "rows": rows}
        write_text(arguments.json, json.dumps(record, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
