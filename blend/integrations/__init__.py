"""kvblend inside other engines, through their own doors; nothing but entry points imports it.

Read: `blend.integrations.vllm`, the one engine so far.
To add an engine: a decoder that derives from `RowDecoder`, and drives `Blender.steps` between the engine's own passes.
"""
