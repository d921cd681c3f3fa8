"""Whether a dataset may call its chain again, or go on where it raises: read from the code that calls it.

A dataset crops until there is foreground, or catches what its chain raises and takes another sample. If that
is rare, a few readings do not show it, but the code does. A recorder notes where it was called: for each
frame up to the dataset's ``__getitem__``, the code and the instruction. From there control flows on::

    while True:                       call ──> test ──> call again        its result may decide: a loop
        crop = self.transform(x)                  └───> return
        if crop.sum(): return crop

    for x in views:                   call ──> FOR_ITER ──> call again    the iterator alone decides
        out.append(self.transform(x))             └───────> return

    crop = self.transform(x)          call ──> test ──> call again        its result decides, if the test
    if crop.sum() == 0:                         └────> return             reads what was bound since
        crop = self.transform(x)

    try: return self.transform(x)     call ──> handler ──> return         what it raises is caught
    except ValueError: return self[0]             └──────> raise

So a call is made in a loop if a branch follows it, other than an iterator's end, of which one side leads to
the call again, and another returns without it. What a method leads to is again the call if it calls itself,
or gets another item of itself. A second call of the chain that follows the first is found by the attribute's
name. In a loop of its own it counts as the first does; in an ``if``, where the test reads a variable that is
bound after the first call, and not if it only reads a setting (``if self.two_views:``).

The blocks that Python enters when something raises are sides, too; ``with`` is taken to let exceptions pass,
as readings compare what else it does, unless its function names ``suppress``. A handler that only raises,
perhaps another exception, and ``finally`` change nothing.

The instructions are CPython's. Python 3.11 and later have a table of which handler covers which instruction;
before, instructions push and pop handlers. Code that cannot be read so says nothing.
"""

from __future__ import annotations

import dis
import itertools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

__all__ = ["CallSite", "call_sites", "reaction"]

_RETURNS = {"RETURN_VALUE", "RETURN_CONST"}
_ENDS = {*_RETURNS, "RAISE_VARARGS", "RERAISE"}
_ITERATES = {"FOR_ITER", "SEND"}  # the latter is `yield from`
_RERAISES = {"WITH_EXCEPT_START", "CLEANUP_THROW"}  # unless a context manager or a generator says otherwise
_PUSHES = {"SETUP_FINALLY", "SETUP_WITH", "SETUP_ASYNC_WITH"}

_Steps = Mapping[int, dis.Instruction]
_Edges = Mapping[int, Sequence[int]]


class CallSite(NamedTuple):
    """A call in a function that is running: the function's code, and the instruction's offset."""

    code: types.CodeType
    offset: int


