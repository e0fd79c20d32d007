"""The config of `qnmixer.reconstruct`."""

from typing import Annotated, ClassVar, Literal, Self

from annotated_types import Gt, Lt
from pydantic import model_validator

from qnmixer.reconstruction.sections import CheckpointName, ScanOrAsTrained, Symmetries, WithCures, WithNoise
from qnmixer.settings.sections import Accelerator, Count, File, Length, Texts, check_window

OF_DATAMODULE = "predict_dataloader"
"""The input that means the slices of the run's own LightningDataModule. A file of this name needs a path: ./…"""


class ReconstructConfig(WithNoise, WithCures):
    """The config of `qnmixer.reconstruct`."""

    command: ClassVar[str] = "reconstruct"

    run: str
    input: File
    output: File
    kind: Literal["auto", "slices", "sinograms"]
    formats: list[Literal["dicom", "npy", "png"]]
    window: list[float] | None  # HU; None: chosen by the input
    unit: Literal["attenuation", "value"] | None  # None: that of the run's sinograms, or attenuation
    water_attenuation: Length | None  # 1/mm; None: that of the run's sinograms, or 0.0192
    detector_pitch: Length | None  # mm, of the scan; None: the run's
    angle_span: Length | None  # radians, of the scan; None: the run's
    slice_spacing: Length  # mm, of series without DICOM
    checkpoint: CheckpointName
    accelerator: Accelerator
    batch_size: Count | None  # None: chosen by the device
    geometry: ScanOrAsTrained
    symmetries: Symmetries
    uncertainty: File | None
    level: Annotated[float, Gt(0), Lt(1)]
    trust: Texts

    @model_validator(mode="after")
    def _useful(self) -> Self:
        if not self.formats:
            raise ValueError("formats=[] would write nothing: give some of dicom, npy, png")
        if self.uncertainty and self.symmetries == 1:
            raise ValueError("uncertainty= scales the deviation over symmetries: give symmetries=8")
        if self.window is not None:
            check_window(self.window)
        return self
