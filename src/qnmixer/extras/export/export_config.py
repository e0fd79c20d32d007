"""The config of `qnmixer.export`."""

from typing import ClassVar, Self

from pydantic import model_validator

from qnmixer.reconstruction.weights import SUFFIX
from qnmixer.settings.sections import Texts
from qnmixer.settings.validation import Section


class ExportConfig(Section):
    """The config of `qnmixer.export`."""

    command: ClassVar[str] = "export"

    run: str
    output: str
    trust: Texts

    @model_validator(mode="after")
    def _weights_file(self) -> Self:
        if not self.output.endswith(SUFFIX):
            raise ValueError(f"output={self.output} does not name a weights file: give a name that ends in {SUFFIX}")
        return self
