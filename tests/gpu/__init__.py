"""What needs a GPU: whether sinking is right there, and what it gives.

::

    python -m tests.gpu --only the_machine           whether the machine is as all needs it: half a minute
    python -m tests.gpu --seconds 540 --out all.json all of it, and the table; what comes first matters most
    python -m tests.gpu --only figures/              a part of it; --list prints the names
    python -m pytest tests/gpu                       the checks alone, in one process

What a run on an H100 gave is in docs/sinking.md, beside what was changed after it and waits for the next.

All but the last need torch, numpy and Pillow alone, and ``hotset`` as a command what that needs, with this
checkout as the working folder. (Where some package has installed a folder ``tests`` of its own: ``python -m
gpu`` in ``tests/``, the checkout in ``PYTHONPATH``.)
Without a GPU they are a line that says so; ``python -m tests.gpu --device cpu --tiny`` tries their code.

==============  ===========================================================================================
networks.py     LeNet-5, ResNet-50, a wide network; their training steps
checks.py       what must be equal: functions that raise AssertionError
figures.py      what is asked for in figures, each the median of pairs in one run
scan.py         LeNet-5 in JAX, for one of them
photographs.py  a plain loop over JPEG files, for another
program.py      a program that knows nothing of hotset, for one of the checks
runner.py       runs each in a process that may be lost, and writes what is known after each
==============  ===========================================================================================
"""
