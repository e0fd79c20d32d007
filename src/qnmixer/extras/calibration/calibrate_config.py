"""The config of `qnmixer.calibrate`."""

from typing import Annotated, ClassVar, Literal, Self

from annotated_types import Ge, Le, Len
from pydantic import model_validator

from qnmixer.settings.sections import File, GeometryConfig, Length, Seed
from qnmixer.settings.validation import Section


class CalibrateConfig(Section):
    """The config of `qnmixer.calibrate`."""

    command: ClassVar[str] = "calibrate"

    input: File
    output: File
    unit: Literal["attenuation", "counts"]
    air: File | None  # None: the input is of air, or in attenuation
    electronic_sigma: Annotated[float, Ge(0)] | None  # counts; None: fitted
    region: Annotated[list[float], Len(3, 3)] | None  # x, y, radius in mm
    n_slices: Annotated[int, Ge(1), Le(64)]
    water_attenuation: Length  # 1/mm
    seed: Seed
    geometry: GeometryConfig

    @property
    def of_scans(self) -> bool:
        """Whether the input is of scans. Else it is of slices."""
        return self.input.lower().endswith(".npy")

    @model_validator(mode="after")
    def _of_one_kind(self) -> Self:
        if self.air is not None and self.unit != "counts":
            raise ValueError(f"air={self.air} divides counts: give unit=counts too, or leave air= out")
        if not self.of_scans and self.unit == "counts":
            raise ValueError("unit=counts is for scans in .npy, and slices are in HU: leave it out")
        if self.of_scans == (self.region is not None):
            way = "leave it out" if self.of_scans else "give a uniform disc in mm from the centre, region=[x,y,radius]"
            raise ValueError(f"region is for a series of slices: {way}")
        return self
