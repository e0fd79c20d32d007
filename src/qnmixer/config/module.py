"""The sections `module` and `datamodule`: the LightningModule and the LightningDataModule of a run."""

from dataclasses import dataclass
from typing import ClassVar, Self

from qnmixer.config.groups import Group
from qnmixer.plugins import Kind, subclass_of


@dataclass(kw_only=True)
class OfLightning(Group):
    """A section whose target is checked when it is built, because it loads Lightning."""

    def checked(self) -> Self:
        """The section itself."""
        return self


@dataclass(kw_only=True)
class ModuleConfig(OfLightning):
    """A `qnmixer.run_module.RunModule`, built with `(network, loss, optimizer, schedule, metrics, **arguments)`."""

    group: ClassVar[str] = "module"
    kind: ClassVar[Kind] = subclass_of("qnmixer.run_module.RunModule")


@dataclass(kw_only=True)
class DataModuleConfig(OfLightning):
    """A `qnmixer.data.datamodule.SliceDataModule`, built with the section `data` and `(**arguments)`."""

    group: ClassVar[str] = "datamodule"
    kind: ClassVar[Kind] = subclass_of("qnmixer.data.datamodule.SliceDataModule")
    n_ours: ClassVar[int] = 1


OURS = {
    "module": {"_target_": "qnmixer.module.ReconstructionModule"},
    "datamodule": {"_target_": "qnmixer.data.datamodule.SliceDataModule"},
}
"""Those of a file without these sections, such as a weights file."""
