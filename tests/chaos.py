"""A seeded run of everything that can go wrong on one machine: ``python -m tests.chaos --kills 60 --seed 7``.

Jobs cache and read, in sessions and for themselves, while processes are killed with -9 at random points:
loader workers, whole jobs, the server, and those in the midst of making or destroying a session. Some are
stopped and continued, sessions are destroyed under running jobs, and both file systems are filled to the
brim. Three things must hold all the same:

=============  ==========================================================================================
jobs           every sample that any job gets is the source's, bit for bit, and each pass has each sample
               once. A job that is left alone ends well, but for torch's own error over a killed worker
the caches     nothing in them is damaged, now or at the end, and what is left of the sessions can be read
               and destroyed
the machine    then no process is left, and ``hotset gc`` leaves nothing: no file, and not a byte of memory
=============  ==========================================================================================

The file systems are the run's own: it has a mount namespace for itself, with a small tmpfs on ``/dev/shm``
for the runtime folder and a small ext4 for the spill folder, so that they can be full for no one else.
Where nothing may be mounted, jobs are given a largest size of a file instead.

All jobs are forks of one process, which never has a thread. Its children's orphans become its own, so that
none is overlooked. A seed gives the same orders again, though not the same moments.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import importlib
import mmap
import os
import pkgutil
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data.dataloader as torch_loader

import hotset
from hotset.cli import server, session
from hotset.collate import ragged
from hotset.errors import HotsetError, SessionError
from hotset.server.options import Options
from hotset.server.place import ServerError
from hotset.session import care, registry, sessions
from hotset.session.spills import spill_path

ENDS_WELL, FAILED, WRONG, LOST_A_WORKER, NO_SESSION = 0, 1, 3, 4, 5
N = 240
KILLS = ("worker", "job", "server", "create", "destroy")
HAPPENS = (*(f"{kind} kills" for kind in KILLS), "stops", "tmpfs full", "disk full")
MOST_JOBS = 4
PATIENCE = 120.0
TMPFS, DISK = 24 << 20, 160 << 20
_CLONE_NEWNS, _MS_REC_PRIVATE, _SUBREAPER = 0x20000, 0x44000, 36
_libc = ctypes.CDLL(None, use_errno=True)

# name: memory, spill, persist, whether it is the server's
SESSIONS: dict[str, tuple[str, bool, bool, bool]] = {
    "enough": ("12MiB", False, False, False),
    "little": ("150kB", False, False, False),
    "spilled": ("150kB", True, False, False),
    "kept": ("300kB", True, True, False),
    "served": ("4MiB", False, False, True),
    "served-spilled": ("150kB", True, False, True),
}


# ---- jobs --------------------------------------------------------------------------------------------


def fixed(i: int) -> Any:
    return {"row": (torch.arange(2048) * 31 + i * 17).to(torch.int16), "label": i}


def uneven(i: int) -> Any:
    return {"rows": torch.full((i * 37 % 211, 5), float(i)), "text": f"{i} " * (i * 7 % 300), "label": i}


def large(i: int) -> Any:
    return {"row": (torch.arange(40_000) + i).to(torch.int16), "label": i}


MAKERS: dict[str, Callable[[int], Any]] = {"fixed": fixed, "uneven": uneven, "large": large}


class Source(torch.utils.data.Dataset[Any]):
    """Samples that take a moment each."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        time.sleep(2e-4)
        return MAKERS[self.kind](i)


def is_right(kind: str, got: Any) -> bool:
    """Whether this is the sample that its label says, whole and unaltered."""
    wanted = MAKERS[kind](int(got["label"]))
    return list(got) == list(wanted) and all(
        torch.equal(got[key], value) and got[key].dtype == value.dtype
        if isinstance(value, torch.Tensor)
        else type(got[key]) is type(value) and got[key] == value
        for key, value in wanted.items()
    )


def read_all(cached: Any, kind: str, draw: random.Random, checked: Any) -> None:
    """One pass over all samples, by a loader or one by one."""
    seen: list[int] = []
    if draw.random() < 0.15:
        batches = [[cached[i]] for i in draw.sample(range(N), N)]
    else:
        loader = hotset.DataLoader(
            cached,
            batch_size=draw.choice([5, 16, 48]),
            shuffle=True,
            num_workers=draw.choice([0, 2]),
            collate_fn=ragged,
        )
        batches = (
            [dict(zip(batch, parts, strict=True)) for parts in zip(*map(_each, batch.values()), strict=True)]
            for batch in loader
        )
    for samples in batches:
        for got in samples:
            if not is_right(kind, got):
                raise AssertionError(f"sample {got['label']} came as {got}")
            seen.append(int(got["label"]))
        checked += len(samples)
    assert sorted(seen) == list(range(N)), f"a pass gave {len(seen)} samples: {sorted(seen)}"


