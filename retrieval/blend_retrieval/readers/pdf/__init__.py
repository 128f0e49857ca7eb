"""PDF: what is drawn on a page, in the order in which a person reads it.

Read `pdf` (a page's pieces) -> `headings` (which pieces are headings) -> `layout` (lines, columns and tables) -> `pages`
(tables that go on over pages). In: the bytes of a file. Out: Markdown, and the pages that hold no text.
"""
