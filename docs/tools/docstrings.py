"""Docstrings as the site shows them: their roles and literal blocks become Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

import hotset

_ROLE = re.compile(r":(?:\w+:)?(?:func|class|meth|attr|mod|data|exc):`([^`]+)`")


def _link(role: re.Match[str]) -> str:
    target = role[1].lstrip("~")
    shown = target.rpartition(".")[2] if role[1].startswith("~") else target
    public = target if target.startswith("hotset.") else f"hotset.{target}"
    if public.removeprefix("hotset.") in hotset.__all__ and public != "hotset.collate":
        return f"[`{shown}`][{public}]"
    return f"`{shown}`"


class Roles(griffe.Extension):
    """Rewrites each docstring as it is read."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = _ROLE.sub(_link, obj.docstring.value)
        text = text.replace("``", "`")
        text = re.sub(r"^( *)Example:$", r"\1Examples:", text, flags=re.M)
        obj.docstring.value = re.sub(r"::$", ":", text, flags=re.M)
