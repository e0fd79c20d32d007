"""Hounsfield units, in which slices are."""

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
AIR = -1000.0
"""HU of air."""
