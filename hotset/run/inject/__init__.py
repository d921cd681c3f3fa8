"""A folder for PYTHONPATH: Python imports ``sitecustomize`` from it as it starts."""
