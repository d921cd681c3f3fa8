"""One module per library: it judges the library's transforms by their classes and their parameters.

:mod:`hotset.determinism.verdict` imports a module once it has to judge a transform of its library. The module
does not import the library itself: the transform is an instance of one of the library's classes, so the
library is in ``sys.modules`` by then. Every module has these:

- ``judge(step)``: the :class:`~hotset.determinism.verdict.Verdict`, or None for an object that is not a
  transform of the library.
- ``children_in_order(container)``: the children of a container that does nothing but apply them in order;
  None for any other object, which stays whole.
- ``WRAPS_CHILDREN``: whether the containers do work around each child, so that inside them only containers of
  the same library may be opened. Such a module also has
- ``part(container, children, first)``: callables that apply some of its children in order, with all that the
  container does around them; ``first`` says whether these are the container's first children.
"""
