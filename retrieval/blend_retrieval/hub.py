"""A short request to the model hub, because loading from an unreachable hub retries for over a minute."""

from __future__ import annotations

import os
from threading import Thread

WITHIN_S = 10.0


def is_offline() -> bool:
    """Whether the user forbids requests to the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def why_not(name: str, *, within_s: float = WITHIN_S) -> str | None:
    """Why the hub does not offer a model that is not on this machine, as the end of a sentence; None if it does.

    Requests one file, because the hub describes gated models to all but withholds their files. Returns within `within_s`
    seconds, name resolution and all addresses of the hub included.
    """
    if is_offline():
        return "is not here and HF_HUB_OFFLINE is set"
    answers = [f"is not here and the hub is out of reach (no answer within {within_s:.0f} s)"]
    # A daemon: a hub that hangs must not keep the process alive.
    request = Thread(target=lambda: answers.append(_answer(name, within_s)), daemon=True)
    request.start()
    request.join(within_s)
    return answers[-1] or None


def _answer(name: str, timeout_s: float) -> str:
    """What `why_not` returns, or "" if the hub offers the model."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=timeout_s)
    except GatedRepoError:
        return "is gated: accept its terms on the hub and log in (`hf auth login`)"
    except EntryNotFoundError:
        return ""  # the model exists; loading it reports missing files
    except (RepositoryNotFoundError, HFValidationError):
        return "is neither a folder here nor on the model hub"
    except Exception as error:
        return f"is not here and the hub is out of reach ({reason_of(error)})"
    return ""


def reason_of(error: Exception) -> str:
    """The first line of an error's message, or its type if there is none."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:120]
