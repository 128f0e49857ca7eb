"""The chunks of a corpus, counted: out of documents that are there, or out of a few numbers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from blend.chunks.surrogate import LARGEST_SHARE, choose
from blend.errors import ConfigError
from blend.indexing import divided
from blend.plan.sizes import CorpusSize

if TYPE_CHECKING:
    from blend.config import CorpusConfig
    from blend.prompt import PromptTemplate
    from blend_retrieval import LoadedDocuments

PREFIX = 40  # tokens before the first chunk, where no tokenizer says how many: about what the default prompt has


def counted(loaded: LoadedDocuments, template: PromptTemplate, config: CorpusConfig, context: int | None) -> CorpusSize:
    """Of documents, divided as `blend precompute` divides them; context: the model's longest prompt."""
    ids = tuple(dict.fromkeys(map(template.chunk_ids, divided(loaded.documents, template, config))))
    longest, prefix = max(map(len, ids), default=0), len(template.prefix)
    if config.surrogate_text:
        surrogate = [tuple(template.encode(config.surrogate_text)[: config.surrogate_tokens])]
    else:
        room = min(config.surrogate_tokens, (context or 1 << 62) - prefix - longest)
        surrogate = list(choose([one for one in ids if len(one) <= room], config.surrogate_tokens, len(ids)))
    behind = sum(map(len, surrogate))
    fits = [one for one in ids if one not in surrogate and (context is None or prefix + behind + len(one) <= context)]
    return _of(Counter(map(len, ids)), Counter(map(len, fits)) if behind else Counter(), prefix, behind, config)


def given(chunks: int, mean_tokens: int, config: CorpusConfig, prefix: int = PREFIX) -> CorpusSize:
    """Of so many chunks of this length. Raises `ConfigError` for chunks that are longer than they may be."""
    if mean_tokens > config.chunk_tokens:
        raise ConfigError(
            f"chunks of {mean_tokens:,} tokens on average are longer than --chunk-tokens {config.chunk_tokens:,}: raise it"
        )
    if config.surrogate_text:
        taken, behind = 0, config.surrogate_tokens
    else:
        taken = min(config.surrogate_tokens // mean_tokens, chunks // LARGEST_SHARE)
        behind = taken * mean_tokens
    contextual = Counter({mean_tokens: chunks - taken}) if behind else Counter[int]()
    return _of(Counter({mean_tokens: chunks}), contextual, prefix, behind, config)


def _of(lengths: Counter[int], contextual: Counter[int], prefix: int, behind: int, config: CorpusConfig) -> CorpusSize:
    isolated = lengths - contextual if config.one_copy else lengths
    return CorpusSize(lengths, isolated, contextual, prefix, behind)
