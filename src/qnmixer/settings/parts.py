"""The sections of a run with a target: what each target must be, and the keys that it does not get."""

import importlib
import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, BeforeValidator, Discriminator, Tag, model_validator

from qnmixer.errors import ConfigError, first_line
from qnmixer.settings.logged_names import LOSS, RESIDUAL, taken_names
from qnmixer.settings.options import TARGET, options
from qnmixer.settings.plugins import Kind, defaults_of, is_trusted, load_plugin, parameters_of, subclass_of
from qnmixer.settings.sections import WandbConfig
from qnmixer.settings.target import FUNCTION_OR_MODULE, Target
from qnmixer.settings.validation import validated

METRICS_FILE = "qnmixer.lightning.MetricsFile"  # the target of logger=csv. Every run has this logger
_WANDB = "qnmixer.lightning.WandbRun"
_MEAN_WEIGHTS = "qnmixer.lightning.EMA"
_CUSTOM = "custom"  # the name of a logger that the group itself describes
_UNROLLED = subclass_of("qnmixer.models.UnrolledNetwork")


class ModelConfig(Target):
    """A `qnmixer.models.UnrolledNetwork`, built with `(projector, **its keys)`. Its class knows all that follows.

    Or a plain torch module, built with its keys: FBP(y) → x, or y → x if it takes an argument `projector`.
    """

    group: ClassVar[str] = "model"
    kind: ClassVar[Kind] = Kind(
        "a subclass of qnmixer.models.UnrolledNetwork with start and step, nor of torch.nn.Module",
        subclass_of("torch.nn.Module").fits,
    )
    supplied: ClassVar[tuple[str, ...]] = ("variance", "projector")

    @model_validator(mode="before")
    @classmethod
    def _short_regularizer(cls, values: Any) -> Any:
        """`regularizer=my_file.Net` is short for a target that the network calls with two more arguments."""
        name = values.get("regularizer") if isinstance(values, Mapping) else None
        if isinstance(name, str) and "." in name:
            return {**values, "regularizer": {TARGET: name, "_partial_": True}}
        return values

    def load(self) -> Any:
        """Import the target. In qnmixer it must be an UnrolledNetwork: a file may name it without being trusted."""
        return load_plugin(self.key, self.target, _UNROLLED if is_trusted(self.target, ()) else self.kind)

    @property
    def has_steps(self) -> bool:
        """Whether it is an UnrolledNetwork. Imports it."""
        return _UNROLLED.fits(self.load())

    def positional(self, function: Any) -> int:
        """One, the projector, for an UnrolledNetwork."""
        return int(self.has_steps)

    @property
    def T(self) -> int:
        """Iterations of the network: the argument n_iterations. Without it, one; none without weights."""
        if not self.has_steps:
            return 1
        T = self.settings().get("n_iterations", int(self.has_weights))
        return int(validated(int, T, f"{self.group}.n_iterations"))  # a class of the user's may not declare its type

    @property
    def is_unrolled(self) -> bool:
        """Whether it has weights, and a T that can be chosen."""
        return self.has_steps and self.has_weights and "n_iterations" in self.settings()

    @property
    def has_weights(self) -> bool:
        """Whether it can be trained."""
        return bool(getattr(self.load(), "has_weights", True))

    @property
    def title(self) -> str:
        """Its name in tables and pictures."""
        return str(self.load().title) if self.has_steps else self.load().__name__

    def divisors(self) -> dict[str, int]:
        """Numbers that must divide the image size, by the key that sets each."""
        if not self.has_steps:
            return {}
        return self.load().divisors(self._all_arguments())

    def checked(self) -> Self:
        """Check the rules between its arguments too."""
        section = super().checked()
        if not section.has_steps:
            return section
        try:
            section.load().rules(section._all_arguments())
        except ConfigError as error:  # it names its arguments as a program does
            raise ConfigError(f"{self.group}: {error}") from error
        return section

    def _all_arguments(self) -> dict[str, Any]:
        """The arguments, and those that the classes have from which it derives."""
        bases = [base for base in reversed(self.load().__mro__) if "__init__" in vars(base)]
        parameters = [parameter for base in bases for parameter in parameters_of(base.__init__)]
        return defaults_of(parameters) | self.settings()


class LossConfig(Target):
    """A function `(image, truth, **arguments)` → [B], or a torch module built with `(**arguments)`."""

    group: ClassVar[str] = "loss"
    kind: ClassVar[Kind] = FUNCTION_OR_MODULE
    n_positional: ClassVar[int] = 2