def _each(column: Any) -> Any:
    return column.tolist() if isinstance(column, torch.Tensor) and column.dim() == 1 else column


def job(options: dict[str, Any], seed: int, checked: Any, dies: int) -> int:
    """Cache, read a few epochs, check everything; returns the exit code."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kind = draw.choice(sorted(MAKERS))
    try:
        with dying(dies):
            cached = hotset.cache(Source(kind), **options)
    except SessionError:
        return NO_SESSION
    with cached:
        for _ in range(draw.randint(1, 4)):
            read_all(cached, kind, draw, checked)
    return ENDS_WELL


def code_of(error: BaseException) -> int:
    """With what a process ends that raised this."""
    if isinstance(error, AssertionError):
        return WRONG
    # It is torch's own error where torch waits for its workers, or where the kernel told of a death.
    places = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    lost = torch_loader.__file__ in places or "DataLoader worker (pid" in str(error)
    return LOST_A_WORKER if lost else FAILED


@contextlib.contextmanager
def dying(after: int) -> Iterator[None]:
    """Have this process killed after so many lines of hotset's code that handles files; 0: not at all."""
    places = tuple(f"{os.path.dirname(hotset.__file__)}/{layer}/" for layer in ("session", "store"))
    left = after

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(places):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace if after else None)
    try:
        yield
    finally:
        sys.settrace(None)


# ---- file systems ------------------------------------------------------------------------------------


class Place:
    """A folder on a file system of its own, if that may be, which can be filled to the brim."""

    def __init__(self, folder: Path, kind: str, size: int) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700)
        self._ballast = folder / "ballast"
        self.mounted = False
        image = f"{folder}.image"
        if kind == "ext4":
            with open(image, "wb") as file:
                file.truncate(size)
            make = ["mkfs.ext4", "-q", "-m0", "-O^has_journal", image]
            command = ["mount", "-o", "loop", image, str(folder)]
            if _succeeds(make):
                self.mounted = _succeeds(command)
        else:
            self.mounted = _succeeds(
                ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "x", str(folder)]
            )
        for known in folder.iterdir():
            known.rmdir()  # lost+found

    def used(self) -> int:
        status = os.statvfs(self.folder)
        return (status.f_blocks - status.f_bfree) * status.f_frsize

    def fill(self, but: int) -> None:
        """Leave so many bytes."""
        status = os.statvfs(self.folder)
        size = status.f_bavail * status.f_frsize - but
        fd = os.open(self._ballast, os.O_WRONLY | os.O_CREAT, 0o600)
        with contextlib.suppress(OSError):
            os.posix_fallocate(fd, 0, max(size, 1))
        os.close(fd)

    def empty(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "-l", str(self.folder)], check=True)
        shutil.rmtree(self.folder)


def _succeeds(command: list[str]) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True).returncode == 0
    return False


