"""What a process prints: warnings in one line, and standard output that outlives its reader."""

import errno
import io
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from qnmixer.errors import visible


@contextmanager
def warnings_in_one_line() -> Iterator[None]:
    """Print warnings as `warning: …` while the block runs. Python adds the file, and a line of code."""
    as_python_does = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {visible(str(message))}\n"
    try:
        yield
    finally:
        warnings.formatwarning = as_python_does


_READER_GONE = (errno.EPIPE, errno.EIO)  # the other end of a pipe, as in `| head -1`; a terminal that was closed


class _Lasting(io.FileIO):
    """Writes to a terminal, pipe or file as long as somebody reads it. Then it goes on, and writes to nobody."""

    def write(self, data: Any, /) -> int:
        """Write. Raises OSError, with a name, if a file is full."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _READER_GONE:
                error.filename = "standard output"
                raise
            nobody = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nobody, self.fileno())  # for libraries in C too
            os.close(nobody)
            return len(data)


def lasting_output() -> None:
    """Let a run outlive `| head -1`, and print ? for what the encoding of the terminal does not have.

    A stream that is not the process's own stays: that of a notebook or of a test.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper) or stream is not getattr(sys, f"__{name}__"):
            continue
        stream.flush()
        raw = _Lasting(stream.fileno(), "w", closefd=False)
        buffer: Any = raw if stream.write_through else io.BufferedWriter(raw)  # the first by python -u
        lasting = io.TextIOWrapper(
            buffer,
            encoding=stream.encoding,
            errors="replace",
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        setattr(sys, name, lasting)
