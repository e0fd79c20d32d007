from pathlib import Path

import numpy as np
from PIL import Image

from qnmixer.data.formats import FORMATS, open_file

from .conftest import body_hu, make_ct


def test_training_and_reconstruct_read_the_same_slices(tmp_path: Path) -> None:
    """Of a file of each format, whatever its name."""
    make_ct(tmp_path / "slice.dcm")
    np.save(tmp_path / "stack.npy", np.stack([body_hu(), body_hu() + 1]).astype(np.float32))
    Image.fromarray((body_hu() + 32768).astype(np.uint16)).save(tmp_path / "slice.png")
    files = {form.kind: next(tmp_path.glob(f"*{form.endings[0]}")) for form in FORMATS}
    assert len(files) == len(FORMATS) == 3
    for form in FORMATS:
        trained = [*form.read(tmp_path, files[form.kind].name)]
        opened = open_file(files[form.kind].rename(tmp_path / form.kind))
        assert opened.n_frames == len(trained) == 1 + (form.kind == "numpy")
        for frame, piece in enumerate(trained):
            np.testing.assert_array_equal(opened.decode(frame), piece.hu)
            assert opened.spacing(frame) == piece.spacing
