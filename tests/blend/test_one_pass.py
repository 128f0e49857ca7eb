"""Rows of several prompts in one forward pass, and a prompt in pieces: each gets what it gets alone and whole."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from dense_reference import assert_close
from models import CORE, FAMILIES, IN_BOTH_DTYPES, LAYERS, VOCABULARY, decoder

from blend.model.cache import BlendedCache, Run
from blend.model.decoder import Decoder
from blend.model.passes import Narrowing, RowRequest

SCATTERED = torch.tensor([6, 7, 12, 20, 33, 38, 39])
FEWER = torch.tensor([7, 20, 39])


def prompt(length: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length))


def rows(ids: torch.Tensor, positions: torch.Tensor, cache: BlendedCache, *narrowings: Narrowing) -> RowRequest:
    return RowRequest(ids[None], Run.read(positions), cache, narrowings)


def prefilled(dec: Decoder, ids: torch.Tensor, room: int = 4) -> BlendedCache:
    cache = dec.new_cache(len(ids) + room)
    dec.prefill([rows(ids, torch.arange(len(ids)), cache)])
    return cache


def disturbed(dec: Decoder, ids: torch.Tensor) -> BlendedCache:
    """A cache whose middle is not what the model would compute."""
    cache, draw = prefilled(dec, ids), torch.Generator().manual_seed(0)
    for index in range(len(cache.layers)):
        for part in cache.view(index):
            part[:, :, 5:30] += 0.1 * torch.randn(part[:, :, 5:30].shape, generator=draw)
    return cache


def requests(dec: Decoder) -> list[RowRequest]:
    """Scattered rows that narrow twice, a whole prefill, one step of decoding, rows that narrow at another layer."""
    last = min(2, len(dec.rotations) - 1)
    several = (
        Narrowing(1, lambda keys, values: SCATTERED[1:]),
        Narrowing(last, lambda keys, values: FEWER, keep_kv=True),
    )
    once = (Narrowing(last, lambda keys, values: torch.tensor([0, 9, 13])),)
    held, whole, decoded, other = prompt(40), prompt(18), prompt(25), prompt(14)
    return [
        rows(held[SCATTERED], SCATTERED, disturbed(dec, held), *several),
        rows(whole, torch.arange(18), dec.new_cache(18)),
        rows(torch.tensor([7]), torch.tensor([25]), prefilled(dec, decoded)),
        rows(other, torch.arange(14), disturbed(dec, other), *once),
    ]


@contextmanager
def copying(dec: Decoder, copies: str) -> Iterator[None]:
    """Keys of all prompts side by side for attention, also where the model would let them lie where they are."""
    measured = dec.reads_caches
    dec.reads_caches = measured and copies == "as measured"
    try:
        yield
    finally:
        dec.reads_caches = measured


@pytest.mark.parametrize(
    ("name", "dtype", "copies"),
    [
        *((*case.values, "as measured") for case in IN_BOTH_DTYPES),
        *((name, torch.float32, "side by side") for name in (*CORE, "gemma2", "gpt-oss")),
    ],
)
@torch.inference_mode()
def test_prompts_in_one_pass_get_what_each_gets_alone(name, dtype, copies):
    dec = decoder(name, dtype)
    alone, together = requests(dec), requests(dec)
    logits = torch.cat([dec.prefill([request]) for request in alone])
    with copying(dec, copies):
        found = dec.prefill(together)
    assert_close(found, logits)
    for mine, theirs in zip(together, alone, strict=True):
        for index in range(len(mine.cache.layers)):
            for got, expected in zip(mine.cache.view(index), theirs.cache.view(index), strict=True):
                assert_close(got, expected)


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_many_sequences_decode_greedily_as_each_does_alone(name):
    dec, prompts = decoder(name), [prompt(n) for n in (5, 17, 30, 9)]
    answers = []
    for ids in prompts:
        cache = dec.new_cache(32)
        token = dec.prefill([rows(ids, torch.arange(len(ids)), cache)]).argmax(-1, keepdim=True)
        answers.append([int(token)])
        for _ in range(6):
            token = dec.append(token, cache)[:, -1].argmax(-1, keepdim=True)
            answers[-1].append(int(token))
    caches = [dec.new_cache(32) for _ in prompts]
    starts = [rows(ids, torch.arange(len(ids)), c) for ids, c in zip(prompts, caches, strict=True)]
    tokens = dec.prefill(starts).argmax(-1)
    found = [[int(token)] for token in tokens]
    for _ in range(6):
        tokens = dec.decode([token.view(1, 1) for token in tokens], caches).argmax(-1)
        for answer, token in zip(found, tokens, strict=True):
            answer.append(int(token))
    assert found == answers


@pytest.mark.parametrize(("name", "sizes"), [*((name, (1, 2, 4)) for name in FAMILIES), ("llama", (3, 1, 1, 1, 1))])
@torch.inference_mode()
def test_a_prefill_in_pieces_of_ascending_rows_is_the_same(name, sizes):
    dec, ids = decoder(name), prompt(40)
    whole = rows(ids[SCATTERED], SCATTERED, disturbed(dec, ids))
    logits, cache = dec.prefill([whole]), disturbed(dec, ids)
    for piece in SCATTERED.split(sizes):
        found = dec.prefill([rows(ids[piece], piece, cache)])
    assert_close(found, logits)
    for index in range(len(cache.layers)):
        for got, expected in zip(cache.view(index), whole.cache.view(index), strict=True):
            assert_close(got, expected)


@torch.inference_mode()
def test_what_each_observer_sees_is_its_own_prompt():
    dec, seen = decoder("llama"), []
    first, second = requests(dec)[1:3]
    watched = replace(first, observe=seen.append)
    dec.prefill([second, watched])
    assert [call.layer for call in seen] == list(range(LAYERS))
    assert [call.key.shape[2] for call in seen] == [18] * LAYERS
    assert torch.equal(seen[0].positions, torch.arange(18))
