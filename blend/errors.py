"""Everything that kvblend raises on purpose.

    BlendError
    ├── ConfigError             an option outside its range, an unknown name, a selector that breaks its contract
    ├── PromptError             a prompt that cannot be laid out
    │   └── ContextLengthError      a prompt that does not fit the model's context
    ├── UnsupportedModelError   a decoder whose keys cannot be moved or whose attention cannot be driven
    ├── WeightsError            weights that cannot be fetched, or do not match their checksum
    ├── DatasetError            a question file that cannot be read
    ├── QualityError            answers that differ more from full recompute than was asked for
    ├── WorkersError            workers of a cluster that are lost, not given, or not like this process
    └── StoreError              a store that cannot be opened or written
        ├── EntryTooLargeError      one entry that is larger than a place for it takes
        ├── StoreUnreachableError   a place of a store that does not answer, or not in time; asked again later
        └── EntryDamagedError   one entry that is truncated, corrupted or foreign; callers recompute it

Every message is one line that names what is wrong and what to do about it. `exit_code` is what the command line exits with.
"""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the machine or a device is out of memory, however a library says it."""
    words = str(error).lower() if isinstance(error, RuntimeError) else ""
    return isinstance(error, MemoryError) or any(
        sign in words for sign in ("out of memory", "allocate memory", "bad_alloc", "can't start new thread")
    )


class BlendError(Exception):
    """Base of every error that kvblend raises on purpose.

    Attributes:
        exit_code: the exit status of the command line.

    """

    exit_code = 1


class ConfigError(BlendError, ValueError):
    """An option outside its range, an unknown name, or a selector that breaks its contract."""

    exit_code = 2


class PromptError(BlendError, ValueError):
    """A prompt that cannot be laid out, or that is longer than the model's context."""

    exit_code = 3


class ContextLengthError(PromptError):
    """A prompt that is longer than the model's context, or than the memory for its KV.

    Args:
        message: with the remedy for the operator.
        longest: most tokens of a prompt.
        rows: tokens of this prompt, if they were counted.

    """

    def __init__(self, message: str, longest: int = 0, rows: int | None = None) -> None:
        super().__init__(message)
        self.longest = longest
        self.rows = rows


class UnsupportedModelError(BlendError):
    """A decoder that kvblend refuses, with the reason."""

    exit_code = 4


class WeightsError(BlendError):
    """Weights that cannot be fetched, verified or converted."""

    exit_code = 5


class DatasetError(BlendError):
    """A question file that cannot be read."""

    exit_code = 6


class StoreError(BlendError):
    """A store that cannot be opened, read or written."""

    exit_code = 7


class EntryDamagedError(StoreError):
    """One store entry that must not be used: truncated, corrupted or written for something else."""


class EntryTooLargeError(StoreError):
    """An entry that is larger than the store takes; smaller ones fit."""


class StoreUnreachableError(StoreError):
    """A store that does not answer in time. Its content is unknown; nothing counts as missing."""


class StoreNotWritableError(StoreError):
    """A store whose disk is full or read-only. It can still be read."""


class StoreChangedError(StoreError):
    """Another machine changed what this one was about to replace."""


class QualityError(BlendError):
    """Answers that differ more from full recompute than was asked for, or a model that must not be blended."""

    exit_code = 10


class UndecidedError(BlendError):
    """What was measured is too little to tell whether a quality is kept."""

    exit_code = 11


class WorkersError(BlendError):
    """Workers of a cluster that were lost, were not granted, or would compute something else."""

    exit_code = 9
