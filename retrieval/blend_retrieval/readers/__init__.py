"""Readers of file formats, by suffix. Each reader and its parser are loaded for the first such file.

In: the bytes of a file, and the title to use when the file names none. Out: `Parts`, the documents of the file (`Part`) and
what was not read of it (`Fault`). `blend_retrieval.loading` calls them, and the reader of mails for attachments.

Read `base` (the types) and `text` (the simplest reader), then a folder: `html` (which others use), `office`, `sheets`, `pdf`,
`markup`, `mails`. Formats that need a single file stand beside them, as does what several folders use.

To add a reader:

1. Write a function `(data: bytes, title: str) -> Parts` in a file of its own, in the folder that fits. Import the parser inside
   it: where it is not installed, `reader_for` says what to install. Add the parser to the extra [docs] in pyproject.toml.
2. Decode text with `blend_retrieval.decoding.decode`, and pass its note on with `base.notes`.
3. Return a `Part` for each document, with its markup: "markdown" if its text is, "plain" or "code" if it is as in the file.
   Return a `Fault` for each place that was not read. Raise `UnreadableError` with the reason if that is the whole file.
4. Name its suffix in `_READERS` below, and test it in `tests/retrieval/test_kinds.py`: no value may change.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from pkgutil import resolve_name

from blend_retrieval.decoding import DecodingError
from blend_retrieval.installation import install_command
from blend_retrieval.readers.base import TEXT_FIELD, Fault, Part, Parts, Reader, UnreadableError

__all__ = [
    "KINDS",
    "SUFFIXES",
    "TEXT_FIELD",
    "Fault",
    "Part",
    "Parts",
    "Reader",
    "UnreadableError",
    "has_text_name",
    "is_plain",
    "is_template",
    "kind_of",
    "reader_for",
]

_SOURCE_CODE = (
    "bash bat c cc cfg conf cpp cs css cxx dart go gradle groovy h hpp hs ini java jl js json jsx kt lua m mjs ml php pl proto "
    "ps1 py pyi r rb rs scala sh sql swift toml ts tsx vue xml yaml yml zig"
)
_READERS = {  # module and function
    ".md": "text:read_markdown",
    ".markdown": "text:read_markdown",
    ".txt": "text:read_text",
    ".text": "text:read_text",
    ".rst": "markup.rst:read_rst",
    ".html": "html.html:read_html",
    ".htm": "html.html:read_html",
    ".xhtml": "html.html:read_xhtml",
    ".pdf": "pdf.pdf:read_pdf",
    ".jsonl": "jsonl:read_jsonl",
    ".csv": "sheets.delimited:read_csv",
    ".tsv": "sheets.delimited:read_tsv",
    ".tab": "sheets.delimited:read_tsv",
    ".docx": "office.docx:read_docx",
    ".pptx": "office.pptx:read_pptx",
    ".xlsx": "sheets.xlsx:read_xlsx",
    ".xlsm": "sheets.xlsx:read_xlsx",
    ".xltx": "sheets.xlsx:read_xlsx",
    ".xltm": "sheets.xlsx:read_xlsx",
    ".ods": "sheets.ods:read_ods",
    ".ots": "sheets.ods:read_ods",
    ".fods": "sheets.ods:read_fods",
    ".parquet": "sheets.columns:read_parquet",
    ".feather": "sheets.columns:read_feather",
    ".arrow": "sheets.columns:read_feather",
    ".epub": "epub:read_epub",
    ".eml": "mails.mail:read_eml",
    ".ics": "mails.events:read_ics",
    ".ipynb": "notebook:read_ipynb",
    ".odt": "office.odf:read_odt",
    ".ott": "office.odf:read_odt",
    ".odp": "office.odf:read_odp",
    ".otp": "office.odf:read_odp",
    ".rtf": "office.rtf:read_rtf",
    ".org": "markup.org:read_org",
    ".tex": "markup.tex:read_tex",
    ".adoc": "markup.adoc:read_adoc",
    ".asciidoc": "markup.adoc:read_adoc",
    ".vtt": "captions:read_captions",
    ".srt": "captions:read_captions",
    ".log": "text:read_code",
}
KINDS = f"{' '.join(_READERS)}, source code, and text in files without a suffix"
_READERS |= {f".{kind}": "text:read_code" for kind in _SOURCE_CODE.split()}
SUFFIXES = tuple(_READERS)
_TEXT_NAMES = (  # what stands before the first dot or hyphen, such as in Dockerfile.dev and LICENSE-2.0
    "authors changelog changes codeowners containerfile contributing contributors copying dockerfile gemfile gnumakefile "
    "install jenkinsfile justfile licence license maintainers makefile news notice procfile rakefile readme todo vagrantfile"
)
_TEMPLATES = (".example", ".sample", ".template", ".dist")  # files to copy, such as .env.example


def kind_of(name: str) -> str | None:
    """How a file is read, by its name: its suffix; "" for text without one; None if its kind is not read."""
    path = PurePosixPath(name)
    suffix = path.suffix.lower()
    if suffix in _READERS:
        return suffix
    is_named = path.name not in ("", "..")
    has_no_kind = not suffix or suffix in _TEMPLATES or has_text_name(name)
    return "" if is_named and has_no_kind else None


def has_text_name(name: str) -> bool:
    """Whether files of this name are text by custom, such as Makefile and LICENSE."""
    first = re.split(r"[.-]", PurePosixPath(name).name.lower(), maxsplit=1)[0]
    return first in _TEXT_NAMES.split()


def is_plain(name: str) -> bool:
    """Whether files of this name are text that needs no parser: Markdown, plain text, source code."""
    kind = kind_of(name)
    return kind == "" or _READERS.get(kind or "", "").startswith("text:")


def is_template(name: str) -> bool:
    """Whether a file is there to be copied, such as .env.example, which is hidden but keeps no secrets."""
    return name.lower().endswith(_TEMPLATES)


def reader_for(suffix: str, text_field: str = TEXT_FIELD) -> Reader | None:
    """The reader of files with this suffix (such as ".md", in any case; "" for text without one), or None.

    text_field: the field of JSONL records, and of rows of Parquet and Feather, that holds their text.
    """
    name = _READERS.get(suffix.lower()) if suffix else "text:read_unnamed"
    if name is None:
        return None
    options = {"text_field": text_field} if name.startswith(("jsonl:", "sheets.columns:")) else {}

    def read(data: bytes, title: str) -> Parts:
        try:
            reader = resolve_name(f"blend_retrieval.readers.{name}")
            return list(reader(data, title, **options))
        except ImportError as error:
            raise UnreadableError(f"reading it needs {error.name}; run: {install_command('docs')}") from None
        except DecodingError as error:
            raise UnreadableError(str(error)) from None

    return read
