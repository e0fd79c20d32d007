"""Check that losses are finite, without waiting for a GPU."""

import torch
from torch import Tensor


class FiniteCheck:
    """Raises for a loss that is not finite, once the device has computed it.

    If the host reads a number from a GPU, it waits for all queued work, and then the GPU waits for the host. So the
    answer is copied to the host in the background, and `raise_if_not` waits for that copy only. Call it before the
    weights change, when the whole backward pass is queued behind the copy. The GPU then has work meanwhile.
    """

    def __init__(self) -> None:
        self._answer: tuple[Tensor, torch.cuda.Event | None, Tensor, str] | None = None

    def ask(self, loss: Tensor, where: str) -> None:
        """Start the check of a loss.

        Args:
            loss: one number.
            where: the end of the message if it is not finite.
        """
        loss = loss.detach()
        finite = torch.empty((), dtype=torch.bool, pin_memory=loss.is_cuda)
        finite.copy_(torch.isfinite(loss), non_blocking=True)
        event = None
        if loss.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._answer = finite, event, loss, where

    def raise_if_not(self) -> None:
        """Raise FloatingPointError if the last loss was not finite."""
        if self._answer is None:
            return
        finite, event, loss, where = self._answer
        self._answer = None
        if event is not None:
            event.synchronize()  # waits for that copy only
        if not finite:
            raise FloatingPointError(f"the loss became {loss.item()} {where}")
