"""PDF text through pypdf, page by page."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from blend_retrieval.readers.base import Fault, Part, UnreadableError, missing


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress pypdf's log of repaired irregularities. Real failures raise."""
    logger = logging.getLogger("pypdf")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def read_pdf(data: bytes, title: str) -> list[Part | Fault]:
    """Read one document, under the title in its metadata. Skips pages without text (scans)."""
    try:
        import pypdf
        from pypdf.errors import DependencyError
    except ImportError:
        raise missing("pypdf") from None
    try:
        with _quiet():
            reader = pypdf.PdfReader(io.BytesIO(data))
            if reader.is_encrypted and not reader.decrypt(""):
                raise UnreadableError("is protected by a password; save it without one")
            pages = [page.extract_text().strip() for page in reader.pages]
            named = reader.metadata.title if reader.metadata else None
    except (UnreadableError, MemoryError):
        raise
    except DependencyError as error:
        raise UnreadableError(_lacking(str(error))) from None
    except Exception as error:  # a damaged file can make pypdf raise almost any error
        raise UnreadableError(f"is not a PDF that pypdf can read ({type(error).__name__})") from error
    if not any(pages):
        raise UnreadableError("holds no text, only pictures; run it through OCR first")
    return [Part("", str(named or "").strip() or title, "\n\n".join(filter(None, pages)), "plain")]


def _lacking(message: str) -> str:
    """The reason for a file that pypdf reads only with another package."""
    if "AES" in message:
        return "is encrypted with AES, which pypdf decrypts only with the package cryptography; run: pip install cryptography"
    return f"cannot be read without another package ({' '.join(message.split())})"
