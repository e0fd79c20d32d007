"""The keys of commands that work with a trained network: its slices and its scan are those of its run, or others."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Le
from omegaconf import DictConfig
from pydantic import BeforeValidator, Discriminator, Field, Tag, create_model

from qnmixer.settings.data import Source
from qnmixer.settings.options import TARGET
from qnmixer.settings.parts import NoiseConfig
from qnmixer.settings.run import check_targets
from qnmixer.settings.sections import GeometryConfig
from qnmixer.settings.validation import Section

CheckpointName = Literal["best", "last"]
Symmetries = Literal[1, 2, 4, 8]


class WithCures(Section):
    """What a trained network gets on another scan than its own: see `qnmixer.reconstruction.cures`."""

    passes: Literal["auto"] | Annotated[int, Ge(1), Le(100)]
    start: Literal["auto", "fbp", "tv"]
    mix: Annotated[float, Ge(0), Le(1)]


class AsTrained(Section):
    """For an evaluation: the slices of the run itself. Keys that are not None here replace the run's."""

    target: None = Field(alias="_target_")
    root: str | None
    simulation_factor: Annotated[int, Ge(1), Le(16)] | None
    disc: bool | None


def _kind_of_slices(values: Any) -> str:
    return "as trained" if isinstance(values, Mapping) and values.get(TARGET, "") is None else "others"


SourceOrAsTrained = Annotated[
    Annotated[Source, Tag("others")] | Annotated[AsTrained, Tag("as trained")], Discriminator(_kind_of_slices)
]
"""Other slices, or those of the run."""


def _noise_of_run(section: Any) -> Any:
    return None if isinstance(section, Mapping) and section.get(TARGET, "") is None else section


class WithNoise(Section):
    """A command that adds noise to simulated sinograms: that of the training, or another."""

    noise: Annotated[NoiseConfig | None, BeforeValidator(_noise_of_run)]  # None: the noise of training

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """With the arguments of its targets checked. Raises ConfigError or PluginError."""
        config = super().parse(cfg)
        check_targets(config)
        if config.noise is not None:
            config.noise = config.noise.checked()
        return config


def _kind_of_scan(values: Any) -> str:
    return "changes" if isinstance(values, dict) and values.get("name", "") is None else "scan"


_CHANGES: dict[str, Any] = {
    key: (Annotated[field.annotation, key, *field.metadata] | None, ...)
    for key, field in GeometryConfig.model_fields.items()
}
GeometryChanges: Any = create_model("GeometryChanges", __base__=Section, **_CHANGES)
"""For a trained network: the scan of the run itself. Keys that are not None here replace the run's."""
ScanOrAsTrained = Annotated[
    Annotated[GeometryConfig, Tag("scan")] | Annotated[GeometryChanges, Tag("changes")], Discriminator(_kind_of_scan)
]
"""A scan, or changes of the run's."""


def scan_for(section: ScanOrAsTrained, trained: GeometryConfig) -> GeometryConfig:
    """The scan that a command with a trained network uses."""
    if isinstance(section, GeometryConfig):
        return section
    changes = {key: value for key, value in section.plain().items() if value is not None}
    return trained.changed(**changes) if changes else trained
