"""Training scripts that know nothing of hotset, for ``benchmarks/suite/run_programs.py``.

Each is run as a script, with a folder of pictures (or a video) and the number of epochs, and prints a line of
JSON for each epoch: its seconds and all of its losses.
"""
