"""Rows of several prompts in one forward pass, and a prompt in pieces: each gets what it gets alone and whole."""

from dataclasses import replace

import pytest
import torch
from blends import assert_kv, views
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


def whole(dec: Decoder, ids: torch.Tensor) -> RowRequest:
    return rows(ids, torch.arange(len(ids)), dec.new_cache(len(ids) + 7))


def prefilled(dec: Decoder, ids: torch.Tensor) -> BlendedCache:
    request = whole(dec, ids)
    dec.prefill([request])
    return request.cache


def disturbed(dec: Decoder, ids: torch.Tensor) -> BlendedCache:
    """A cache whose middle is not what the model would compute."""
    cache, draw = prefilled(dec, ids), torch.Generator().manual_seed(0)
    for part in (part for view in views(cache) for part in view):
        part[:, :, 5:30] += 0.1 * torch.randn(part[:, :, 5:30].shape, generator=draw)
    return cache


def requests(dec: Decoder) -> list[RowRequest]:
    """Scattered rows that narrow twice, a whole prefill, one step of decoding, rows that narrow at another layer."""
    last = min(2, len(dec.rotations) - 1)
    several = (
        Narrowing(1, lambda keys, values: SCATTERED[1:]),
        Narrowing(last, lambda keys, values: FEWER, keep_kv=True),
    )
    once = Narrowing(last, lambda keys, values: torch.tensor([0, 9, 13]))
    held, other = prompt(40), prompt(14)
    return [
        rows(held[SCATTERED], SCATTERED, disturbed(dec, held), *several),
        whole(dec, prompt(18)),
        rows(torch.tensor([7]), torch.tensor([25]), prefilled(dec, prompt(25))),
        rows(other, torch.arange(14), disturbed(dec, other), once),
    ]


@pytest.mark.parametrize(
    ("name", "dtype", "copies"),
    [
        *((*case.values, "as measured") for case in IN_BOTH_DTYPES),
        *((name, torch.float32, "side by side") for name in (*CORE, "gemma2", "gpt-oss")),
    ],
)
@torch.inference_mode()
def test_prompts_in_one_pass_get_what_each_gets_alone(name, dtype, copies, monkeypatch):
    """Also with the keys of all prompts side by side, where the model would let them lie where they are."""
    dec = decoder(name, dtype)
    alone, together = requests(dec), requests(dec)
    logits = torch.cat([dec.prefill([request]) for request in alone])
    if copies == "side by side":
        monkeypatch.setattr(dec, "reads_caches", False)
    assert_close(dec.prefill(together), logits)
    for mine, theirs in zip(together, alone, strict=True):
        assert_kv(views(mine.cache), views(theirs.cache))


@pytest.mark.parametrize("name", FAMILIES)
@torch.inference_mode()
def test_many_sequences_decode_greedily_as_each_does_alone(name):
    dec, prompts = decoder(name), [prompt(n) for n in (5, 17, 30, 9)]
    answers = []
    for ids in prompts:
        request = whole(dec, ids)
        answer = [dec.prefill([request]).argmax(-1)]
        for _ in range(6):
            answer.append(dec.append(answer[-1][None], request.cache)[:, -1].argmax(-1))
        answers.append(torch.cat(answer))
    starts = [whole(dec, ids) for ids in prompts]
    found = [dec.prefill(starts).argmax(-1)]
    for _ in range(6):
        found.append(dec.decode([token.view(1, 1) for token in found[-1]], [one.cache for one in starts]).argmax(-1))
    assert torch.equal(torch.stack(found, 1), torch.stack(answers))


@pytest.mark.parametrize(("name", "sizes"), [*((name, (1, 2, 4)) for name in FAMILIES), ("llama", (3, 1, 1, 1, 1))])
@torch.inference_mode()
def test_a_prefill_in_pieces_of_ascending_rows_is_the_same(name, sizes):
    dec, ids = decoder(name), prompt(40)
    at_once = rows(ids[SCATTERED], SCATTERED, disturbed(dec, ids))
    logits, cache = dec.prefill([at_once]), disturbed(dec, ids)
    for piece in SCATTERED.split(sizes):
        found = dec.prefill([rows(ids[piece], piece, cache)])
    assert_close(found, logits)
    assert_kv(views(cache), views(at_once.cache))


@torch.inference_mode()
def test_what_each_observer_sees_is_its_own_prompt():
    dec, seen = decoder("llama"), []
    first, second = requests(dec)[1:3]
    dec.prefill([second, replace(first, observe=seen.append)])
    assert [call.layer for call in seen] == list(range(LAYERS))
    assert [call.key.shape[2] for call in seen] == [18] * LAYERS
    assert torch.equal(seen[0].positions, torch.arange(18))
