"""Sections that name a class or function, `_target_`, with its arguments as keys beside it.

The signature of the target has the types, bounds and defaults of these keys. No other list of them exists. To read a
signature is to import the target. So this is done for the user's own command line, and for a file only after its
targets are trusted. A target that loads Lightning is read when it is built.
"""

import importlib
import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from annotated_types import Ge, Gt, Le

from qnmixer.engine.config.options import (
    TARGET,
    as_text,
    check_names,
    converted,
    converted_arguments,
    has_no_value,
    option_of,
    unknown_key,
)
from qnmixer.engine.plugins import Kind, is_trusted, load_plugin, parameters_of, subclass_of, taken
from qnmixer.errors import ConfigError, PluginError, first_line

if TYPE_CHECKING:
    from qnmixer.engine.config.run import Config

_WORDS = ("_partial_", "_recursive_", "_convert_")
"""Hydra's words. The target is always called by qnmixer, with the missing arguments: `_partial_` changes nothing."""
FUNCTION_OR_MODULE = Kind(
    "a function (image, truth), nor a subclass of torch.nn.Module, such as a metric of torchmetrics",
    lambda it: subclass_of("torch.nn.Module").fits(it) if isinstance(it, type) else callable(it),
)


def parse_section(section: str, schema: type, value: Any, **parsed: Any) -> Any:
    """Convert a section to its dataclass, with types and bounds checked. Raises ConfigError.

    Keys that are not in the schema become arguments of its target, or its `extra`. Text with ${…} stays text.

    Args:
        section: its place in the config, such as model or metrics.psnr; "" for root keys.
        schema: its dataclass.
        value: its values by key.
        parsed: values of the dataclass that are parsed already.
    """
    if not isinstance(value, Mapping):
        raise ConfigError(f"{section}={value} is not a group of keys: choose one of its options by name")
    prefix = f"{section}." if section else ""
    declared = {f.name: f for f in fields(schema) if f.name not in ("arguments", "section")}
    rest = {str(name): it for name, it in value.items() if name not in declared}
    if issubclass(schema, Group):
        parsed |= {"arguments": rest, "section": section}
    elif "extra" in declared:
        parsed["extra"] = converted(f"{prefix}extra", value.get("extra") or {}, dict[str, Any]) | rest
    elif rest:
        raise unknown_key(f"{prefix}{next(iter(rest))}", [f"{prefix}{name}" for name in declared])
    own = {name: value[name] for name in declared if name in value and name not in parsed}
    given = parsed | converted_arguments(prefix, schema, own)
    for name, its in declared.items():
        if name not in given and its.default is its.default_factory is MISSING:
            raise has_no_value(f"{prefix}{name}")
    return schema(**given)


