"""Documents, chunks, embeddings and the index: everything before a prompt. Independent of generating models.

    load_documents -> Document -> chunk_documents -> Chunk -> update_index -> ChunkIndex -> Retriever -> RankedChunks

Importing this package loads no torch, faiss or parser: each is loaded where it is first needed.
"""

from blend_retrieval.chunking import Chunk, chunk_documents, divide_in_steps
from blend_retrieval.corpus_stdlib import write_stdlib_corpus
from blend_retrieval.document import Document, LoadedDocuments, SkippedDocument
from blend_retrieval.embedders import Embedder, load_embedder
from blend_retrieval.errors import RetrievalError
from blend_retrieval.index import ChunkIndex, CurrentIndex, IndexUpdate, passage_text, update_index
from blend_retrieval.loading import load_bytes, load_documents
from blend_retrieval.rerank import Reranker
from blend_retrieval.retriever import RankedChunk, RankedChunks, Retriever

__all__ = [
    "Chunk",
    "ChunkIndex",
    "CurrentIndex",
    "Document",
    "Embedder",
    "IndexUpdate",
    "LoadedDocuments",
    "RankedChunk",
    "RankedChunks",
    "Reranker",
    "RetrievalError",
    "Retriever",
    "SkippedDocument",
    "chunk_documents",
    "divide_in_steps",
    "load_bytes",
    "load_documents",
    "load_embedder",
    "passage_text",
    "update_index",
    "write_stdlib_corpus",
]
