"""Ray on this machine, for tests."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'kvblend[ray]'")
# No token in the home directory; workers that are not the last in the queue for the processor, and are not killed because
# something else on this machine takes its memory.
QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
