"""The model hub, asked briefly: loading from one that is out of reach would retry for over a minute."""

from __future__ import annotations

import os
from threading import Thread

from blend.errors import ConfigError

TIMEOUT_S = 10.0
BRIEFLY_S = 2.0  # where there is another way
_REMEDY = "pass a model directory, a reachable HuggingFace id, or a catalog name (`blend models`)"


def is_cached(name: str) -> bool:
    """Whether a model of this id was fetched from the hub before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def require_on_hub(name: str) -> None:
    """Raise `ConfigError` for a model that the hub does not have, does not give, or a hub that is out of reach."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        raise ConfigError(f"the model {name!r} is not here and HF_HUB_OFFLINE is set; {_REMEDY}")
    try:
        HfApi().model_info(name, timeout=TIMEOUT_S)
    except GatedRepoError:
        raise ConfigError(
            f"the model {name!r} is gated: accept its terms on the hub and log in (`hf auth login`)"
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise ConfigError(f"no model {name!r} on the model hub, and no such directory; {_REMEDY}") from None
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        raise ConfigError(
            f"the model {name!r} is not here and the hub is out of reach ({reason}); {_REMEDY}"
        ) from error


def answers_for(name: str, within_s: float = BRIEFLY_S) -> bool:
    """Whether the hub would give this model, said within so many seconds; looking up its address counts too."""
    found: list[bool] = []

    def ask() -> None:
        try:
            require_on_hub(name)
        except ConfigError:
            return
        found.append(True)

    asking = Thread(target=ask, daemon=True)  # one that hangs must not keep the process from ending
    asking.start()
    asking.join(within_s)
    return bool(found)