# ---- the director ------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    """``hotset ...`` as a process: its exit code, and what it said, or where it is if it does not end."""
    program = [sys.executable, "-X", "faulthandler", "-c", "from hotset.cli.main import main; main()"]
    with subprocess.Popen(
        [*program, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)
            said, _ = process.communicate()
        return process.returncode, said


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class Child:
    """A process that was started here.

    Attributes:
        kind: ``job``, ``create``, ``destroy``, ``look``, or ``start`` (of the server).
        excused: whether a worker of it was killed.
        continues: when it is to be continued, if it is stopped.
    """

    def __init__(self, pid: int, kind: str, log: Path) -> None:
        self.pid, self.kind, self.log = pid, kind, log
        self.excused = False
        self.continues: float | None = None


def children(pid: int | None = None) -> list[int]:
    """The children of a process, of this one if None."""
    pid = os.getpid() if pid is None else pid
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


class Director:
    """Starts processes and lets go wrong what can."""

    def __init__(self, seed: int, runtime: Place, disk: Place, logs: Path) -> None:
        self.random = random.Random(seed)
        self.runtime, self.disk, self.logs = runtime, disk, logs
        self.port = free_port()
        self.children: list[Child] = []
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.memory = mmap.mmap(-1, 1 << 20)
        self.checked = np.frombuffer(self.memory, np.int64)  # a word for each job
        self.full_until = 0.0
        self.daemon: int | None = None  # once it has answered

    # -- processes

    def start(self, kind: str, body: Callable[[], int]) -> Child:
        self.counts[f"{kind}s"] += 1
        log = self.logs / f"{kind}-{self.counts[f'{kind}s']}"
        pid = os.fork()
        if pid == 0:
            code = FAILED
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            try:
                try:
                    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                    os.dup2(fd, 1)
                    os.dup2(fd, 2)
                    faulthandler.enable()
                    faulthandler.register(signal.SIGUSR1, all_threads=True)
                    code = body()
                except BaseException as error:
                    code = code_of(error)
                    traceback.print_exc()
            except BaseException as error:
                code = code_of(error)
                traceback.print_exc()
            finally:
                try:
                    sys.stderr.flush()
                finally:  # torch's handler may raise at any time that a worker was killed
                    os._exit(code)
        child = Child(pid, kind, log)
        self.children.append(child)
        return child

    def reap(self) -> None:
        """Look who has ended, and whether as it should; continue who has been stopped long enough."""
        for child in list(self.children):
            if child.continues is not None and time.monotonic() > child.continues:
                child.continues = None
                os.kill(child.pid, signal.SIGCONT)
            done, status = os.waitpid(child.pid, os.WNOHANG)
            if done:
                self.children.remove(child)
                self.judge(child, os.waitstatus_to_exitcode(status))
        known = {child.pid for child in self.children}
        for pid in children():
            if pid not in known:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done and pid == self.daemon:
                    self.failures.append(f"the server ended by itself, with status {status}")

    def judge(self, child: Child, code: int) -> None:
        if child.kind == "start":
            self.daemon = self.server()
        if code == -signal.SIGKILL:
            self.counts[f"{child.kind} kills"] += 1
        elif code == NO_SESSION and child.kind == "job":
            self.counts["jobs without a session"] += 1
        elif code == LOST_A_WORKER and child.excused:
            self.counts["jobs that lost a worker"] += 1
        elif code == ENDS_WELL:
            self.counts[f"{child.kind}s that ended well"] += 1
        else:
            self.fail(child, f"ended with {code}")

    def fail(self, child: Child, how: str) -> None:
        excused = ", a worker of which was killed," if child.excused else ""
        self.failures.append(f"{child.log.name}{excused} {how}:\n{child.log.read_text()[-6000:]}")

    def of(self, kind: str) -> list[Child]:
        return [child for child in self.children if child.kind == kind]

    def lines(self, share: float) -> int:
        """After how many lines a process is to die; 0, not at all, for the others."""
        return round(10 ** self.random.uniform(0, 3.3)) if self.random.random() < share else 0

    # -- what is done

    def start_job(self) -> None:
        draw = self.random
        if draw.random() < 0.75:
            options: dict[str, Any] = {"session": draw.choice(sorted(SESSIONS))}
            if draw.random() < 0.2:
                options["memory"] = "100kB"
        else:
            options = {"memory": draw.choice(["20kB", "300kB", "64MiB"]), "spill": str(self.disk.folder)}
        seed, dies, word = draw.getrandbits(60), self.lines(0.1), self.counts["jobs"]
        size = draw.randrange(1 << 20) if self.is_full and not self.disk.mounted else None

        def body() -> int:
            if size is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            return job(options, seed, self.checked[word : word + 1], dies)

        self.start("job", body)

    def create(self, name: str | None = None) -> None:
        dies = self.lines(0.5) if name is None else 0
        name = name or self.random.choice(sorted(SESSIONS))
        memory, spills, persist, served = SESSIONS[name]
        spill = str(self.disk.folder) if spills else None
        port = self.port if served else None

        def body() -> int:
            with dying(dies), contextlib.suppress(HotsetError):  # there already, no server, a full disk
                session.create(name, memory=memory, spill=spill, ttl=None, persist=persist, port=port)
            return ENDS_WELL

        self.start("create", body)

    def destroy(self) -> None:
        name, dies = self.random.choice(sorted(SESSIONS)), self.lines(0.5)

        def body() -> int:
            with dying(dies), contextlib.suppress(SessionError):  # there is none
                session.destroy(name)
            return ENDS_WELL

        self.start("destroy", body)

    def look(self) -> None:
        """Check and collect, in the midst of it all."""

        def body() -> int:
            with contextlib.suppress(SessionError):  # who makes or destroys one is stopped
                care.gc()
            session.list_all()
            problems = [
                f"{report.name}: {problem}" for report in care.reports() for problem in report.problems
            ]
            print(*problems, sep="\n")
            return WRONG if problems else ENDS_WELL

        self.start("look", body)

    def serve(self) -> None:
        """Start the server, unless it runs or begins to."""
        if self.of("start") or self.server() is not None or self.is_full:
            return
        options = Options.parse(port=self.port, memory="8MiB", spill=str(self.disk.folder))

        def body() -> int:
            with contextlib.suppress(ServerError):  # the file system was filled meanwhile
                server.start(options)
            return ENDS_WELL

        self.start("start", body)

    def server(self) -> int | None:
        """The server's process, by its command line."""
        return next((pid for pid in children() if b"hotset.server" in _command_line(pid)), None)

    def kill_server(self) -> None:
        pid = self.server()
        if pid is not None and not self.of("start"):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self.counts["server kills"] += 1
            self.daemon = None
            self.serve()

    def kill_worker(self) -> None:
        for child in self.random.sample(self.of("job"), len(self.of("job"))):
            workers = children(child.pid)
            if workers:
                child.excused = True
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.random.choice(workers), signal.SIGKILL)
                    self.counts["worker kills"] += 1
                return

    def kill(self) -> None:
        victims = [child for child in self.children if child.kind in KILLS]
        if victims:
            os.kill(self.random.choice(victims).pid, signal.SIGKILL)

    def stop(self) -> None:
        victims = [child for child in self.children if child.kind != "start" and child.continues is None]
        if victims:
            child = self.random.choice(victims)
            os.kill(child.pid, signal.SIGSTOP)
            child.continues = time.monotonic() + self.random.choice([0.05, 0.3, 3.0])
            self.counts["stops"] += 1

    @property
    def is_full(self) -> bool:
        return self.full_until > 0

    def fill(self) -> None:
        if not self.is_full:
            place, name = self.random.choice([(self.runtime, "tmpfs"), (self.disk, "disk")])
            if place.mounted:
                place.fill(self.random.choice([0, 0, 5000, 300_000, 3_000_000]))
            self.counts[f"{name} full"] += 1
            self.full_until = time.monotonic() + self.random.uniform(0.2, 1.5)

    def make_room(self) -> None:
        self.runtime.empty()
        self.disk.empty()
        self.full_until = 0.0

    def run(self, kills: int, seconds: float) -> None:
        actions = {
            self.start_job: 30, self.create: 14, self.destroy: 5, self.look: 4, self.serve: 3, self.kill: 8,
            self.kill_worker: 8, self.kill_server: 2, self.stop: 5, self.fill: 3,
        }  # fmt: skip
        until, last = time.monotonic() + seconds, time.monotonic() + max(10 * seconds, 10.0 * kills)
        self.serve()
        for name in SESSIONS:
            self.create(name)
        while not self.failures and time.monotonic() < last:
            if time.monotonic() > until and self.kills >= kills and all(self.counts[k] for k in HAPPENS):
                break
            time.sleep(self.random.uniform(0, 0.06))
            self.reap()
            if self.is_full and time.monotonic() > self.full_until:
                self.make_room()
            action = self.random.choices(list(actions), list(actions.values()))[0]
            if action is not self.start_job or len(self.of("job")) < MOST_JOBS:
                action()
        self.make_room()
        self.wait()

    @property
    def kills(self) -> int:
        return sum(self.counts[f"{kind} kills"] for kind in KILLS)

    def wait(self) -> None:
        """Let all end, each within a bound: a process that wedges is a failure too."""
        until = time.monotonic() + PATIENCE
        while self.children and time.monotonic() < until:
            time.sleep(0.01)
            self.reap()
        for child in self.children:
            os.kill(child.pid, signal.SIGUSR1)  # where it is goes into its log
            time.sleep(0.5)
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
            self.fail(child, "did not end")
        self.children.clear()

    # -- afterwards

    def look_after(self) -> None:
        """What is left can be used, and can be removed."""
        self.check()
        for known in sessions.sessions():
            for kind in sorted(MAKERS):
                self.start("reader", lambda name=known.name, kind=kind: reader(name, kind))  # type: ignore[misc]
            self.wait()
        self.check()
        self.serve()
        self.wait()
        if self.daemon is None:
            self.failures.append("the server does not start any more")
        for known in sessions.sessions():
            if known.server is None:
                self.hotset("session", "destroy", known.name)
        self.daemon = None
        self.hotset("stop", "--port", str(self.port))
        until = time.monotonic() + PATIENCE / 4
        while children() and time.monotonic() < until:
            self.reap()
            time.sleep(0.01)
        for pid in children():
            where = _stack(pid)
            if "hotset/" in where or "queues.py" not in where:
                self.failures.append(f"process {pid} is left: {_command_line(pid)!r}\n{where}")
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        # What is young is left alone, as somebody may be making it; here nobody is left.
        registry._YOUNG_SECONDS = sessions._YOUNG_SECONDS = 0.0
        print(*care.gc(), sep="\n")
        (self.runtime.folder / f"server-{self.port}.log").unlink()  # it stays, for people
        for folder in (self.runtime.folder, spill_path(str(self.disk.folder))):
            self.failures += [f"{file.name} is left" for file in folder.iterdir()]

    def check(self) -> None:
        self.hotset("check")

    def hotset(self, *arguments: str) -> None:
        code, said = run(*arguments)
        if code:
            self.failures.append(f"`hotset {' '.join(arguments)}` ends with {code}:\n{said}")


