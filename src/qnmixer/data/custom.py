"""Slices of a user's own class, brought to the size of the network."""

from qnmixer.config.data import CustomData
from qnmixer.data.resample import to_square
from qnmixer.data.slices import FloatArray, SkipFile, SliceSource, clean_hu
from qnmixer.errors import DataError
from qnmixer.plugins import Kind, make_plugin

_SLICES = Kind(
    "a class with __len__ and load",
    lambda it: isinstance(it, type) and hasattr(it, "__len__") and hasattr(it, "load"),
)


class CustomSource:
    """The slices of one part (train, val or test), [size, size] in HU, from a user's class of any-sized ones.

    The class takes the part and its own arguments, and has `__len__`, `load(index)` → [H, W] in HU, and perhaps
    `name(index)`. Raises PluginError where it is not there or takes other arguments.
    """

    endless = False

    def __init__(self, config: CustomData, part: str, size: int) -> None:
        self.slices: SliceSource = make_plugin(
            "data._target_", config._target_, _SLICES, part, arguments=config.arguments
        )
        self.target, self.part, self.size = config._target_, part, size

    def __len__(self) -> int:
        return len(self.slices)

    def load(self, index: int) -> FloatArray:
        """Slice [size, size] in HU. Raises DataError for what is no slice in HU."""
        hu = self.slices.load(index)
        try:
            if getattr(hu, "ndim", None) != 2:
                raise SkipFile("it is no array [H, W]")
            return to_square(clean_hu(hu), self.size)
        except SkipFile as reason:
            raise DataError(f"data._target_={self.target}: {self.name(index)} cannot be used: {reason}") from None

    def name(self, index: int) -> str:
        """As its class calls it, or its number."""
        named = getattr(self.slices, "name", None)
        return named(index) if named else f"{self.part} {index}"
