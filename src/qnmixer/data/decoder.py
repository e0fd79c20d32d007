"""Decode compressed DICOM pixels in a child process. If a decoder in C aborts or hangs, only the child ends.

The child runs this file. It ends with its parent, which closes the pipe, and is started again if it dies.
"""

import io
import os
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

SECONDS = 20  # for one frame
_MEMORY = 2 * 2**30  # bytes of the child's address space, beside those of the file


def decode_apart(path: str, frame: int, seconds: int = SECONDS) -> np.ndarray[Any, Any]:
    """Pixels [H, W] of one frame of a DICOM file, with all bits that are allocated.

    Raises SkipFile if the decoder fails, dies or is too slow.
    """
    from qnmixer.data.slices import SkipFile  # loads torch, without which the child starts sooner

    process, pipe = _child_of(os.getpid())
    try:
        pipe.send((os.path.abspath(path), frame, seconds))
        answer = pipe.recv_bytes()
    except (EOFError, OSError):
        _child_of.cache_clear()  # the next frame starts a new one
        process.kill()
        process.wait()
        raise SkipFile(f"its decoder died, or took longer than {seconds} s") from None
    if answer[:1] == b"!":
        raise SkipFile(f"pixels cannot be decoded, perhaps truncated ({answer[1:].decode()})")
    return np.load(io.BytesIO(answer), allow_pickle=False)


@cache
def _child_of(pid: int) -> tuple[subprocess.Popen[bytes], Connection]:
    """The process that decodes for the process `pid`, and the pipe to it. A forked process gets its own."""
    parent_end, child_end = Pipe()
    # One thread, because each thread reserves address space, which is limited below. The child must import the same
    # modules as this process.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-P", "-m", "qnmixer.data.decoder", str(child_end.fileno())]
    null = subprocess.DEVNULL
    with child_end:
        process = subprocess.Popen(
            command, pass_fds=[child_end.fileno()], env=environment, stdin=null, stdout=null, stderr=null
        )
    return process, parent_end


def _serve(pipe: Connection) -> None:
    """Decode frames in the child until the parent ends."""
    import resource  # not on Windows, which never gets here

    from pydicom.filereader import read_partial
    from pydicom.pixels.utils import pixel_array

    dataset: Any = None
    open_file = None
    with suppress(EOFError, KeyboardInterrupt):
        while True:
            path, frame, seconds = pipe.recv()
            signal.alarm(seconds)  # ends this process, also inside a decoder
            try:
                stat = os.stat(path)
                if open_file != (file := (path, stat.st_size, stat.st_mtime_ns)):
                    with suppress(OSError, ValueError):  # a system that cannot limit memory
                        hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
                        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY + stat.st_size, hard_limit))
                    with open(path, "rb") as handle:
                        dataset = read_partial(handle, lambda tag, *_: tag == 0)  # zeros are no tags
                    open_file = file
                stream = io.BytesIO()
                np.save(stream, pixel_array(dataset, index=frame, correct_unused_bits=False), allow_pickle=False)
                answer = stream.getvalue()
            except Exception as error:
                answer = b"!" + type(error).__name__.encode()
            signal.alarm(0)
            pipe.send_bytes(answer)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