def _stack(pid: int) -> str:
    """Where a process is that does not end; it writes that to its log.

    A worker that is killed in the midst of sending holds torch's queue for ever, and another worker of that
    job, once the job itself is killed, waits at its end for its turn with it: that is torch's, and no frame
    of it is hotset's.
    """
    with open(f"/proc/{pid}/fd/2", "rb") as log:
        log.seek(0, os.SEEK_END)
        os.kill(pid, signal.SIGUSR1)
        time.sleep(1)
        return log.read().decode(errors="replace")


def reader(name: str, kind: str) -> int:
    """A fresh job in a session that is left, from the first sample to the last."""
    with hotset.cache(Source(kind), session=name) as cached:
        for _ in range(2):
            read_all(cached, kind, random.Random(kind), np.zeros(1, np.int64))
    return ENDS_WELL


def end_all() -> None:
    """End whatever this process has started; orphans become its children, and come next."""
    while found := children():
        for pid in found:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def chaos(seed: int, kills: int, seconds: float) -> list[str]:
    """Run it; returns a text for each thing that was wrong."""
    warnings.simplefilter("ignore", hotset.HotsetWarning)
    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(hotset.__path__, "hotset."):
        if (
            not module.name.startswith(("hotset.demo", "hotset.integrations"))
            and "__main__" not in module.name
        ):
            importlib.import_module(module.name)  # once here, and not in each child
    _libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    own = _libc.unshare(_CLONE_NEWNS) == 0 and _libc.mount(b"none", b"/", None, _MS_REC_PRIVATE, None) == 0
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-hotset-")))
        shared = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-hotset-", dir="/dev/shm"))
        )
        runtime = stack.enter_context(
            contextlib.closing(Place(shared / "runtime", "tmpfs" if own else "", TMPFS))
        )
        disk = stack.enter_context(contextlib.closing(Place(folder / "disk", "ext4" if own else "", DISK)))
        os.environ["HOTSET_RUNTIME_DIR"] = str(runtime.folder)
        os.environ["XDG_STATE_HOME"] = str(folder / "state")
        (folder / "logs").mkdir()
        before = runtime.used() if runtime.mounted else 0
        director = Director(seed, runtime, disk, folder / "logs")
        stack.callback(end_all)
        director.run(kills, seconds)
        if not director.failures:
            director.look_after()
            if runtime.mounted and runtime.used() != before:
                director.failures.append(f"{runtime.used() - before:,} bytes of memory are not given back")
        director.counts["samples"] = int(director.checked.sum())
        done = ", ".join(f"{name} {count}" for name, count in sorted(director.counts.items()))
        how = "mounted" if disk.mounted and runtime.mounted else "limited"
        print(f"file systems {how}, seed {seed}, kills {director.kills}, {done}", flush=True)
    return director.failures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kills", type=int, default=50, help="at least so many")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--seconds", type=float, default=0.0, help="at least so long")
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    failures = chaos(arguments.seed, arguments.kills, arguments.seconds)
    print(*failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
