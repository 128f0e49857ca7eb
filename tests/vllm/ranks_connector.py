"""kvblend's connector with workers of tensor parallelism of which the second is late, or fails, for prompts that say so."""

import time

from offline import FAILS, LATE

from blend.integrations.vllm.connector import KVBlend
from blend.integrations.vllm.contract import Load, LoadFailedError
from blend.integrations.vllm.stage import STAGES, CopyStage


class Uneven(CopyStage):
    def fill(self, load: Load) -> None:
        if self.rank == 1 and load.token_ids[-1] == LATE:
            time.sleep(0.5)
        if self.rank == 1 and load.token_ids[-1] == FAILS:
            raise LoadFailedError("the second worker fails in a test")
        super().fill(load)


STAGES["copied"] = Uneven

__all__ = ["KVBlend"]
