"""QN-Mixer for sparse-view CT reconstruction. This file imports nothing heavy: `--help` must not load torch."""

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from qnmixer.installed import require

if TYPE_CHECKING:
    import numpy as np

    from qnmixer.models import UnrolledNetwork

__all__ = ["load_pretrained", "phantom"]


def load_pretrained(
    run: str | Path = "pretrained",
    trust: Collection[str] = (),
    *,
    passes: int | Literal["auto"] = "auto",
    start: Literal["auto", "fbp", "tv"] = "auto",
    mix: float = 0.0,
    **geometry: Any,
) -> "UnrolledNetwork[Any]":
    """Load a trained network as a plain `torch.nn.Module`, on the CPU and in eval mode.

    `network.projector` is A of the scan that the network was trained for. `network.projector.geometry` is that scan.
    For another one name what differs, as `load_pretrained(n_views=48)`: the step sizes of the network follow, and a
    line says so.

        sinogram = network.projector(image)  # [B, 1, V, D] from [B, 1, H, W]: line integrals, value × mm
        image = network(sinogram)            # [B, 1, H, W] from [B, 1, V, D]
        fbp = network.projector.fbp(sinogram)

    An image holds attenuation from 0 (air, −1000 HU) to 1 (2000 HU, or `data.hu_max` of its training):
    HU = 3000 · image − 1000. The shipped network takes V, D = 64, 512 and gives H, W = 256, 256, 400 mm wide.

    Args:
        run: a run folder of `qnmixer.train`, a checkpoint, a .safetensors file, or hf://OWNER/NAME for weights on
            Hugging Face's hub. Default: the shipped weights.
        trust: modules outside qnmixer whose classes the file may name.
        passes: how often the network runs, each time from its own last image. auto: with fewer views or a shorter arc
            than in training, while ‖A x − y‖ falls.
        start: of the first pass. auto: total variation on short arcs and with few views, else FBP.
        mix: share of total variation in the image, from 0 to 1.
        geometry: keys of the scan that differ from the training, as in conf/geometry: mm and radians.

    Raises:
        CheckpointError: there are no weights, or the file cannot be read.
        ConfigError: there is no such key of a scan, or no such value.
        GeometryError: the scan is impossible.
        NotInstalled: hf:// needs `qnmixer[hub]`; a network of one's own, or total variation, needs `qnmixer[train]`.
        PluginError: the file names a class of a module that is not in `trust`.
    """
    from qnmixer.reconstruction.cures import Cures
    from qnmixer.reconstruction.pretrained import load_network
    from qnmixer.reconstruction.weights import find_checkpoint

    path = find_checkpoint(run)
    if (network := load_network(path, cures := Cures(passes, start, mix), **geometry)) is None:
        require("train", f"the network of {path}")
        from qnmixer.reconstruction.checkpoints import load_run
        from qnmixer.reconstruction.reconstructor import on_scan

        trained = load_run(path, trust=trust)
        scan = trained.config.geometry.changed(**geometry)
        network = on_scan(trained, trained.config.changed(geometry=scan), cures).network
    return network.eval()


def phantom(size: int, *, seed: int, part: str, index: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """One random slice [size, size] in HU, drawn on 400 mm: a body, or ellipses.

    Args:
        size: rows and columns.
        seed: of the whole set.
        part: "train", "val" or "test"; their phantoms never coincide.
        index: number in the part; any non-negative integer.
    """
    from qnmixer.data.phantoms import phantoms

    return phantoms.phantom(size, seed=seed, part=part, index=index)
