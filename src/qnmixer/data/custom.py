"""Slices of a user's own class, brought to the size of the network."""

from qnmixer.config.data import CustomData
from qnmixer.data.resample import to_square
from qnmixer.data.slices import FloatArray, SkipFile, SliceSource, clean_hu
from qnmixer.errors import DataError
from qnmixer.plugins import Kind, make_plugin

_SLICES = Kind("a class with __len__ and load", lambda cls: hasattr(cls, "__len__") and hasattr(cls, "load"))


class CustomSource:
    """The slices of one part (train, val or test), [size, size] in HU, from a user's class of any-sized ones.

    The class takes the part and `data.arguments`, and has `__len__`, `load(index)` → [H, W] in HU, and perhaps
    `name(index)`. Raises PluginError where it is not there or takes other arguments.
    """

    endless = False

    def __init__(self, config: CustomData, part: str, size: int) -> None:
        self.slices: SliceSource = make_plugin("data.target", config.target, _SLICES, part, **config.arguments)
        self.target, self.part, self.size = config.target, part, size

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
            raise DataError(f"data.target={self.target}: {self.name(index)} cannot be used: {reason}") from None

    def name(self, index: int) -> str:
        """As its class calls it, or its number."""
        named = getattr(self.slices, "name", None)
        return named(index) if named else f"{self.part} {index}"
