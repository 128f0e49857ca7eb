"""kvblend: KV-cache reuse and RAG prefill for HuggingFace decoders.

Importing this package loads neither torch nor transformers; the public names below are loaded on first use.
"""

__version__ = "0.1.0"
