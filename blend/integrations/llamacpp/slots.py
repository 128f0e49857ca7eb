"""Blended prompts as slot files of an unchanged `llama-server`, which restores them and computes only what follows.

The server must run the same GGUF file with the same cache types, one stream of cells (`-np 1` or `--kv-unified`) and
`--slot-save-path`. It reads a slot file with `POST /slots/0?action=restore` and `{"filename": NAME}`. The next request whose
prompt begins with the file's tokens computes only the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from blend.errors import ConfigError
from blend.files import written_by
from blend.integrations.llamacpp.cache import CellCache


def write_slot(cache: CellCache, token_ids: Sequence[int], file: str | Path) -> int:
    """Write the first rows of a prompt as a slot file; the file is complete or not there.

    Args:
        cache: of the prompt, from a `Blend` for instance.
        token_ids: of these rows. A prompt's last token may be among them: the server computes it again for its logits.
        file: is replaced.

    Returns:
        Its bytes.

    Raises:
        ConfigError: the cache has fewer rows, or the file cannot be written.

    """
    if not 0 < len(token_ids) <= cache.get_seq_length():
        raise ConfigError(
            f"the prompt has {cache.get_seq_length()} rows; give the token ids of some of the first of them"
        )
    target = Path(file)
    try:
        written = written_by(target, partial(cache.save, token_ids))
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error}") from None
    if not written:
        raise ConfigError(f"llama.cpp cannot write {target}; choose a folder that has room")
    return written
