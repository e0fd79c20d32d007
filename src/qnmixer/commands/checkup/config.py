"""The config of `qnmixer.doctor`."""

from typing import ClassVar, Literal

from qnmixer.settings.run import WithRunConfig


class DoctorConfig(WithRunConfig):
    """The checked config of one checkup."""

    command: ClassVar[str] = "doctor"

    format: Literal["table", "json"]
