"""``hotset doctor``: what a program's training waits for, and what would help.

==============  ==========================================================================================
``watch``       in the program: clocks around each batch and each fetch, written to the ledger
``trial``       in a fork of the program, at the end: what a cache of its dataset holds and gives
``advice``      from both, with :mod:`hotset.policy.throughput`: what would help, in samples a second
``text``        as lines for a terminal
==============  ==========================================================================================
"""
