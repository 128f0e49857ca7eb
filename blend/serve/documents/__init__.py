"""Uploads: received, queued, indexed and cached, while the server answers from the same corpus.

Read: `documents` (what the HTTP side calls) -> `uploads` (names and limits: clients are not trusted) -> `queue` (on disk,
shared by all servers over the folder) -> `worker` (one thread a corpus: reads, indexes, queues caches) -> `caches` (applies
a change).
In: files and texts of clients. Out: a `ChunkIndex`, chunk caches in the store, a `DocumentStatus` for each document.
"""
