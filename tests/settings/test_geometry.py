"""The scanners in conf/geometry: the fan that their numbers give, and sparse views."""

import math
from pathlib import Path

import numpy as np
import pytest

from qnmixer.measurement.build import build_geometry
from qnmixer.settings.options import CONF

from ..conftest import config_of


@pytest.mark.parametrize(("name", "fan", "field_of_view", "sparse"), [
    ("siemens_definition_as", 49.9, 502, 64), ("siemens_force", 49.9, 502, 56), ("siemens_sensation_64", 52.1, 501, 40),
    ("ge_lightspeed", 54.9, 499, 24),
])  # fmt: skip
def test_a_scanner_by_name(name: str, fan: float, field_of_view: float, sparse: int) -> None:
    whole = build_geometry(config_of(f"geometry={name}"))
    width = whole.n_detectors * whole.detector_pitch / whole.source_to_detector
    assert math.degrees(width) == pytest.approx(fan, abs=0.1)
    assert 2 * whole.source_to_axis * math.sin(width / 2) == pytest.approx(field_of_view, abs=1)
    assert abs(whole.detector_offset) % 0.5 == 0.25
    few = build_geometry(config_of(f"geometry={name}", f"geometry.n_views={sparse}"))
    np.testing.assert_allclose(few.angles(), whole.angles()[:: whole.n_views // sparse])
    assert few.has_quarter_turn_symmetry


def test_a_scanner_in_a_file_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "geometry").mkdir()
    ours = (CONF / "geometry" / "paper.yaml").read_text().replace("name: fan_beam\n", "")
    (tmp_path / "geometry" / "mine.yaml").write_text(ours.replace("n_detectors: 512", "n_detectors: 300"))
    assert config_of(f"hydra.searchpath=[file://{tmp_path}]", "geometry=mine").geometry.n_detectors == 300


def test_the_short_scan_of_the_file_is_long_enough() -> None:
    short = build_geometry(config_of("geometry=ge_lightspeed", "geometry.n_views=642", "geometry.angle_span=4.0994"))
    whole = build_geometry(config_of("geometry=ge_lightspeed"))
    assert short.angle_step == pytest.approx(whole.angle_step, rel=1e-3)
    assert short.angle_span >= math.pi + 2 * math.asin(200 / short.source_to_axis)


def test_the_scans_of_public_sets() -> None:
    lodopab = build_geometry(config_of("geometry=lodopab", "data.image_size=362", "model=fbp"))
    assert lodopab.beam == "parallel"
    np.testing.assert_allclose(lodopab.angles(), (np.arange(1000) + 0.5) * math.pi / 1000 - math.pi / 2)
    assert lodopab.n_detectors * lodopab.detector_pitch == pytest.approx(260 * math.sqrt(2), abs=0.01)
    two_detect = build_geometry(config_of("geometry=two_detect", "data.image_size=512"))
    assert two_detect.n_detectors * two_detect.pitch_at_axis == pytest.approx(512 * two_detect.pixel_size, abs=0.01)
