"""How fast hotset is, beside everything a user might pick instead: ``python -m benchmarks``.

A speed measured alone says little on a shared machine, where the clock, the neighbours and the caches
change within a minute. So nothing here is an absolute figure that was measured at another time than what
it is compared with. The contestants of one comparison take turns, round after round, each round begins
with another one, a ratio is formed *within* a round, and the median of the rounds' ratios is reported with
the lowest and the highest.

Nor is a fast loader worth anything that yields the wrong samples. Before each timing a contestant's whole
epoch is compared with the truth, value by value, and after it the last batch; one that fails is reported
with the reason and without a figure.

::

    __main__        the command line: which benchmarks, which interpreter for the peers
    suite/          one function for each target of the project
    hotset_entries  hotset as a contestant
    peers           the other loaders, each in its best configuration
    outside         peers that need an interpreter of their own, and
    outside_child   what runs in it
    data            datasets
    throttle        a source at the pace of remote storage, for all processes together
    training        a small network and its training, for what waits for data
    curves          the sweep's plot
    volumes         files of volumes, and the windows that MONAI and hotset keep of them
    footprint       what several processes take together
    memory_job      the processes whose memory "memory" measures
    window_job      and those of "window"
    ranks_job       a rank of "ranks"
    placement       a simulated cluster: the machines' shares, and what moves
    cluster_nodes   the machines of "cluster": Ray nodes on this one
    cluster_rank    a rank on one
    cluster_wire    the ways of records between two
    cluster_estimate  larger clusters, on paper
    digits          the accuracy of windows and of full passes, a program of its own
    reader          timed epochs of a full cache
    attach_job      the second process of "attach"
    jobs            processes that answer questions, in any interpreter
    session_job     a job that uses a session
    mindspore_job   a pipeline in mindspore, torch or hotset
    truth           what a batch must hold
    harness         rounds, ratios, targets
    report          tables, JSON, plot
    machine         what all of this ran on

The peers gather in the main process with one thread (``torch.set_num_threads(1)``), as hotset does: with
two threads and a busy neighbour, OpenMP's spinning costs more than the second core brings.
"""
