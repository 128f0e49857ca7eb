"""From tokens to text: bytes and offsets of tokens with log-probabilities, and stop texts."""

import random
import time
from functools import partial
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from blend.serve.events import Output, Token, TopToken
from blend.serve.http.bodies import CompletionBody
from blend.serve.http.completions import TextReply
from blend.serve.outputs.detokenizer import Detokenizer, StopSearch, StopText
from tests.tiny_model import byte_level

TEXTS = (
    "Paris is the capital of France.",
    " Gr\u00fc\u00dfe \U0001f642\U0001f642 \u65e5\u672c\u8a9e",
    "a\n\n\tb  c",
    "e\u0301 <0x41>",
)
END = "<|end|>"


def of_pieces(decoder: Any) -> Tokenizer:
    """As sentencepiece has them: Llama 2, Mistral, Gemma."""
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *map(chr, range(0x21, 0x7F))]
    merges = [("\u2581", "t"), ("\u2581t", "h"), ("\u2581th", "e"), ("i", "s"), ("\u2581", "is"), ("\u2581", "P")]
    pieces = dict.fromkeys([*letters, *map("".join, merges)])
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    core = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoder
    return core


of_bytes = partial(byte_level, TEXTS[:1] * 3, 300, [END])
LLAMA = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
KINDS = {
    "bytes": of_bytes,  # as GPT-2, Llama 3 and Qwen have them
    "pieces": lambda: of_pieces(decoders.Sequence(LLAMA)),
    "pieces, metaspace": lambda: of_pieces(
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    ),
    "pieces, nothing dropped": lambda: of_pieces(decoders.Sequence(LLAMA[:3])),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=KINDS[request.param](), eos_token=END)


def said(tokenizer: Any, ids: list[int]) -> tuple[str, list[Token]]:
    """The answer of these tokens, and they as they are told."""
    speaker, text, told = Detokenizer(tokenizer), "", []
    for one in ids:
        told.append(speaker.spelled(Token(one, -1.0, (TopToken(one, -1.0),))))
        text += speaker.add(one)
    return text + speaker.finish(), told


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_make_up_the_answer_and_offsets_are_places_in_it(tokenizer: Any, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    answer, told = said(tokenizer, [*ids, tokenizer.eos_token_id])
    assert text.strip() in answer
    assert b"".join(one.raw for one in told) == answer.encode()
    assert (told[-1].text, told[-1].raw) == (END, b"")
    assert all(one.top[0][2:] == (one.text, one.raw) for one in told)
    (chunk,) = TextReply(CompletionBody(prompt="", logprobs=0), "m").chunks(Output(tuple(told), answer))
    offsets = chunk["choices"][0]["logprobs"]["text_offset"]
    for one, offset in zip(told[:-1], offsets, strict=False):
        if "\ufffd" not in one.text:
            assert answer[offset:].startswith(one.text)
    assert offsets[-1] == len(answer)


def test_any_tokens_of_bytes_make_up_what_is_said() -> None:
    """Halves of characters too, which the answer shows as U+FFFD."""
    tokenizer, chance = PreTrainedTokenizerFast(tokenizer_object=of_bytes(), eos_token=END), random.Random(0)
    for _ in range(300):
        ids = [chance.randrange(len(tokenizer)) for _ in range(chance.randrange(1, 20))]
        answer, told = said(tokenizer, ids)
        assert b"".join(one.raw for one in told).decode("utf-8", "replace") == answer
    assert sorted(Detokenizer(tokenizer).raw(i) for i in range(1, 257)) == [bytes([byte]) for byte in range(256)]


def test_ids_that_no_token_has_add_nothing(tokenizer: Any) -> None:
    assert said(tokenizer, [len(tokenizer) + 5])[1][0].raw == b""


def searched(stops: list[str], pieces: list[str]) -> tuple[list[str], str]:
    search = StopSearch(list(map(StopText, stops)))
    sent = [search.add(piece) for piece in pieces]
    return [*sent, search.finish()], search.found


def expected(stops: list[str], text: str) -> tuple[str, str]:
    for end in range(len(text) + 1):
        if complete := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, ""


def test_random_texts_in_random_pieces() -> None:
    chance = random.Random(0)
    for _ in range(500):
        stops = ["".join(chance.choices("ab", k=chance.randint(1, 6))) for _ in range(chance.randint(0, 4))]
        pieces = ["".join(chance.choices("abc", k=chance.randint(0, 5))) for _ in range(12)]
        sent, found = searched(stops, pieces)
        assert ("".join(sent), found) == expected(stops, "".join(pieces))


def test_no_more_is_held_back_than_may_begin_a_stop_text() -> None:
    assert searched(["ananas", "nab"], ["banan", "a", "nas"]) == (["b", "", "an", ""], "ananas")
    assert searched(["ananas"], ["bana", "na", "!"]) == (["b", "", "anana!", ""], "")
    assert searched(["end"], ["the e"]) == (["the ", "e"], "")


def test_long_stop_texts_take_little_time() -> None:
    """Also where every piece may begin one; the engine's thread searches."""
    search = StopSearch([StopText("a" * 250 + "b" + "a" * 250 + end) for end in "abcdefghijklmnop"])
    begin = time.process_time()
    for _ in range(300):
        search.add("aaaa")
    assert time.process_time() - begin < 300 * 0.005
