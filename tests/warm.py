"""A Python that has loaded its libraries and forks for each command: to load them takes longer than most commands.

`Warm` starts it and runs commands by it. Each has a process of its own, with the folder, environment, output and exit
code of `python ARGUMENTS`. What it starts by `sys.executable` is forked too; ranks of training and doctor only with
`FORK_RANKS` in the environment.

A forked command differs from a real one: its parent is the server, which ends it with who asked for it; /proc does not
know its environment; sitecustomize runs after the imports; at its end objects are not destroyed; garbage is looked for
more rarely; Hydra composes faster (see composing.py); W&B lists packages once; torch's launcher reads no sources. What
these decide is tested by real commands.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

COMMANDS = ["train", "evaluate", "reconstruct", "plan", "doctor"]
COMMANDS += ["compare", "export"] * bool(find_spec("qnmixer.extras"))
"""Each is run as a file of its own, so only what it imports is loaded beforehand, and what these import late."""

GARBAGE = 50_000
"""Objects after which Python looks for garbage: after 700, as it does by itself, it takes a tenth of the time."""

FORK_RANKS = {"QNMIXER_TEST_FORK_RANKS": "1"}
"""For the environment of a command whose ranks may be forked: they do not notice that their launcher dies."""

# Stands in for Python where a command starts one by its path. A rank of ours (-m) needs its real parent, so it is real.
PYTHON = """#!{python} -IS
import json, os, signal, socket, sys
if "TORCHELASTIC_RUN_ID" in os.environ and sys.argv[1] == "-m" and "QNMIXER_TEST_FORK_RANKS" not in os.environ:
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
socket.send_fds(server, [b" "], [0, 1, 2])
server.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
answer = server.makefile()
command = json.loads(answer.readline())
def pass_on(number, _):
    try:
        os.kill(command, number)
    except ProcessLookupError:  # it has just ended
        pass
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, pass_on)
code = json.loads(answer.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


Done = subprocess.CompletedProcess[str]


class Warm:
    """A server for commands. Who names the same folder at once shares it.

    Args:
        folder: for its socket, and `python`, by which commands start others.
        preload: modules to import.
        owner: the process with which the server ends.
    """

    def __init__(self, folder: Path, *preload: str, owner: int) -> None:
        self.address, self.python = str(folder / "socket"), folder / "python"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(self.address):
                self._start(preload, owner)

    def _start(self, preload: tuple[str, ...], owner: int) -> None:
        self.python.write_text(PYTHON.format(python=sys.executable, address=self.address))
        self.python.chmod(0o755)
        command = [sys.executable, __file__, str(owner), self.address, str(self.python), *preload]
        # A session of its own: Ctrl-C is for pytest, and the server ends with it.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

    @property
    def under(self) -> tuple[str, ...]:
        """For the fixture `start`."""
        return (str(self.python),)

    @contextlib.contextmanager
    def forking_ranks(self) -> Iterator[None]:
        """Let this process launch ranks that are forked."""
        with mock.patch.object(sys, "executable", str(self.python)), mock.patch.dict(os.environ, FORK_RANKS):
            yield

    def run(self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 300) -> Done:
        """`python *arguments` in this folder; env=None: in the environment of this process."""
        with (
            tempfile.TemporaryFile() as stdout,
            tempfile.TemporaryFile() as stderr,
            open(os.devnull, "rb") as stdin,
            socket.socket(socket.AF_UNIX) as server,
        ):
            server.settimeout(timeout)
            server.connect(self.address)
            socket.send_fds(server, [b" "], [stdin.fileno(), stdout.fileno(), stderr.fileno()])
            environment = dict(os.environ if env is None else env)
            server.sendall(json.dumps([arguments, str(cwd), environment]).encode() + b"\n")
            with server.makefile() as answer:
                answer.readline()  # the process id
                code = json.loads(answer.readline())
            return Done(arguments, code, _text(stdout), _text(stderr))


def _text(file: BinaryIO) -> str:
    file.seek(0)
    return file.read().decode()


def serve(address: str, owner: int) -> list[str]:
    """Fork for each request until the owner ends; returns the arguments of Python in each process that is to run them.

    Args:
        address: of the socket.
        owner: a descriptor of the process.
    """
    server, running = os.getpid(), dict[int, tuple[int, socket.socket]]()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            askers = {asker: process for process, asker in running.values()}
            ready = select.select([listener, owner, *running, *askers], [], [])[0]
            if owner in ready:
                sys.exit()
            for descriptor in set(running).intersection(ready):
                process, asker = running.pop(descriptor)
                os.close(descriptor)
                _tell(asker, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
                asker.close()
            for asker in {asker for _, asker in running.values()}.intersection(ready):  # who asked for it has gone
                os.kill(askers[asker], signal.SIGKILL)
            if listener in ready:
                asker, _ = listener.accept()
                arguments, folder, environment, streams = _request(asker)
                if (process := os.fork()) == 0:
                    for descriptor in [owner, asker.detach(), *running]:
                        os.close(descriptor)
                    for other in askers:
                        other.close()
                    _die_with(server)
                    for number, descriptor in enumerate(streams):
                        os.dup2(descriptor, number)
                        os.close(descriptor)
                    os.chdir(folder)
                    os.environ.clear()
                    os.environ.update(environment)
                    return arguments
                for descriptor in streams:
                    os.close(descriptor)
                _tell(asker, process)
                running[os.pidfd_open(process)] = process, asker


def _request(asker: socket.socket) -> tuple[list[str], str, dict[str, str], list[int]]:
    """The arguments of Python, the folder, the environment, and the descriptors of three streams."""
    text, streams, _, _ = socket.recv_fds(asker, 2**16, 3)
    while not text.endswith(b"\n"):
        text += asker.recv(2**16)
    return *json.loads(text), streams


def _tell(asker: socket.socket, number: int) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        asker.sendall(f"{number}\n".encode())


def _die_with(parent: int) -> None:
    from qnmixer.runs.processes.process import die_with_parent

    die_with_parent(parent)


def _preload(modules: list[str]) -> None:
    """Import them, and what the commands import; the commands themselves are imported anew by who runs or asks them."""
    import qnmixer

    gc.disable()
    for name in modules:
        importlib.import_module(name)
    for name in COMMANDS:
        importlib.import_module(f"qnmixer.{name}")
        del sys.modules[f"qnmixer.{name}"]
        delattr(qnmixer, name)
    _compose_once()
    name_methods_at_once()
    if "wandb" in modules:
        list_packages_once()
    gc.freeze()
    gc.set_threshold(GARBAGE)
    gc.enable()
    collapse_pages()


def collapse_pages() -> None:
    """Let Linux keep this memory in pages of 2 MiB: what runs in it is some 5 % faster, a fork three times as fast."""
    madvise, size, collapse = ctypes.CDLL(None).madvise, 1 << 21, 25  # MADV_COLLAPSE
    maps = Path("/proc/self/maps")  # other systems have none, and no such pages
    for line in maps.read_text().splitlines() if maps.exists() else ():
        span, rights, *_, inode = line.split()[:5]
        if rights == "rw-p" and inode == "0":
            start, end = (int(address, 16) for address in span.split("-"))
            for address in range(-(-start // size) * size, end - size + 1, size):
                madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), collapse)


def name_methods_at_once() -> None:
    """torch's launcher looks up the name of each step in the sources of all frames: for a second in each launch."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name


def list_packages_once() -> None:
    """W&B lists what is installed twice in each run, for a tenth of a second each."""
    import wandb

    if wandb.util.working_set.__module__ == "wandb.util":
        packages = [*wandb.util.working_set()]
        wandb.util.working_set = lambda: iter(packages)


def _compose_once() -> None:
    """Let Hydra find its plugins and read conf/, pydantic build its types, and torch the matrices of the small scan."""
    from qnmixer.measurement.build import build_projector
    from qnmixer.runs.public_config import with_names
    from qnmixer.settings.compose import compose
    from qnmixer.settings.run import parse

    configs = {name: compose(name, []) for name in COMMANDS}
    with_names(parse(configs["train"]).plain())
    scan = ["data.image_size=16", "geometry.n_views=8", "geometry.n_detectors=24", "geometry.detector_pitch=40"]
    build_projector(parse(compose("train", scan))).safe_step_size()


def _become(arguments: list[str]) -> None:
    """What Python does with these arguments, of which the first is -m, -c or a file."""
    path = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    sys.path[:0] = [os.path.abspath(part) for part in path if part not in sys.path]
    if any(os.path.exists(os.path.join(part, "sitecustomize.py")) for part in path):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")
    if media := sys.modules.get("wandb.sdk.data_types._private"):  # a folder that the first to end would remove
        media.MEDIA_TMP._finalizer.detach()
        media.MEDIA_TMP.__init__("wandb-media")
    if "TORCHELASTIC_RUN_ID" in os.environ:  # a rank, whose parent is not its launcher
        ranks = importlib.import_module("qnmixer.runs.processes.process")
        die_with_parent = ranks.die_with_parent
        ranks.die_with_parent = lambda parent=None: die_with_parent()
    match arguments:
        case ["-m", module, *rest]:
            sys.path.insert(0, os.getcwd())
            sys.argv = [module, *rest]
            sys.modules.pop(module, None)  # runpy warns of one that is loaded
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.path.insert(0, "")
            sys.argv = ["-c", *rest]
            exec(code, {"__name__": "__main__"})
        case [file, *rest]:
            sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
            sys.argv = [file, *rest]
            runpy.run_path(file, run_name="__main__")


def _leave(code: Any) -> None:
    """End as Python does, but leave all objects as they are: to destroy those of the server copies its memory."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # of which Python tells
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        if code is None or isinstance(code, int):
            os._exit((code or 0) & 0xFF)
    sys.exit(code)


if __name__ == "__main__":
    owner, address, python, *modules = sys.argv[1:]
    importlib.import_module("composing").compose_faster()
    del sys.path[0]  # this folder, for this file
    owner_descriptor = os.pidfd_open(int(owner))
    _preload(modules)
    arguments = serve(address, owner_descriptor)
    sys.executable = python
    exit_code: Any = None
    try:
        _become(arguments)
    except SystemExit as end:
        exit_code = end.code
    _leave(exit_code)
