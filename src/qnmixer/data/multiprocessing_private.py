"""The use of a private part of Python's multiprocessing. If a new Python breaks the data workers, look here first.

It waits for a DataLoader that ends when a worker cannot send its batch (issue 142884 of pytorch/pytorch). Python has no
public way to hear of it: a thread of the queue pickles the batch, prints the error, and drops the batch.
"""

from collections.abc import Callable
from multiprocessing.queues import Queue


def call_if_unsent(function: Callable[[Exception, object], None]) -> None:
    """Call a function with the error and the object if a queue of this process cannot send one."""
    Queue._on_queue_feeder_error = staticmethod(function)  # type: ignore[attr-defined]  # private
