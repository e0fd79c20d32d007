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


def _is_of_run(section: Any, key: str = TARGET) -> bool:
    """Whether a section gives no value to the key that chooses it: it is that of the run, with changes."""
    return isinstance(section, Mapping) and section.get(key, "") is None


SourceOrAsTrained = Annotated[
    Annotated[Source, Tag("others")] | Annotated[AsTrained, Tag("as trained")],
    Discriminator(lambda section: "as trained" if _is_of_run(section) else "others"),
]
"""Other slices, or those of the run."""


class WithNoise(Section):
    """A command that adds noise to simulated sinograms: that of the training, or another."""

    noise: Annotated[  # None: the noise of training
        NoiseConfig | None, BeforeValidator(lambda section: None if _is_of_run(section) else section)
    ]

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """With the arguments of its targets checked. Raises ConfigError or PluginError."""
        config = super().parse(cfg)
        check_targets(config)
        if config.noise is not None:
            config.noise = config.noise.checked()
        return config


_CHANGES: dict[str, Any] = {
    key: (Annotated[field.annotation, key, *field.metadata] | None, ...)
    for key, field in GeometryConfig.model_fields.items()
}
GeometryChanges: Any = create_model("GeometryChanges", __base__=Section, **_CHANGES)
"""For a trained network: the scan of the run itself. Keys that are not None here replace the run's."""
ScanOrAsTrained = Annotated[
    Annotated[GeometryConfig, Tag("scan")] | Annotated[GeometryChanges, Tag("changes")],
    Discriminator(lambda section: "changes" if _is_of_run(section, "name") else "scan"),
]
"""A scan, or changes of the run's."""


def scan_for(section: ScanOrAsTrained, trained: GeometryConfig) -> GeometryConfig:
    """The scan that a command with a trained network uses."""
    if isinstance(section, GeometryConfig):
        return section
    changes = {key: value for key, value in section.plain().items() if value is not None}
    return trained.changed(**changes) if changes else trained
