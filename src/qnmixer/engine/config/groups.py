"""The groups model, loss, noise, optimizer and schedule. Their keys are the arguments of the target.

The signature of the target has the types, bounds and defaults of these keys. No other list of them exists. To read a
signature is to import the target. So this is done for the user's own command line, and for a file only after its
targets are trusted.
"""

import importlib
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

from qnmixer.engine.config.keys import unknown_key
from qnmixer.engine.config.option import number
from qnmixer.engine.config.section import as_text
from qnmixer.engine.config.target import TARGET, Target, keys_of_options, option_of
from qnmixer.engine.plugins import (
    Kind,
    check_names,
    converted,
    is_trusted,
    load_plugin,
    parameters_of,
    subclass_of,
    taken,
)
from qnmixer.errors import ConfigError, PluginError, first_line

_WORDS = ("_partial_", "_recursive_", "_convert_")
"""Hydra's words. The target is always called by qnmixer, with the missing arguments: `_partial_` changes nothing."""


@dataclass(kw_only=True)
class Group(Target):
    """A section whose keys are the arguments of its target.

    `section.KEY` is the value of an argument that the config gives.

    Attributes:
        kind: what the target must be.
        n_ours: its positional arguments, which qnmixer gives.
        ours: its arguments that qnmixer gives by name.
        offered: its arguments that qnmixer gives by name if it has them, and the config does not give them.
    """

    kind: ClassVar[Kind]
    n_ours: ClassVar[int] = 0
    ours: ClassVar[tuple[str, ...]] = ()
    offered: ClassVar[tuple[str, ...]] = ()

    def __getattr__(self, name: str) -> Any:
        """The value of an argument."""
        arguments = self.__dict__.get("arguments", {})
        if name not in arguments:
            raise AttributeError(f"{self.group} has no {name}")
        return arguments[name]

    def changed(self, **arguments: Any) -> Self:
        """The same section with other values of some arguments."""
        return replace(self, arguments=self.arguments | arguments)

    def keywords(self) -> dict[str, Any]:
        """The arguments, without Hydra's words."""
        return {key: value for key, value in self.arguments.items() if key not in _WORDS}

    def targets(self) -> dict[str, str]:
        """All classes and functions that it names, by key, also inside values."""
        inner = {f"{key}.{TARGET}": str(part[TARGET]) for key, part in _parts(self.group, self.arguments)}
        return {f"{self.group}.{TARGET}": self._target_} | inner

    def load(self) -> Any:
        """Import the target. Raises PluginError if this fails, or if it is of another kind."""
        return load_plugin(f"{self.group}.{TARGET}", self._target_, self.kind)

    def settings(self) -> dict[str, Any]:
        """The arguments that the config may give, given or default. Imports the target."""
        given = self.keywords()
        own = [it for it in parameters_of(self.load()) or () if it.name not in (*self.ours, *self.offered)]
        return {it.name: _plain(it.default) for it in own if it.default is not it.empty} | given

    def checked(self) -> Self:
        """The same section, with arguments of the declared types. Imports the target.

        Raises PluginError or ConfigError, which names the key and how to fix it.
        """
        function, given = self.load(), self.keywords()
        parameters = parameters_of(function)
        known = {it.name for it in parameters or ()}
        takes_all = parameters is None or any(it.kind is it.VAR_KEYWORD for it in parameters)
        for name in given:
            if name.startswith("_"):
                raise ConfigError(f"{self.group}.{name} is not known: give {TARGET} and arguments of the target")
            if name not in known and not takes_all and (name == "name" or name in self._keys_of_others()):
                raise unknown_key(f"{self.group}.{name}", [])
        self._check_names(function, given)
        simple = {key: value for key, value in given.items() if not [*_parts(key, value)]}
        for key, part in _parts(self.group, given):
            words = {TARGET, "_args_", *_WORDS}
            its = load_plugin(f"{key}.{TARGET}", str(part[TARGET]), _kind_of_part(str(part[TARGET])))
            missing = bool(part.get("_partial_") or part.get("_args_"))
            check_names(f"{key}.{TARGET}", str(part[TARGET]), its, part.keys() - words, partial=missing)
        typed = {key: _plain(value) for key, value in converted(self.group, function, simple).items()}
        return self.changed(**typed)

    def build(self, *args: Any, offered: Mapping[str, Any] | None = None, **ours: Any) -> Any:
        """Call the target with these arguments and those of the config. Raises PluginError if it does not take them."""
        return self.bound(offered=offered, **ours)(*args)

    def bound(self, offered: Mapping[str, Any] | None = None, **ours: Any) -> Any:
        """The target with all but its positional arguments."""
        function, given = self.load(), self.keywords()
        ours |= taken(function, {name: value for name, value in (offered or {}).items() if name not in given})
        self._check_names(function, given, ours)
        built = {key: self._built(f"{self.group}.{key}", value) for key, value in given.items()}
        return partial(function, **ours, **converted(self.group, function, built))

    def _check_names(self, function: Any, given: Mapping[str, Any], ours: Collection[str] = ()) -> None:
        offered = [name for name in self.offered if name not in given]
        names = [*self.ours, *ours, *offered]
        check_names(f"{self.group}.{TARGET}", self._target_, function, given, self.n_ours, names)

    def _keys_of_others(self) -> set[str]:
        """Keys of the other options of the group."""
        mine = option_of(self.group, self._target_)
        return {key for option, keys in keys_of_options(self.group).items() if option != mine for key in keys}

    def _built(self, key: str, value: Any) -> Any:
        """The value of an argument, with the targets inside it built as by Hydra."""
        parts = [*_parts(key, value)] if self.arguments.get("_recursive_", True) else []
        if not parts:
            return value
        from hydra.errors import InstantiationException
        from hydra.utils import instantiate

        for name, part in parts:  # Hydra would also find a.b.c where a only imports b
            load_plugin(f"{name}.{TARGET}", str(part[TARGET]), _kind_of_part(str(part[TARGET])))
        try:
            return instantiate(as_text(value), _convert_="all")
        except InstantiationException as error:
            raise PluginError(f"{key} cannot be built: {first_line(error.__cause__ or error)}") from error


