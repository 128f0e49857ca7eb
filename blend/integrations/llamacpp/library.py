"""The functions of a llama.cpp library through ctypes, and the layouts of its structures, which are looked at, not assumed.

Builds of llama.cpp differ in their structures. The ones that are passed by value are found by their default values here, and
`admission` compares what a context was asked for with what it then says of itself.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from blend.errors import ConfigError
from blend_retrieval.installation import install_command

TRIED = "xllamacpp 2026.10.11549"  # the builds that the tests ran with
_PARAMETERS = 512  # bytes for a structure of parameters, more than any version's; the callee reads as much as it knows
_UNSET = (
    -1
)  # the default of four neighbouring enumerations of `llama_context_params`, the last of which is flash attention
_SWITCHES = bytes((0, 1, 1, 1, 1, 0))  # embeddings, offload_kqv, no_perf, op_offload, swa_full, kv_unified by default
_F16 = 1


class Parameters(ctypes.Structure):
    """`llama_context_params` or `llama_model_params`, as bytes."""

    _fields_ = [("bytes", ctypes.c_ubyte * _PARAMETERS)]  # ctypes wants a list


class DecodeBatch(ctypes.Structure):
    """`llama_batch`."""

    _fields_ = [
        ("n_tokens", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embd", ctypes.c_void_p),
        ("pos", ctypes.POINTER(ctypes.c_int32)),
        ("n_seq_id", ctypes.POINTER(ctypes.c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("logits", ctypes.POINTER(ctypes.c_int8)),
    ]


class GraphTensor(ctypes.Structure):
    """`ggml_tensor`, a node of a computation graph."""

    _fields_ = [
        ("type", ctypes.c_int32),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int32),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    ]


class _ArenaOptions(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = [("size", ctypes.c_size_t), ("buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


OnNode = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
"""`ggml_backend_sched_eval_callback`: the node, whether it is asked for or computed, user data."""
_OnLog = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
_ERROR_LEVEL = 4

_POINTER, _INT, _SIZE, _TEXT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_size_t, ctypes.c_char_p
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ggml_add": (_POINTER, (_POINTER, _POINTER, _POINTER)),
    "ggml_backend_tensor_get": (None, (_POINTER, _POINTER, _SIZE, _SIZE)),
    "ggml_free": (None, (_POINTER,)),
    "ggml_get_data": (_POINTER, (_POINTER,)),
    "ggml_get_name": (_POINTER, (_POINTER,)),
    "ggml_init": (_POINTER, (_ArenaOptions,)),
    "ggml_nbytes": (_SIZE, (_POINTER,)),
    "ggml_new_tensor_2d": (_POINTER, (_POINTER, _INT, ctypes.c_int64, ctypes.c_int64)),
    "ggml_op_name": (_TEXT, (_INT,)),
    "ggml_view_1d": (_POINTER, (_POINTER, _POINTER, ctypes.c_int64, _SIZE)),
    "llama_backend_init": (None, ()),
    "llama_batch_free": (None, (DecodeBatch,)),
    "llama_batch_init": (DecodeBatch, (_INT, _INT, _INT)),
    "llama_context_default_params": (Parameters, ()),
    "llama_decode": (_INT, (_POINTER, DecodeBatch)),
    "llama_free": (None, (_POINTER,)),
    "llama_get_logits_ith": (ctypes.POINTER(ctypes.c_float), (_POINTER, _INT)),
    "llama_get_memory": (_POINTER, (_POINTER,)),
    "llama_init_from_model": (_POINTER, (_POINTER, Parameters)),
    "llama_log_set": (None, (_OnLog, _POINTER)),
    "llama_memory_clear": (None, (_POINTER, ctypes.c_bool)),
    "llama_memory_seq_cp": (None, (_POINTER, _INT, _INT, _INT, _INT)),
    "llama_memory_seq_pos_max": (_INT, (_POINTER, _INT)),
    "llama_memory_seq_rm": (ctypes.c_bool, (_POINTER, _INT, _INT, _INT)),
    "llama_model_default_params": (Parameters, ()),
    "llama_model_desc": (_INT, (_POINTER, _POINTER, _SIZE)),
    "llama_model_free": (None, (_POINTER,)),
    "llama_model_get_vocab": (_POINTER, (_POINTER,)),
    "llama_model_has_encoder": (ctypes.c_bool, (_POINTER,)),
    "llama_model_is_hybrid": (ctypes.c_bool, (_POINTER,)),
    "llama_model_is_recurrent": (ctypes.c_bool, (_POINTER,)),
    "llama_model_load_from_file": (_POINTER, (_TEXT, Parameters)),
    "llama_model_n_ctx_train": (_INT, (_POINTER,)),
    "llama_model_n_embd": (_INT, (_POINTER,)),
    "llama_model_n_params": (ctypes.c_uint64, (_POINTER,)),
    "llama_model_n_swa": (_INT, (_POINTER,)),
    "llama_model_size": (ctypes.c_uint64, (_POINTER,)),
    "llama_n_batch": (ctypes.c_uint32, (_POINTER,)),
    "llama_n_ctx": (ctypes.c_uint32, (_POINTER,)),
    "llama_n_seq_max": (ctypes.c_uint32, (_POINTER,)),
    "llama_n_ubatch": (ctypes.c_uint32, (_POINTER,)),
    "llama_set_n_threads": (None, (_POINTER, _INT, _INT)),
    "llama_state_seq_get_data": (_SIZE, (_POINTER, _POINTER, _SIZE, _INT)),
    "llama_state_seq_get_size": (_SIZE, (_POINTER, _INT)),
    "llama_state_seq_save_file": (_SIZE, (_POINTER, _TEXT, _INT, _POINTER, _SIZE)),
    "llama_state_seq_set_data": (_SIZE, (_POINTER, _POINTER, _SIZE, _INT)),
    "llama_tokenize": (
        _INT,
        (_POINTER, _TEXT, _INT, ctypes.POINTER(ctypes.c_int32), _INT, ctypes.c_bool, ctypes.c_bool),
    ),
    "llama_vocab_eos": (_INT, (_POINTER,)),
    "llama_vocab_is_eog": (ctypes.c_bool, (_POINTER, _INT)),
    "llama_vocab_n_tokens": (_INT, (_POINTER,)),
}


class _ErrorLog:
    """Errors that a library logs. It has one log for the whole process, so this is never freed."""

    def __init__(self) -> None:
        self._errors: list[str] = []
        self.callback = _OnLog(self._keep)

    def _keep(self, level: int, text: bytes, _: Any) -> None:
        if level == _ERROR_LEVEL:
            self._errors.append(text.decode(errors="replace"))

    def take(self) -> str:
        """The first line, in brackets; empty without one. All are forgotten."""
        lines = [line for text in self._errors for line in text.splitlines() if line.strip()]
        self._errors.clear()
        return f" ({lines[0].strip()})" if lines else ""


_LOG = _ErrorLog()


class ContextFields(NamedTuple):
    """Where fields of `llama_context_params` lie, in bytes. on_node: `cb_eval`. switches: the booleans at its end."""

    flash_attention: int
    on_node: int
    type_k: int
    type_v: int
    switches: int

    @property
    def full_window(self) -> int:
        """`swa_full`."""
        return self.switches + 4

    @property
    def unified(self) -> int:
        """`kv_unified`."""
        return self.switches + 5


class Library:
    """A llama.cpp library.

    Args:
        path: of the shared library; by default that of the package xllamacpp.

    Attributes:
        path: of the shared library.
        attention: the number of the operation of flash attention in graphs.

    Raises:
        ConfigError: there is none, it lacks a function, or its structures are of a kind that this version does not know.

    """

    def __init__(self, path: str | Path = "") -> None:
        self.path = Path(path) if path else find_library()
        try:
            self._functions = ctypes.CDLL(str(self.path))
        except OSError as error:
            raise ConfigError(f"{self.path} cannot be loaded as llama.cpp's library: {error}") from None
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._functions, name, None)
            if function is None:
                raise ConfigError(f"{self.path} lacks llama.cpp's function {name}; tried with {TRIED}")
            function.restype = result
            function.argtypes = arguments
        self.call("llama_log_set", _LOG.callback, None)
        self._check_tensors()
        self._check_batch()
        self.call("llama_backend_init")
        if path and (load_backends := getattr(self._functions, "ggml_backend_load_all", None)):
            load_backends()
        self.attention = self._operation("FLASH_ATTN_EXT")

    def call(self, name: str, *arguments: Any) -> Any:
        """Call one of the library's functions."""
        return getattr(self._functions, name)(*arguments)

    def logged_error(self) -> str:
        """What the library logged first as an error, in brackets; empty without one. It is forgotten."""
        return _LOG.take()

    @cached_property
    def context_fields(self) -> ContextFields:
        """The layout of `llama_context_params`. Raises `ConfigError` where the defaults do not show it."""
        raw = bytes(self.call("llama_context_default_params").bytes)
        ints = [int.from_bytes(raw[at : at + 4], "little", signed=True) for at in range(0, _PARAMETERS, 4)]
        enumerations = _place(lambda at: ints[at : at + 4] == [_UNSET] * 4, len(ints))
        types = _place(lambda at: at > enumerations and ints[at : at + 2] == [_F16] * 2, len(ints))
        switches = _place(lambda at: at > 4 * types + 8 and raw[at : at + 6] == _SWITCHES, _PARAMETERS)
        if min(enumerations, types, switches) < 0:
            raise ConfigError(f"{self.path} has context parameters of an unknown layout; tried with {TRIED}")
        type_k = 4 * types
        return ContextFields(4 * (enumerations + 3), type_k - 16, type_k, type_k + 4, switches)

    def _operation(self, wanted: str) -> int:
        """The number of an operation of graphs."""
        for number in range(200):
            name = self.call("ggml_op_name", number)
            if name is None:
                break
            if name.decode() == wanted:
                return number
        raise ConfigError(f"{self.path} knows no operation {wanted}; tried with {TRIED}")

    def _check_batch(self) -> None:
        """Have a batch made and compare its fields with what was asked for."""
        batch = self.call("llama_batch_init", 1, 0, 1)
        arrays = (batch.token, batch.pos, batch.n_seq_id, batch.seq_id, batch.logits)
        is_known = batch.n_tokens == 0 and batch.embd is None and all(map(bool, arrays))
        if not is_known:
            raise ConfigError(f"{self.path} has batches of an unknown layout; tried with {TRIED}")
        self.call("llama_batch_free", batch)

    def _check_tensors(self) -> None:
        """Make tensors and compare every field that is read of graphs with what was asked for."""
        arena = self.call("ggml_init", _ArenaOptions(1 << 16, None, False))
        try:
            address = self.call("ggml_new_tensor_2d", arena, _F16, 3, 5)
            view_address = self.call("ggml_view_1d", arena, address, 4, 6)
            total_address = self.call("ggml_add", arena, address, address)
            tensor, view, total = (GraphTensor.from_address(at) for at in (address, view_address, total_address))
            facts = (
                (tensor.type, tuple(tensor.ne), tuple(tensor.nb)) == (_F16, (3, 5, 1, 1), (2, 6, 30, 30)),
                tensor.data == self.call("ggml_get_data", address),
                address + GraphTensor.name.offset == self.call("ggml_get_name", address),
                (view.view_src, view.view_offs) == (address, 6),
                tuple(total.src)[:3] == (address, address, None),
                total.op == self._operation("ADD"),
            )
        finally:
            self.call("ggml_free", arena)
        if not all(facts):
            raise ConfigError(f"{self.path} has tensors of an unknown layout; tried with {TRIED}")


def find_library() -> Path:
    """The library in the package xllamacpp, which is not imported. Raises `ConfigError` without one."""
    package = find_spec("xllamacpp")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        for suffix in ("so", "pyd", "dylib"):
            if libraries := sorted(Path(folder).glob(f"xllamacpp*.{suffix}")):
                return libraries[0]
    raise ConfigError(f"blending in llama.cpp needs its library: {install_command('llamacpp')}, or name one")


def _place(fits: Callable[[int], bool], stop: int) -> int:
    """The first place that fits; -1 if there is none."""
    return next((at for at in range(stop) if fits(at)), -1)
