"""``hotset run``: a program that knows nothing of hotset, with its decoders memoised.

::

    hotset run ──starts──> the program ──starts──> ranks, workers, other programs
        │                      └──── PYTHONPATH: inject/sitecustomize.py ────┘
        │                                          │ installs
        │ ledger: a folder                         v
        │ <── waits, what was left alone ── import hook ── wraps decoders as their module is imported
        └── a memo's store, attached until the program has ended ──────┘ hotset.memo

==================  ======================================================================================
``program``         starts the program, and ends as it ends
``environment``     what the processes below find in their environment
``ledger``          the folder into which they write, and in which the command reads
``start``           as one of them starts: installs the hooks of ``hotset run`` and of ``hotset doctor``
``import_hook``     calls a hook when its module has been imported
``decoders``        the functions that are wrapped, and what makes two of their calls the same
``pillow``          pictures that PIL decodes
``kept``            a call through a memo, of which the program notices nothing
``worth``           whether to keep what a function returns takes less time than that saves
``loader_wait``     how long the program waits for torch's loaders
``report``          what is said in the end
==================  ======================================================================================

:mod:`hotset.run.doctor` is ``hotset doctor``.
"""
