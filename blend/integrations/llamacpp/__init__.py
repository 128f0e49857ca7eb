"""kvblend inside unpatched llama.cpp: a GGUF model as a decoder, through the library's public functions (docs/llamacpp.md).

Read: `library` (functions and layouts) -> `model` (a GGUF file) -> `context` (sequences of cells, passes) -> `state` (KV as
bytes) -> `rotation` and `admission` (may this model be blended in this build) -> `rows` (runs and waves) -> `cache` (a
prompt's KV in cells) -> `decoder` (what `Blender` needs) -> `loading`, `generation`, `slots`.

In: `RowRequest`s, as for any decoder. Out: KV in llama.cpp's cells, from which it decodes.
"""
