"""The config of `qnmixer.evaluate evaluation=task`."""

from typing import Annotated, Self

from annotated_types import Ge, Gt, Le, Len
from omegaconf import DictConfig
from pydantic import model_validator

from qnmixer.errors import ConfigError
from qnmixer.evaluation.evaluate_config import RunEvaluationConfig
from qnmixer.settings.sections import Length, Seed
from qnmixer.settings.validation import Section


class TaskConfig(Section):
    """An evaluation by task: phantoms with inserts at several doses."""

    photons: Annotated[list[Annotated[float, Gt(0), Le(1e15)]], Len(1)]
    n_images: Annotated[int, Ge(3)]
    insert_hu: Annotated[float, Ge(-1000), Le(2000)]
    insert_diameter: Length  # mm
    edge_hu: Annotated[list[Annotated[float, Ge(-1000), Le(2000)]], Len(1)]
    tv_weight: Annotated[float, Ge(1e-9), Le(1e9)]
    tv_noise_weight: Annotated[float, Ge(0), Le(1e9)]
    seed: Seed

    @model_validator(mode="after")
    def _visible(self) -> Self:
        if 0 in self.edge_hu:
            raise ValueError(f"edge_hu={self.edge_hu} has a disc without contrast: give for example [50,200,800]")
        if self.insert_hu == 0:
            raise ValueError("insert_hu=0 is no insert: give for example 20")
        return self


class EvaluateTaskConfig(RunEvaluationConfig):
    """The checked config of one evaluation by task."""

    evaluator = "qnmixer_studies.task.evaluate_task.evaluate_task"
    evaluation: TaskConfig

    @classmethod
    def parse(cls, cfg: DictConfig) -> Self:
        """As for every scoring. An evaluation by task has phantoms and noise of its own. Raises ConfigError."""
        config = super().parse(cfg)
        other_scan = any(value is not None for _, value in config.geometry)
        chosen_keys = {"symmetries": config.symmetries > 1, "geometry": other_scan}
        chosen_keys |= {key: getattr(config, key) != "auto" for key in ("passes", "start")}
        chosen_keys["mix"] = config.mix > 0
        if key := next((key for key, is_chosen in chosen_keys.items() if is_chosen), None):
            raise ConfigError(f"evaluation=task is of the network itself, on its own scan: leave out {key}=…")
        chosen = any(value is not None for _, value in config.data)
        if chosen or config.split != "test":
            raise ConfigError(f"evaluation=task draws its own phantoms: leave out {'data' if chosen else 'split'}=…")
        if config.noise is not None:
            raise ConfigError(
                f"evaluation=task draws photon counts: give doses, as evaluation.photons=[1e5], not {config.noise.name}"
            )
        return config
