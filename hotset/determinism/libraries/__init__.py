"""One module per library: what the structure of its transforms says about them.

A module is imported when a transform of its library is judged. It does not import the library itself: the
transform is an instance of one of the library's classes, so the library is in ``sys.modules`` by then. Every
module has these:

- ``judge(step)``: the :class:`~hotset.determinism.verdict.Verdict`, or None for an object that is not a
  transform of the library.
- ``opened(container)``: the children of a container that does nothing but apply them in order, or None.
- ``part(container, children, first)``: callables that apply some of its children in order, with all that the
  container does around them; ``first`` says whether these are the container's first children.
- ``PLAIN``: whether the containers do nothing at all around a child, so that containers of other libraries
  may be opened inside them.
"""
