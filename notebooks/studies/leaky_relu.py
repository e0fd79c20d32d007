"""QN-Mixer with LeakyReLU in the inception, for experiment/study=leaky_relu."""

from functools import wraps
from typing import Any

from torch import nn

from qnmixer.models import QNMixer
from qnmixer.models.incept_mixer import Branch


class LeakyQNMixer(QNMixer):
    """QN-Mixer whose inception has LeakyReLU(0.1) in place of ReLU."""

    @wraps(QNMixer.__init__)  # the same arguments, so that a config's keys are checked as for QN-Mixer
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for branch in self.modules():
            if isinstance(branch, Branch):
                branch.activation = nn.LeakyReLU(0.1, inplace=True)