def call_sites(outermost: types.CodeType) -> tuple[CallSite, ...]:
    """The calls that led to the caller, innermost first, below ``outermost``; none if that runs elsewhere."""
    found: list[CallSite] = []
    frame = sys._getframe(1).f_back
    while frame is not None and frame.f_code is not outermost:
        found.append(CallSite(frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found) if frame is not None else ()  # a thread's own loop says nothing


def reaction(sites: Sequence[CallSite], name: str) -> str | None:
    """How what a chain does may decide what the code does next.

    Args:
        sites: a call of the chain, from :func:`call_sites`.
        name: the attribute that holds the chain.

    Returns:
        A phrase such as "goes on if its transform raises (__getitem__, line 12)"; None if it decides nothing.
    """
    called = name
    for site in sites:
        try:
            found = _reaction(site, called)
        except Exception:  # of a Python that is not known yet
            return None
        if found is not None:
            lines = (line for start, end, line in site.code.co_lines() if start <= site.offset < end)
            return f"{found.format(name)} ({site.code.co_name}, line {next(lines, None)})"
        called = site.code.co_name
    return None


def _reaction(site: CallSite, name: str) -> str | None:
    steps = {step.offset: step for step in dis.get_instructions(site.code)}
    following = dict(itertools.pairwise([*steps, -1]))
    nexts = {offset: _nexts(step, following[offset]) for offset, step in steps.items()}
    handlers = _handlers(site.code, steps, nexts)
    ends = _RERAISES if "suppress" not in site.code.co_names else _RERAISES - {"WITH_EXCEPT_START"}
    edges = {
        offset: [*(after if steps[offset].opname not in ends else ()), *{handlers.get(offset, -1)} - {-1}]
        for offset, after in nexts.items()
    }
    call = max(offset for offset in steps if offset <= site.offset)  # the call's inline caches may follow it
    returning = _leading_to([offset for offset, step in steps.items() if step.opname in _RETURNS], edges)
    if handlers.get(call) in returning:
        return "goes on if its {} raises"
    after = _reached_from(nexts[call], edges)
    itself = [offset for offset in _calls_of_itself(site.code, steps) if offset in after]
    is_result = any(name in _names("STORE_FAST", steps[offset]) for offset in after)  # crop = self.crop(x)
    later = [offset for offset in after if _loads(steps[offset], name, but_variables=is_result)]
    sides = {branch: set(edges[branch]) for branch in after if steps[branch].opname not in _ITERATES}

    def deciding(branches: Iterable[int], again: set[int]) -> list[int]:
        """Those of which one side leads to the call again, and another returns without it."""
        return [n for n in branches if again & sides[n] and not again >= returning & sides[n]]

    decides = any(
        deciding(_reached_from(nexts[each], edges) & sides.keys(), _leading_to([each, *itself], edges))
        for each in [call, *later]
    )
    for branch in deciding(sides, _leading_to(later, edges)):
        test = _tested(branch, steps)
        bound = {name for n in after & _leading_to([branch], edges) for name in _names("STORE", steps[n])}
        decides |= call in test or any(bound & _names("LOAD", steps[n]) for n in test)
    return "may call its {} again after a look at the result" if decides else None


def _nexts(step: dis.Instruction, following: int) -> list[int]:
    """The instructions that may come after this one while nothing raises; -1 follows the last."""
    jumps = step.opcode in dis.hasjrel or step.opcode in dis.hasjabs
    always = jumps and step.opname.startswith("JUMP_") and "_IF_" not in step.opname
    found = [] if always or step.opname in _ENDS or following < 0 else [following]
    return [*found, step.argval] if jumps and step.opname not in _PUSHES else found


def _handlers(code: types.CodeType, steps: _Steps, nexts: _Edges) -> dict[int, int]:
    """For each instruction, where Python goes on if it raises; none for one that no block covers."""
    if sys.version_info >= (3, 11):
        entries = dis.Bytecode(code).exception_entries
        return {offset: e.target for e in entries for offset in steps if e.start <= offset < e.end}
    blocks: dict[int, tuple[int, ...]] = {0: ()}
    todo = [0]
    while todo:
        offset = todo.pop()
        step, held = steps[offset], blocks[offset]
        targets = {step.argval: held} if step.opname in _PUSHES else {}
        if step.opname in _PUSHES:
            held = (*held, step.argval)
        elif step.opname == "POP_BLOCK":
            held = held[:-1]
        for target, blocks_there in {**dict.fromkeys(nexts[offset], held), **targets}.items():
            if target not in blocks:
                blocks[target] = blocks_there
                todo.append(target)
    return {offset: held[-1] for offset, held in blocks.items() if held}


def _tested(branch: int, steps: _Steps) -> list[int]:
    """The instructions that computed what a branch tests."""
    found: list[int] = []
    depth = 0
    for offset in sorted((offset for offset in steps if offset < branch), reverse=True):
        found.append(offset)
        depth += dis.stack_effect(steps[offset].opcode, steps[offset].arg, jump=False)
        if depth == 1:
            if steps[offset].opname != "COPY":
                break
            depth = 0  # `or` and `and` test a copy of a value, which was computed before
    return found


def _names(kind: str, step: dis.Instruction) -> set[str]:
    """The variables or attributes that an instruction may load, or store."""
    if kind not in step.opname or "CONST" in step.opname:
        return set()
    return set(step.argval) if isinstance(step.argval, tuple) else {step.argval}


def _loads(step: dis.Instruction, name: str, *, but_variables: bool = False) -> bool:
    if but_variables and "FAST" in step.opname:
        return False
    return step.opname.startswith("LOAD_") and step.opname != "LOAD_CONST" and step.argval == name


def _calls_of_itself(code: types.CodeType, steps: _Steps) -> Iterator[int]:
    """Where a method calls itself by its name, or gets an item of its first argument."""
    before: list[tuple[int, object]] = []  # each instruction's effect on the stack, and a variable it loads
    for offset, step in steps.items():
        if _loads(step, code.co_name):
            yield offset
        if step.opname == "BINARY_SUBSCR" or (step.opname == "BINARY_OP" and step.argrepr == "[]"):
            depth = 0
            for effect, variable in reversed(before):
                depth += effect
                if depth == 2:  # where what is subscripted was pushed
                    if code.co_name == "__getitem__" and variable == code.co_varnames[0]:
                        yield offset
                    break
        effect = dis.stack_effect(step.opcode, step.arg, jump=False)
        if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and before:  # not the variable itself any more
            before.append((before.pop()[0] + effect, None))
            continue
        loaded = [] if "LOAD_FAST" not in step.opname else [step.argval]
        if loaded and isinstance(step.argval, tuple):  # two instructions in one
            loaded = list(step.argval[step.opname.startswith("STORE") :])
        before += [(effect - len(loaded), None), *((1, name) for name in loaded)]


def _reached_from(starts: Iterable[int], edges: _Edges) -> set[int]:
    found: set[int] = set()
    todo = list(starts)
    while todo:
        offset = todo.pop()
        if offset not in found:
            found.add(offset)
            todo += edges.get(offset, ())
    return found


def _leading_to(ends: Iterable[int], edges: _Edges) -> set[int]:
    """The instructions from which one of these can be reached, with these."""
    backwards: dict[int, list[int]] = {}
    for offset, targets in edges.items():
        for target in targets:
            backwards.setdefault(target, []).append(offset)
    return _reached_from(ends, backwards)
