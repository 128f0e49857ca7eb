"""Markup that people write by hand: reStructuredText, AsciiDoc, Org and LaTeX.

Read `org`, the plainest, then `adoc`, `tex` and `rst`. Only reStructuredText has a library (docutils), which `rst_directives`
and `rst_roles` complete. In: the bytes of a file. Out: Markdown.
"""
