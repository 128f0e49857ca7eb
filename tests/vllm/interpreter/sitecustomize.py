"""On the path of processes with vLLM's second model runner: its Triton kernels run in Triton's interpreter, on the CPU.

vLLM's CPU build uses Triton where it has a backend for CPUs. The interpreter needs none, so one in name is enough.
"""

from triton.backends import Backend, backends


class _Interpreter:
    @staticmethod
    def is_active() -> bool:
        return True


backends["cpu"] = Backend(compiler=None, driver=_Interpreter)
