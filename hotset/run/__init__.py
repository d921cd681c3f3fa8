"""``hotset run``: a program that knows nothing of hotset, with its decoders memoised.

::

    hotset run ──starts──> the program ──starts──> ranks, workers, other programs
        │                      └──── PYTHONPATH: inject/sitecustomize.py ────┘
        │                                          │ installs
        │ ledger: a folder                         v
        │ <── waits, what was left alone ── import hook ── wraps decoders as their module is imported
        └── a memo's store, attached until the program has ended ──────┘ hotset.memo

``program.py`` starts and ends the program; ``environment.py`` says what the processes below it find in their
environment; ``import_hook.py`` and ``decoders.py`` wrap; ``pillow.py`` keeps pictures that PIL decodes;
``loader_wait.py`` measures; ``report.py`` says in the end what it was good for.
"""
