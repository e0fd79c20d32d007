"""Schema of `geometry`: the scan."""

from dataclasses import dataclass

from qnmixer.engine.config.option import number, one_of


@dataclass(kw_only=True)
class GeometryConfig:
    """Fan or parallel beam in mm and radians. pixel_size is field_of_view / data.image_size.

    name, beam and detector_offset have defaults: a user's own file may leave them out.
    """

    name: str = ""  # for the reader of a config; nothing depends on it
    field_of_view: float = number(above=0)
    n_views: int = number(at_least=1, at_most=8192)
    n_detectors: int = number(at_least=1, at_most=8192)
    detector_pitch: float = number(above=0)
    source_to_axis: float = number(above=0)
    axis_to_detector: float
    first_angle: float | None  # None: half a step between views
    angle_span: float
    fbp_filter: str = one_of("ramp", "shepp-logan", "cosine", "hamming", "hann")
    beam: str = one_of("fan_flat", "fan_curved", "parallel", default="fan_flat")
    detector_offset: float = 0.0  # bins
