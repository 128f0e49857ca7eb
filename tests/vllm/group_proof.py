"""What processes of one model tell and give each other over vLLM's own group, while they get in each other's way.

Usage: group_proof.py FOLDER, in which it leaves found.json

Two processes share one core, as on a busy machine: either is put aside anywhere in an exchange, and the other runs on as far as
the exchange lets it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch

LAYERS, ROWS, HEADS, WIDTH = 3000, 3, 2, 8
PATIENCE = 120.0  # seconds; processes that have lost each other wait for ever


def states(layer: int, rank: int, which: int) -> torch.Tensor:
    """What a process has of a layer: queries, keys or values, each another number."""
    return torch.full((ROWS, HEADS, WIDTH), float(layer * 8 + rank * 3 + which))


def run(rank: int, port: int) -> int:
    """How many layers were not what they should be."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import get_tp_group
    from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.platforms import current_platform

    from blend.integrations.vllm.rows_group import Group

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    current_platform.import_kernels()  # with vLLM's exchange over shared memory
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(2, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        ensure_model_parallel_initialized(2, 1)
    shared, wrong = get_tp_group(), 0
    assert shared.device_communicator.supports_tensor_dict, "not over shared memory"
    group = Group(shared, 2 * HEADS)
    for layer in range(LAYERS):
        total = shared.all_reduce(torch.full((ROWS, 16), float(layer + rank)))  # as the layers of a model do
        found = group.gathered(*(states(layer, rank, which) for which in range(3)))
        whole = [torch.cat([states(layer, one, which) for one in range(2)], dim=1) for which in range(3)]
        alike = all(torch.equal(*pair) for pair in zip(found, whole, strict=True)) if group.leads else True
        wrong += not (alike and torch.equal(total, torch.full_like(total, 2.0 * layer + 1)))
        told = layer if group.leads else group.hear()
        if group.leads:
            group.tell(layer)
        wrong += told != layer
    return wrong


def main(folder: Path) -> None:
    """Both processes, and what the worse of them found."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__]
    env = {**os.environ, "VLLM_DIST_IDENT": f"kvblend-{os.getpid()}", "OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen([*command, str(rank), str(port)], env=env) for rank in range(2)]
    try:
        wrong = max(one.wait(PATIENCE) for one in both)
    except subprocess.TimeoutExpired:
        wrong = -1
    finally:
        for one in both:
            one.kill()
    (folder / "found.json").write_text(json.dumps({"layers": LAYERS, "wrong": wrong}))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        main(Path(sys.argv[1]))
    else:
        sys.exit(min(100, run(int(sys.argv[1]), int(sys.argv[2]))))
