"""Documents, chunks, embeddings and the index: everything before a prompt. Independent of generating models.

    load_documents -> Document -> chunk_documents -> Chunk -> update_index -> ChunkIndex -> Retriever -> RankedChunks

In: files and folders, or the bytes of an upload. Out: the chunks for a question, best first.

Read in this order:

1. `document` and `loading`: a `Document` and how files become some. What is not read is listed with a reason.
   `readers` has one file a format, `decoding` finds out encodings, `isolated` reads hostile files in a process apart.
2. `headings` and `plain_headings`: which lines are headings, by the document's markup.
3. `chunking`: passages within a limit of tokens. The headings above a passage are in its title.
4. `embedders`: texts to unit vectors; `hub` finds the weights.
5. `index` and `generations`: chunks and vectors in memory, and on disk.
6. `retriever`, with `lexical` and `rerank`: from a question to chunks, by meaning and by words.

`corpus_stdlib` and `demo_questions` make the demo corpus. `errors` has all errors that a user can cause.

To add a format, see `readers`. To add an embedder, derive from `embedders.base.Embedder`, and let `load_embedder` make it.

Importing this package loads no torch, faiss or parser: each is loaded where it is first needed.
"""

from blend_retrieval.chunking import Chunk, chunk_documents, divide_in_steps
from blend_retrieval.corpus_stdlib import write_stdlib_corpus
from blend_retrieval.document import Document, LoadedDocuments, SkippedDocument
from blend_retrieval.embedders import Embedder, load_embedder, load_embedder_or_words
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
    "load_embedder_or_words",
    "passage_text",
    "update_index",
    "write_stdlib_corpus",
]
