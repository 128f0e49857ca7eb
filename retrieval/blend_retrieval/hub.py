"""A short request to the model hub, because loading from an unreachable hub retries for over a minute."""

from __future__ import annotations

import os

TIMEOUT_S = 10.0


def why_not(name: str, *, timeout_s: float = TIMEOUT_S) -> str | None:
    """Why the hub does not offer a model that is not on this machine, as the end of a sentence; None if it does.

    Requests one file, because the hub describes gated models to all but withholds their files.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return "is not here and HF_HUB_OFFLINE is set"
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=timeout_s)
    except GatedRepoError:
        return "is gated: accept its terms on the hub and log in (`hf auth login`)"
    except EntryNotFoundError:
        return None  # the model exists; loading it reports missing files
    except (RepositoryNotFoundError, HFValidationError):
        return "is neither a folder here nor on the model hub"
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        return f"is not here and the hub is out of reach ({reason})"
    return None
