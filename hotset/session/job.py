"""Find out which processes are ranks of one job on one machine, without communication between them.

torchrun, Accelerate, DeepSpeed, Lightning, srun and mpirun all start the ranks of a machine as children of
one process, and the environment of each rank says that it is one. So a job is identified by its *launcher*:
the process's number, the time at which it began (numbers are used again) and the process namespace in which
the number counts. The run id that torchrun sets would not do: it is ``none`` whenever there is a
``--master_port``. Run id, address and port only distinguish jobs that one shell has launched.

Lightning's own launcher is rank 0 itself, whose dataset is often made before it launches the other ranks, and
before its environment says anything. So a process that makes a cache offers it to two groups of ranks: those
that were launched together with it, and those that it may launch itself.

::

    torchrun ──┬── rank 0      each offers to, and takes from, ranks of launcher "torchrun"
               └── rank 1
    rank 0 ────┬── rank 1      rank 0 offers to ranks of launcher "rank 0"; 1 and 2 offer to, and take from,
               └── rank 2      the same; rank 0, once the environment says that it is one, does too

Processes that are not ranks (a notebook, a script) take no other process's cache. A loader's worker inherits
its rank's environment, but gets the cache by fork or pickle and does not look for one.

Results of functions (:func:`hotset.memo`) are shared more widely, as any process may come to need them: a
spawned worker that imports the module anew, for example. So besides ranks, all processes share them that
``multiprocessing`` has started from one program, which it gives one key (``authkey``), and all below one
``hotset run``, which sets ``HOTSET_JOB`` (:func:`this_program`).
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["JOB", "Job", "digest", "is_rank", "local_rank", "pid_namespace", "this_job", "this_program"]

# Names the job that all processes below belong to.
JOB = "HOTSET_JOB"

_LOCAL_RANKS = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
    ("SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    ("LOCAL_RANK", "WORLD_SIZE"),
    ("RANK", "WORLD_SIZE"),
)
_NUMBER = re.compile(r"\s*[0-9]{1,9}\s*")
_RENDEZVOUS = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Job:
    """The groups of ranks with which this process shares caches.

    Attributes:
        offers: names of the groups of ranks to which a cache made here is offered.
        takes: names of the groups from which this process takes a cache; empty if it is not a rank.
        launchers: names of the processes under which ranks may be making the same cache at the same time,
            a parent before its child.
    """

    offers: tuple[str, ...]
    takes: tuple[str, ...]
    launchers: tuple[str, ...]


def this_job(environment: Mapping[str, str] = os.environ) -> Job:
    """Return the groups of the calling process now: its environment may change, and so may its parent.

    Example:
        >>> alone = this_job({})
        >>> len(alone.offers), alone.takes
        (1, ())
        >>> rank = this_job({"LOCAL_RANK": "0", "MASTER_PORT": "29500"})
        >>> set(alone.offers) < set(rank.offers)
        True
        >>> rank.takes == this_job({"LOCAL_RANK": "1", "MASTER_PORT": "29500"}).takes
        True
        >>> set(rank.takes) & set(this_job({"LOCAL_RANK": "0", "MASTER_PORT": "29501"}).offers)
        set()
    """
    own = _process(os.getpid())
    if not is_rank(environment):
        return Job(offers=(digest(*own),), takes=(), launchers=())
    parent = _process(os.getppid())
    meeting = tuple(environment.get(variable, "") for variable in _RENDEZVOUS)
    together = digest(*parent, *meeting)
    return Job(
        offers=(together, digest(*own)),
        # Also what the parent made before it launched ranks, and what the ranks made that this one launched.
        takes=(together, digest(*parent), digest(*own, *meeting)),
        launchers=(digest(*parent), digest(*own)),
    )


def this_program(environment: Mapping[str, str] = os.environ) -> Job:
    """Return the groups with which this process shares results of functions.

    Example:
        >>> one, other = this_program({"HOTSET_JOB": "a"}), this_program({"HOTSET_JOB": "b"})
        >>> one.takes == one.offers, set(one.takes) & set(other.takes)
        (True, set())
        >>> rank = this_program({"LOCAL_RANK": "0"})
        >>> set(this_job({"LOCAL_RANK": "0"}).takes) < set(rank.takes)
        True
    """
    if environment.get(JOB):
        group = digest("job", environment[JOB])
        return Job(offers=(group,), takes=(group,), launchers=(group,))
    # All processes that multiprocessing has started from one have its key, and no other process has.
    own = digest("program", bytes(multiprocessing.current_process().authkey).hex())
    # A worker's parent is a rank, and not the ranks' launcher.
    is_worker = multiprocessing.parent_process() is not None
    job = Job((), (), ()) if is_worker else this_job(environment)
    launchers = job.launchers if job.takes else ()
    return Job((own, *job.offers), (own, *job.takes), (*launchers, own))


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment is that of one rank among others.

    A Slurm step of one task is an interactive shell rather than a job, and every program started there
    inherits its variables. A rank below zero is how many programs say that they have none.

    Example:
        >>> is_rank({"LOCAL_RANK": "3"}), is_rank({"RANK": "0", "WORLD_SIZE": "1"}), is_rank({"RANK": "0"})
        (True, True, False)
        >>> is_rank({"LOCAL_RANK": "-1"})
        False
        >>> is_rank({"SLURM_LOCALID": "0", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "8"})
        True
        >>> is_rank({"SLURM_LOCALID": "0", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "1"})
        False
    """
    there = {name for pair in _LOCAL_RANKS for name in pair if _number(environment, name) is not None}
    if there & {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"} or {"RANK", "WORLD_SIZE"} <= there:
        return True
    in_step = "SLURM_LOCALID" in there and "SLURM_STEP_ID" in environment
    return in_step and environment.get("SLURM_STEP_NUM_TASKS") != "1"


def local_rank(environment: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return the number of this rank among those of this machine, and how many they are; (0, 1) for no rank.

    A launcher that does not say how many there are here is taken to have started all of them here.

    Example:
        >>> local_rank({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}), local_rank({})
        ((1, 4), (0, 1))
        >>> local_rank({"RANK": "1", "WORLD_SIZE": "2"})
        (1, 2)
    """
    if not is_rank(environment):
        return 0, 1
    for variables in _LOCAL_RANKS:
        rank, count = (_number(environment, variable) for variable in variables)
        if rank is not None and count is not None:
            return rank, max(count, rank + 1)
    return 0, 1


def _number(environment: Mapping[str, str], variable: str) -> int | None:
    """The number of a rank, or how many they are, that a variable holds; None if it holds none."""
    text = environment.get(variable, "")
    return int(text) if _NUMBER.fullmatch(text) else None


def pid_namespace() -> int:
    """Return the inode of the process namespace in which this process's numbers count."""
    return os.stat("/proc/self/ns/pid").st_ino


def _process(pid: int) -> tuple[str, ...]:
    """Return an identity of the process that no other process has, nor a later one of the same number."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name, in parentheses, may hold anything; the state follows the last one.
            begun = file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        begun = ""  # hidden from this user (hidepid): only the number is known
    return (str(pid_namespace()), str(pid), begun)


def digest(*texts: str) -> str:
    """Return 32 hexadecimal digits for these texts.

    Example:
        >>> digest("a", "bc") == digest("ab", "c")
        False
    """
    found = hashlib.blake2b(digest_size=16)
    for text in texts:
        encoded = text.encode("utf-8", "surrogatepass")
        found.update(len(encoded).to_bytes(8, "little") + encoded)
    return found.hexdigest()
