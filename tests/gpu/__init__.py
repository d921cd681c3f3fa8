"""What needs a GPU: whether sinking is right there, and what it gives.

::

    python -m pytest tests/gpu                      all of it, and the table
    python -m tests.gpu                             the same without pytest
    python -m tests.gpu.figures --out figures.json  the figures alone

None of this has run on a GPU so far: what the checks say there of hotset, and of themselves, is to be seen.

The last two need torch and numpy alone, with this checkout as the working folder. Without a GPU the first one
is one line that says so; ``python -m tests.gpu.figures --device cpu --tiny`` tries the code of the figures.

=============  ============================================================================================
networks.py    LeNet-5, ResNet-50, a wide network; their training steps
checks.py      what must be equal: functions that raise AssertionError
figures.py     what is asked for in figures, each the median of pairs in one run
=============  ============================================================================================
"""
