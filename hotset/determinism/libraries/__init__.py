"""What each library's structure says of its transforms, one file per library; read only if the user has it.

Every file gives the same three functions, and imports nothing of its library: what is judged is an instance
of one of its classes, so that the library is in ``sys.modules`` by then.

- ``judge(step)``: the :class:`~hotset.determinism.verdict.Verdict`, or None for what is no transform of the
  library.
- ``opened(container)``: the children of a container that does no more than apply them in order; else None.
- ``part(container, children, first)``: callables that apply some of its children, one after the other, with
  all that the container does around them; ``first`` says whether the stretch begins where the container
  begins.

``PLAIN`` tells whether the containers do nothing at all around a child, so that those of other libraries may
be opened inside them.
"""
