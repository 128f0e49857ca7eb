"""Blended prefill: a prompt and its stored chunks in, the first token and a full cache out.

Read: `plan` (which rows may be recomputed, known without the device) -> `blender` (the five steps, in words) -> `prefill`
(one attempt: the steps themselves) -> `question` (the attention by which selectors choose) -> `correction_check`.
Chunks are opened and placed in `blend.chunks`, rows are chosen in `blend.select`, passes run in `blend.model`.

In: a `PromptLayout`, a `RowDecoder`, a `ChunkStore`, a `BlendConfig`. Out: a `Blend`.
To add a step: a method of `Prefill`, called in `Blender.steps`; nothing may read from the device before the last step.
"""
