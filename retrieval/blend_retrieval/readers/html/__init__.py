"""HTML, which the readers of many other formats write first.

Read `html`: it parses a page, calls the other files for what Markdown lacks a word for, and converts the rest.
In: the bytes of a page, or HTML that another reader made. Out: Markdown.
"""
