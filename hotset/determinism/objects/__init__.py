"""Strangers' objects: what they hold and reach, and which names their code reads."""
