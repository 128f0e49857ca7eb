"""The errors of `blend_retrieval`.

    RetrievalError
    ├── DocumentsError          nothing to read: a missing path, or no readable document under it
    ├── ChunkingError           a token limit that cannot be met
    ├── EmbeddingError          an embedding model that cannot be loaded
    │   └── ModelMissingError       one that is not on this machine, and that no hub offers
    ├── QueryError              an empty question, or a number of results below 1
    ├── CorpusError             a module that the demo corpus cannot be made from
    └── ChunkIndexError         an index that cannot be opened, read or written
        ├── IndexMissingError   no index in this folder
        ├── IndexDamagedError   an index that must not be used: truncated, altered, or of another format
        │   └── IndexNewerError     one that a later version wrote
        ├── IndexMismatchError  an index made with another embedding model
        └── IndexBusyError      an index that another process is writing

Every message is one line with the problem and its remedy. Command lines exit with `exit_code`.
"""


class RetrievalError(Exception):
    """Base of all errors that a user can cause or fix."""

    exit_code = 8


class DocumentsError(RetrievalError):
    """No document could be read."""


class ChunkingError(RetrievalError, ValueError):
    """A token limit that no chunk can meet."""


class EmbeddingError(RetrievalError):
    """An embedding model that cannot be loaded."""


class ModelMissingError(EmbeddingError):
    """A model that is not on this machine, and that cannot be fetched."""


class QueryError(RetrievalError, ValueError):
    """An empty question, or a number of results below 1."""


class CorpusError(RetrievalError, ValueError):
    """A module that the demo corpus cannot be made from."""


class ChunkIndexError(RetrievalError):
    """An index that cannot be opened, read or written."""


class IndexMissingError(ChunkIndexError):
    """No index where one was asked for."""


class IndexDamagedError(ChunkIndexError):
    """An index that is damaged or has another format."""


class IndexNewerError(IndexDamagedError):
    """A later version wrote the index. Nothing is damaged, and this version cannot read it."""


class IndexMismatchError(ChunkIndexError):
    """An index made with another embedding model."""


class IndexBusyError(ChunkIndexError):
    """An index that another process has been writing for too long."""