@dataclass(kw_only=True)
class Group:
    """A section whose keys are the arguments of its target.

    `section.KEY` is the value of an argument that the config gives.

    Attributes:
        group: its folder in conf/.
        kind: what the target must be.
        n_ours: its positional arguments, which qnmixer gives. A module that may be a function too gets none.
        ours: its arguments that qnmixer gives by name.
        offered: its arguments that qnmixer gives by name if it has them, and the config does not give them.
        late: whether the target is checked when it is built, because it loads Lightning or another large library.
        arguments: keys of the section that are not in its schema. They become keyword arguments of the target.
        section: its place in the config, such as model or metrics.psnr.
    """

    group: ClassVar[str]
    kind: ClassVar[Kind]
    n_ours: ClassVar[int] = 0
    ours: ClassVar[tuple[str, ...]] = ()
    offered: ClassVar[tuple[str, ...]] = ()
    late: ClassVar[bool] = False

    _target_: str
    arguments: dict[str, Any] = field(default_factory=dict)
    section: str = field(default="", compare=False, repr=False)

    @classmethod
    def schema_of(cls, value: Any) -> type["Group"]:
        """The schema of a section of this group. Raises ConfigError for a section without a target."""
        if isinstance(value, Mapping) and not isinstance(value.get(TARGET), str):
            raise ConfigError(f"{cls.group} has no {TARGET} (as_trained is for evaluate only): choose another option")
        return cls

    def __post_init__(self) -> None:
        self.section = self.section or self.group
        if odd := next((it for it in self.arguments if it.startswith("_") and it not in _WORDS), None):
            raise ConfigError(f"{self.section}.{odd} is not known: give {TARGET} and arguments of the target")

    def __getattr__(self, name: str) -> Any:
        """The value of an argument."""
        arguments = self.__dict__.get("arguments", {})
        if name not in arguments:
            raise AttributeError(f"{self.group} has no {name}")
        return arguments[name]

    @property
    def name(self) -> str:
        """The option that chooses it, as in `GROUP=NAME`; the target itself if conf/ has no such option."""
        return option_of(self.group, self._target_)

    @property
    def key(self) -> str:
        """The key of its target."""
        return f"{self.section}.{TARGET}"

    @property
    def said(self) -> str:
        """Its target as on the command line, for messages."""
        return f"{self.key}={self._target_}"

    def choice(self) -> list[str]:
        """The overrides that choose this target."""
        if self.name != self._target_:
            return [f"{self.group}={self.name}"]
        return [f"{self.group}=custom", f"{self.group}.{TARGET}={self._target_}"]

    def changed(self, **arguments: Any) -> Self:
        """The same section with other values of some arguments."""
        return replace(self, arguments=self.arguments | arguments)

    def keywords(self) -> dict[str, Any]:
        """The arguments, without Hydra's words."""
        return {key: value for key, value in self.arguments.items() if key not in _WORDS}

    def targets(self) -> dict[str, str]:
        """All classes and functions that it names, by key, also inside values."""
        inner = {f"{key}.{TARGET}": str(part[TARGET]) for key, part in _parts(self.section, self.arguments)}
        return {self.key: self._target_} | inner

    def load(self) -> Any:
        """Import the target. Raises PluginError if this fails, or if it is of another kind."""
        return load_plugin(self.key, self._target_, self.kind)

    @property
    def is_class(self) -> bool:
        """Whether the target is a class. Imports it."""
        return isinstance(self.load(), type)

    def settings(self) -> dict[str, Any]:
        """The arguments that the config may give, given or default. Imports the target."""
        given = self.keywords()
        own = [it for it in parameters_of(self.load()) or () if it.name not in (*self.ours, *self.offered)]
        return {it.name: _plain(it.default) for it in own if it.default is not it.empty} | given

    def check(self, run: "Config") -> None:
        """Check the rules with other sections. Raises ConfigError."""

    def checked(self) -> Self:
        """The same section, with arguments of the declared types. Imports the target.

        Raises PluginError or ConfigError, which names the key and how to fix it.
        """
        if self.late:
            return self
        function, given = self.load(), self.keywords()
        self._check_names(function, given)
        simple = {key: value for key, value in given.items() if not [*_parts(key, value)]}
        for key, part in _parts(self.section, given):  # Hydra checks their arguments when it builds them
            _load_part(key, part)
        typed = converted_arguments(f"{self.section}.", function, simple)
        return self.changed(**{key: _plain(value) for key, value in typed.items() if key in self.arguments})

    def build(self, *args: Any, offered: Mapping[str, Any] | None = None, **ours: Any) -> Any:
        """Call the target with these arguments and those of the config. Raises PluginError if it does not take them."""
        target = self.bound(offered=offered, **ours)
        try:
            return target(*args)
        except (TypeError, ValueError) as error:
            raise PluginError(f"{self.said} refuses its arguments ({first_line(error)})") from error

    def bound(self, offered: Mapping[str, Any] | None = None, **ours: Any) -> Any:
        """The target with all but its positional arguments. It gets `offered` ones that it has a parameter for."""
        function, given = self.load(), self.keywords()
        ours |= taken(function, {name: value for name, value in (offered or {}).items() if name not in given})
        self._check_names(function, given, ours)
        built = {key: self._built(f"{self.section}.{key}", value) for key, value in given.items()}
        return partial(function, **ours, **converted_arguments(f"{self.section}.", function, built))

    def _check_names(self, function: Any, given: Mapping[str, Any], ours: Collection[str] = ()) -> None:
        """Raise ConfigError for arguments that the target lacks or misses."""
        offered = [name for name in self.offered if name not in given]
        n_ours = 0 if self.kind is FUNCTION_OR_MODULE and isinstance(function, type) else self.n_ours
        check_names(self.section, self._target_, function, given, n_ours, [*self.ours, *ours, *offered])

    def _built(self, key: str, value: Any) -> Any:
        """The value of an argument, with the targets inside it built as by Hydra."""
        parts = [*_parts(key, value)] if self.arguments.get("_recursive_", True) else []
        if not parts:
            return value
        from hydra.errors import InstantiationException
        from hydra.utils import instantiate

        for name, part in parts:  # Hydra would also find a.b.c where a only imports b
            _load_part(name, part)
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


def _load_part(key: str, part: Mapping[str, Any]) -> Any:
    """Import the target of a section inside a value.

    A file may name anything in qnmixer without being trusted. So parts from there are layers, and no functions.
    """
    target = str(part[TARGET])
    kind = subclass_of("torch.nn.Module") if is_trusted(target, ()) else Kind("a class or function", callable)
    return load_plugin(f"{key}.{TARGET}", target, kind)


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
        super().__post_init__()
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

    def divisors(self) -> dict[str, int]:
        """Numbers that must divide the image size, by the key that sets each."""
        found: dict[str, int] = self.load().divisors(self._all())
        return found

    def checked(self) -> Self:
        """Check the rules between its arguments too."""
        section = super().checked()
        try:
            section.load().rules(section._all())
        except ConfigError as error:  # it names its arguments as a program does
            raise ConfigError(f"{self.group}: {error}") from error
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
    kind: ClassVar[Kind] = FUNCTION_OR_MODULE
    n_ours: ClassVar[int] = 2


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

    lr: Annotated[float, Gt(0), Le(1e9)]
    weight_decay: Annotated[float, Ge(0)]
    step_size_lr_factor: Annotated[float, Gt(0), Le(1e9)]

    def checked(self) -> Self:
        """Let torch check the arguments of its own optimizers: their signatures have no bounds."""
        section = super().checked()
        if section._target_.startswith("torch."):
            weight = importlib.import_module("torch").zeros(1, requires_grad=True)
            section.build([{"params": [weight]}], lr=section.lr)
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

    warmup: Annotated[float, Ge(0), Le(1)]


@dataclass(kw_only=True)
class ModuleConfig(Group):
    """A `RunModule`, built with `(network, loss, optimizer, schedule, metrics, **arguments)`."""

    group: ClassVar[str] = "module"
    kind: ClassVar[Kind] = subclass_of("qnmixer.engine.run_module.RunModule")
    late: ClassVar[bool] = True


@dataclass(kw_only=True)
class DataModuleConfig(Group):
    """A `qnmixer.engine.data.datamodule.SliceDataModule`, built with the section `data` and `(**arguments)`."""

    group: ClassVar[str] = "datamodule"
    kind: ClassVar[Kind] = subclass_of("qnmixer.engine.data.datamodule.SliceDataModule")
    n_ours: ClassVar[int] = 1
    late: ClassVar[bool] = True
