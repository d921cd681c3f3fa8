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

::

    jobs        what a job does, and what it checks
    places      file systems that can be full
    processes   all that were started: who ended, and whether as it should
    director    what goes wrong, and when
    aftermath   what must hold once all have ended
    __main__    the command line, and all of the above in their order
"""

from __future__ import annotations

KILLS = ("worker", "job", "server", "create", "destroy")
HAPPENS = (*(f"{kind} kills" for kind in KILLS), "stops", "tmpfs full", "disk full")