class NoiseConfig(Target):
    """A `qnmixer.physics.KeyedNoise`, built with `(**arguments)`."""

    group: ClassVar[str] = "noise"
    kind: ClassVar[Kind] = subclass_of("qnmixer.physics.KeyedNoise", but=" with a method sample(p, rng)")
    supplied: ClassVar[tuple[str, ...]] = ("hu_max",)

    def checked(self) -> Self:
        """With the values of a profile's file: checkpoints have these, and so need no file."""
        if isinstance(path := self.keywords().get("profile"), str):
            return self.changed(profile=_profile_in(path)).checked()
        return super().checked()


class OptimizerConfig(Target):
    """A torch.optim.Optimizer, built with `(parameter groups, lr=…, **arguments)`.

    A key that a file of one's own leaves out has the default of the class, or else that of here.
    """

    group: ClassVar[str] = "optimizer"
    kind: ClassVar[Kind] = subclass_of("torch.optim.Optimizer")
    n_positional: ClassVar[int] = 1
    supplied: ClassVar[tuple[str, ...]] = ("lr",)

    lr: Annotated[float, Gt(0), Le(1e9)] = 1e-3
    weight_decay: Annotated[float, Ge(0)] = 0.0  # each parameter group has its own
    step_size_lr_factor: Annotated[float, Gt(0), Le(1e9)] = 10.0  # the scalars λ_t learn at this multiple of lr

    def checked(self) -> Self:
        """Let torch check the arguments of its own optimizers: their signatures have no bounds."""
        section = super().checked()
        of_class = defaults_of(parameters_of(section.load()))
        left_out = {"lr", "weight_decay"} - section.model_fields_set
        if given := {key: of_class[key] for key in left_out if of_class.get(key) is not None}:
            section = section.changed(**given)
        if section.target.startswith("torch."):
            weight = importlib.import_module("torch").zeros(1, requires_grad=True)
            section.build([{"params": [weight]}], lr=section.lr)
        return section


class ScheduleConfig(Target):
    """A function `(step, n_steps, **arguments)` → factor on the learning rate, after a warm-up."""

    group: ClassVar[str] = "schedule"
    kind: ClassVar[Kind] = Kind("a function (step, n_steps)", lambda f: callable(f) and not isinstance(f, type))
    n_positional: ClassVar[int] = 2
    supplied: ClassVar[tuple[str, ...]] = ("n_warmup",)

    warmup: Annotated[float, Ge(0), Le(1)] = 0.0  # share of all optimizer steps in which the rate rises to lr


class ModuleConfig(Target):
    """A `RunModule`, built with `(network, loss, optimizer, schedule, metrics, **arguments)`."""

    group: ClassVar[str] = "module"
    kind: ClassVar[Kind] = subclass_of("qnmixer.module.base.RunModule")


class DataModuleConfig(Target):
    """A `SliceDataModule`, built with the section `data` and `(**arguments)`, or any LightningDataModule.

    That is built with its arguments, and with keys of `data` that it takes.
    """

    group: ClassVar[str] = "datamodule"
    kind: ClassVar[Kind] = subclass_of("lightning.LightningDataModule")
    supplied: ClassVar[tuple[str, ...]] = ("batch_size", "num_workers", "image_size")

    @property
    def is_of_slices(self) -> bool:
        """Whether the target is a SliceDataModule. Imports it."""
        return subclass_of("qnmixer.data.SliceDataModule").fits(self.load())

    def positional(self, function: Any) -> int:
        """One, the section `data`, for a SliceDataModule."""
        return int(self.is_of_slices)


# Groups of several sections, by name


class MetricConfig(Target):
    """A function `(image, truth, **arguments)` → [B], or a class of torchmetrics, which gets the images one by one."""

    group: ClassVar[str] = "metrics"
    kind: ClassVar[Kind] = FUNCTION_OR_MODULE
    n_positional: ClassVar[int] = 2

    title: str | None = None  # the heading of its column; None: its name
    mode: Literal["max", "min"] = "max"  # the better value
    in_hu: bool = False  # it gets image and truth in HU. Else these are in [0, 1]


class CallbackConfig(Target):
    """A Lightning callback. Only those of the command line are built; those in a checkpoint are dropped."""

    group: ClassVar[str] = "callbacks"
    kind: ClassVar[Kind] = subclass_of("lightning.pytorch.callbacks.Callback")


class LoggerConfig(Target):
    """A Lightning logger. metrics.csv is always written too."""

    group: ClassVar[str] = "logger"
    kind: ClassVar[Kind] = subclass_of("lightning.pytorch.loggers.Logger")


