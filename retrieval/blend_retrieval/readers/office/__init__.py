"""Texts and slides of office programs: Word, PowerPoint, OpenDocument and Rich Text Format.

Read `docx` -> `docx_text` (what is written into the text before it is converted), then `pptx` -> `slide_text`, `odf` ->
`odf_html`, and `rtf` -> `rtf_layout`. All write numbers of lists by `numbered`. In: the bytes of a file. Out: Markdown.
"""