def _parts(key: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sections with a target inside a value, at any depth, by key."""
    if isinstance(value, Mapping):
        if TARGET in value:
            yield key, value
        for name, item in value.items():
            yield from _parts(f"{key}.{name}", item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _parts(f"{key}.{i}", item)


def _kind_of_part(target: str) -> Kind:
    """A file may name anything in qnmixer without being trusted. So parts from there are layers, and no functions."""
    return subclass_of("torch.nn.Module") if is_trusted(target, ()) else Kind("a class or function", callable)


def _plain(value: Any) -> Any:
    """The value in the form that a checkpoint stores."""
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


@dataclass(kw_only=True)
class ModelConfig(Group):
    """A `qnmixer.models.UnrolledNetwork`, built with `(projector, **its keys)`. Its class knows all that follows."""

    group: ClassVar[str] = "model"
    kind: ClassVar[Kind] = subclass_of("qnmixer.models.UnrolledNetwork")
    n_ours: ClassVar[int] = 1
    offered: ClassVar[tuple[str, ...]] = ("variance",)

    def __post_init__(self) -> None:
        """`regularizer=my_file.Net` is short for a target that the network calls with two more arguments."""
        name = self.arguments.get("regularizer")
        if isinstance(name, str) and "." in name:
            self.arguments = self.arguments | {"regularizer": {TARGET: name, "_partial_": True}}

    @property
    def T(self) -> int:
        """Iterations of the network: the argument n_iterations. Without it, one; none without weights."""
        return int(self.settings().get("n_iterations", int(self.has_weights)))

    @property
    def is_unrolled(self) -> bool:
        """Whether it has weights, and a T that can be chosen."""
        return self.has_weights and "n_iterations" in self.settings()

    @property
    def has_weights(self) -> bool:
        """Whether it can be trained."""
        return bool(self.load().has_weights)

    @property
    def width(self) -> int:
        """Its argument channels; 0 without it."""
        return int(self.settings().get("channels", 0))

    @property
    def period(self) -> int:
        """Iterations after which its memory has grown by the same amount again."""
        return int(self.load().period)

    def divisors(self) -> dict[str, int]:
        """Numbers that must divide the image size, by the key that sets each."""
        found: dict[str, int] = self.load().divisors(self._all())
        return found

    def checked(self) -> Self:
        """Check the rules between its arguments too."""
        section = super().checked()
        try:
            section.load().rules(section._all())
        except ConfigError as error:  # it names its arguments; on the command line the group comes first
            raise ConfigError(with_group(self.group, str(error), section._all())) from error
        return section

    def _all(self) -> dict[str, Any]:
        """The arguments, and those that the classes have from which it derives."""
        bases = [it for it in reversed(self.load().__mro__) if "__init__" in vars(it)]
        inits = [it for base in bases for it in parameters_of(base.__init__) or ()]
        return {it.name: it.default for it in inits if it.default is not inspect.Parameter.empty} | self.settings()


@dataclass(kw_only=True)
class LossConfig(Group):
    """A function `(image, truth, **arguments)` → [B], or a torch module built with `(**arguments)`."""

    group: ClassVar[str] = "loss"
    kind: ClassVar[Kind] = Kind(
        "a function (image, truth), nor a subclass of torch.nn.Module",
        lambda it: subclass_of("torch.nn.Module").fits(it) if isinstance(it, type) else callable(it),
    )

    @property
    def is_class(self) -> bool:
        """Whether it is a torch module."""
        return isinstance(self.load(), type)

    def _check_names(self, function: Any, given: Mapping[str, Any], ours: Collection[str] = ()) -> None:
        n_ours = 0 if isinstance(function, type) else 2
        check_names(f"{self.group}.{TARGET}", self._target_, function, given, n_ours)


@dataclass(kw_only=True)
class NoiseConfig(Group):
    """A `qnmixer.physics.KeyedNoise`, built with `(**arguments)`."""

    group: ClassVar[str] = "noise"
    kind: ClassVar[Kind] = subclass_of("qnmixer.physics.KeyedNoise", but=" with a method sample(p, rng)")
    offered: ClassVar[tuple[str, ...]] = ("hu_max",)


@dataclass(kw_only=True)
class OptimizerConfig(Group):
    """A torch.optim.Optimizer, built with `(parameter groups, lr=…, **arguments)`.

    Attributes:
        lr: learning rate of the weights.
        weight_decay: of the weights; each parameter group has its own.
        step_size_lr_factor: the learning rate of the scalars λ_t is that of the weights times this factor.
    """

    group: ClassVar[str] = "optimizer"
    kind: ClassVar[Kind] = subclass_of("torch.optim.Optimizer")
    n_ours: ClassVar[int] = 1
    ours: ClassVar[tuple[str, ...]] = ("lr",)

    lr: float = number(above=0)
    weight_decay: float = number(at_least=0)
    step_size_lr_factor: float = number(above=0)

    def checked(self) -> Self:
        """Let torch check the arguments of its own optimizers: their signatures have no bounds."""
        section = super().checked()
        if section._target_.startswith("torch."):
            weight = importlib.import_module("torch").zeros(1, requires_grad=True)
            try:
                section.build([{"params": [weight]}], lr=section.lr)
            except (TypeError, ValueError) as error:
                line, given = first_line(error), section.keywords()
                name = next((it for it in given if it.rstrip("s") in line), TARGET)
                raise ConfigError(f"optimizer.{name}={given.get(name, section._target_)}: {line}") from error
        return section


@dataclass(kw_only=True)
class ScheduleConfig(Group):
    """A function `(step, n_steps, **arguments)` → factor on the learning rate, after a warm-up.

    Attributes:
        warmup: share of all optimizer steps in which the rate rises to lr.
    """

    group: ClassVar[str] = "schedule"
    kind: ClassVar[Kind] = Kind("a function (step, n_steps)", lambda it: callable(it) and not isinstance(it, type))
    n_ours: ClassVar[int] = 2
    offered: ClassVar[tuple[str, ...]] = ("n_warmup",)

    warmup: float = number(at_least=0, at_most=1)


def with_group(group: str, message: str, arguments: Collection[str]) -> str:
    """A message that names arguments, with the keys of the command line. One word counts only with its value."""
    long = "|".join(name for name in arguments if "_" in name) or "(?!)"
    return re.sub(rf"(?<![\w.])(({'|'.join(arguments) or '(?!)'})(?==)|({long})\b)", rf"{group}.\g<0>", message)