def _named(group: str, sections: Any) -> Any:
    """The sections of a group by name, without those that are null. Raises ConfigError for what is no group."""
    if not isinstance(sections, Mapping):
        raise ConfigError(f"{group}={sections} is not a group of {group}: choose {group}=default")
    named = {str(name): section for name, section in sections.items() if section is not None}
    if group == "metrics":
        _check_names(named)
    return named


def _check_names(metrics: Collection[str]) -> None:
    """Raise ConfigError for the name of a metric that a run logs itself, or that no file can have."""
    taken = taken_names(metrics)
    for name in metrics:
        if name in taken:
            raise ConfigError(f"metrics.{name}: there is a column {name} already, give the metric another name")
        if not re.fullmatch(r"[\w-]+", name):
            raise ConfigError(f"metrics.{name}: a name has letters, digits, _ and -, give the metric such a name")


def _chosen_loggers(sections: Any) -> Any:
    """The loggers of the group by name. A `_target_` of the group itself, as in `logger=custom`, is one more logger.

    Settings of loggers that were not chosen are dropped, because conf/local may contain them.
    """
    if not isinstance(sections, Mapping):
        return _named("logger", sections or {})
    chosen = {name: part for name, part in sections.items() if isinstance(part, Mapping) and TARGET in part}
    left_out = [name for name in options("logger") if isinstance(sections.get(name), Mapping)]
    keys = {name: part for name, part in sections.items() if name not in (*chosen, *left_out)}
    return _named("logger", chosen | ({_CUSTOM: keys} if TARGET in sections else keys))


def _placed(group: str, sections: dict[str, Any]) -> dict[str, Any]:
    for name, section in sections.items():
        if isinstance(section, Target):
            section.at(group if name == _CUSTOM and group == "logger" else f"{group}.{name}")
    return sections


def _group(group: str, section: Any, named: Any = None) -> Any:
    """The type of a group of several sections."""
    return Annotated[
        dict[str, section], BeforeValidator(named or partial(_named, group)), AfterValidator(partial(_placed, group))
    ]


_Logger = Annotated[WandbConfig, Tag(_WANDB)] | Annotated[LoggerConfig, Tag("other")]
_KIND = Discriminator(lambda part: _WANDB if isinstance(part, Mapping) and part.get(TARGET) == _WANDB else "other")
Callbacks = _group("callbacks", CallbackConfig)
Metrics = _group("metrics", MetricConfig)
Loggers = _group("logger", Annotated[_Logger, _KIND], _chosen_loggers)


def averages_weights(callbacks: Mapping[str, CallbackConfig]) -> bool:
    """Whether a callback keeps a mean of the weights on the device, as callbacks=ema does."""
    return any(callback.target == _MEAN_WEIGHTS for callback in callbacks.values())


def modes_of(metrics: Mapping[str, MetricConfig]) -> dict[str, str]:
    """The better value, max or min, of all that `monitor` can name: val/NAME of each metric, of loss and residual."""
    of_metrics = {f"val/{name}": str(metric.mode) for name, metric in metrics.items()}
    return of_metrics | {f"val/{LOSS}": "min", f"val/{RESIDUAL}": "min"}


def mode_of(monitor: str, metrics: Mapping[str, MetricConfig]) -> str | None:
    """The better value, max or min, of val/METRIC, or of val/METRIC/LOADER of several loaders; None for another."""
    return modes_of(metrics).get("/".join(monitor.split("/")[:2]))


def check_monitor(monitor: str, metrics: Mapping[str, MetricConfig], datamodule: DataModuleConfig) -> None:
    """Raise ConfigError if no validation gives the monitored metric. Only a user's own may have several loaders."""
    modes = modes_of(metrics)
    if mode_of(monitor, metrics) is None or (monitor not in modes and datamodule.name == "default"):
        raise ConfigError(f"monitor={monitor} is not known: choose {', '.join(modes)}, or add a metric")


def _profile_in(path: str) -> list[float]:
    """The numbers of a .npy file [N], or of a text file with a number on each line. Raises ConfigError."""
    import numpy as np

    try:
        values = np.load(path) if path.endswith(".npy") else np.loadtxt(path)
        return [float(value) for value in values]
    except (OSError, ValueError, TypeError) as error:
        fix = "give a .npy [bins], or a text file with a number on each line"
        raise ConfigError(f"noise.profile={path} cannot be read ({first_line(error)}): {fix}") from error
