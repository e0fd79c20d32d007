"""DeepLesion's 16-bit PNG slices: HU = pixel − 32768."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from qnmixer.data.slices import OpenFile, SkipFile, Slice, SliceInfo, reading, require_size
from qnmixer.physics.units import FloatArray

_ZERO_HU = 32768


def read_hu_png(path: Path) -> FloatArray:
    """Read one 16-bit PNG as HU [H, W]. Raises SkipFile if it is not one."""
    with reading("unreadable or truncated PNG"):
        try:
            image = Image.open(path, formats=["PNG"])
        except UnidentifiedImageError:
            raise SkipFile("not PNG") from None
        with image:
            if not image.mode.startswith("I"):
                raise SkipFile("not a 16-bit grey PNG")
            require_size(image.height, image.width)
            image.verify()  # checks the pixels' checksums; decoding does not
        with Image.open(path) as image:
            raw = np.asarray(image)
    return raw.astype(np.float32) - np.float32(_ZERO_HU)


class DeepLesionReader:
    """Decodes DeepLesion files."""

    kind = "deeplesion"
    wanted = "16-bit PNG slices"
    endings = (".png",)
    magic = b"\x89PNG\r\n\x1a\n"

    def open(self, path: Path) -> OpenFile:
        """Open one file."""
        return OpenFile(1, lambda _: read_hu_png(path))

    def read(self, root: Path, path: str) -> Iterator[Slice]:
        """The slice of a file `…/<patient>_<study>_<series>/<slice>.png`. Raises SkipFile if the file has none."""
        hu = read_hu_png(root / path)
        folder, _, file = path.rpartition("/")
        series = folder.rpartition("/")[2] or root.name
        stem = file.rpartition(".")[0]
        yield Slice(SliceInfo(path, 0, 1, series.split("_")[0], folder, float(stem) if stem.isdigit() else 0.0), hu)
