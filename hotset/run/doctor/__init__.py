"""``hotset doctor``: what a program's training waits for, and what would help.

==================  ========================================================================================
``clocks``          the clocks of a process, and when they rest
``fetching``        in whatever process makes batches: each fetch, and what a sample costs there
``loop``            in the process that trains: how long the loop waits, and how long its steps take
``watch``           in each process of the program: what torch and the hooks call
``training_watch``  what it knows of a process as far as that trains, with ``loop``
``finish``          in the process that trains: when watching ends, and what follows
``decoding``        the clocks around decoders
``trial``           in a fork of the program, at the end: what a cache of its dataset holds and gives
``run_trial``       in the same fork: what ``hotset run`` gives
``measured``        the rates of a loader there
``stand_in``        a step that takes as long as the program's, for the trial
``ending``          ends the program as Ctrl-C would
``others``          how many processors other programs took meanwhile
``observed``        what the processes have written, put together
``advice``          what would help, in samples a second, with :mod:`hotset.policy.throughput`
``text``            as lines for a terminal
==================  ========================================================================================
"""
