"""`blend.attach`: a model's own `generate` uses known text, and is otherwise as it was."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers

import blend
from blend import BlendConfig, Blender
from blend.errors import ConfigError, UnsupportedModelError
from blend.model.cache import cache_argument
from blend.model.decoder import Decoder
from blend.verified import keep_result
from tests.models import FAMILIES, HYBRIDS, build, tokenizer

PLAIN = BlendConfig(correction=False)


def words(count, seed):
    draw = random.Random(seed)
    return [draw.randrange(3, 96) for _ in range(count)]


PASSAGES = [words(120, seed) for seed in range(3)]
TEXTS = [tokenizer().decode(passage) for passage in PASSAGES]


def prompt(*order, question=1):
    ids = [
        1,
        *words(5, "lead"),
        *(token for number in order for token in PASSAGES[number]),
        *words(40, f"ask {question}"),
    ]
    return torch.tensor([ids])


def answered(model, ids, **options):
    given = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    return model.generate(ids, **given)[:, ids.shape[1] :].tolist()


@pytest.fixture
def blends(monkeypatch):
    """What blended prefill made, in order."""
    made = []
    prefill = Blender.prefill

    def recorded(*args, **options):
        made.append(prefill(*args, **options))
        return made[-1]

    monkeypatch.setattr(Blender, "prefill", recorded)
    return made


@pytest.mark.parametrize("name", FAMILIES)
def test_known_text_is_used_as_blended_prefill_uses_it(name, blends):
    model = build(FAMILIES[name])
    ids = prompt(1, 0)
    full = answered(model, ids)
    with blend.attach(model, tokenizer(), config=PLAIN) as attached:
        assert answered(model, ids) == full
        assert (attached.last.reason, attached.last.hits, blends) == ("nothing known", 0, [])
        assert attached.learn(*TEXTS) > 0
        blended = answered(model, ids)
        (made,) = blends
        assert attached.last.reason == ""
        assert attached.last.rows_stored >= 150
        assert attached.last.rows_computed < attached.last.rows == ids.shape[1]
    assert answered(model, ids) == full
    assert blended == [list(blend.generate(made.decoder, made, ids[0].tolist(), max_new_tokens=6).token_ids)]


@pytest.mark.parametrize("name", ["qwen3.5", "bamba", "falcon-h1", "lfm2"])
def test_a_model_with_recurrent_layers_blends_once_it_is_verified(name, blends, monkeypatch, tmp_path):
    monkeypatch.setenv("KVBLEND_CACHE", str(tmp_path))
    model = build(HYBRIDS[name])
    ids = prompt(1, 0)
    full = answered(model, ids)
    with blend.attach(model, tokenizer(), config=PLAIN) as attached:
        attached.learn(*TEXTS)
        assert answered(model, ids) == full
        assert "blend verify" in attached.last.reason
        assert blends == []
    keep_result(Decoder(model, tokenizer()), {"decision": "kept", "states": "composed"})
    with blend.attach(model, tokenizer(), config=PLAIN) as attached:
        attached.learn(*TEXTS)
        blended = answered(model, ids)
        (made,) = blends
        assert (attached.last.reason, attached.last.rows) == ("", ids.shape[1])
        assert attached.last.rows_stored > 150
        assert attached.last.rows_computed < ids.shape[1] / 2
        answered(model, ids.expand(2, -1))
        assert "several prompts" in attached.last.reason
    cache = made.decoder.native_cache(made.cache)
    assert cache.get_seq_length() == ids.shape[1] - 1
    assert blended == answered(model, ids, **{cache_argument(model): cache})


def test_all_of_a_text_is_learned_the_short_piece_at_its_end_too():
    model = build(FAMILIES["llama"])
    texts = [words(length, length) for length in range(150, 310, 20)]
    with blend.attach(model, tokenizer(), config=PLAIN) as attached:
        attached.learn(*map(tokenizer().decode, texts))
        for text in texts:
            answered(model, torch.tensor([[1, *text, *words(40, "ask")]]), max_new_tokens=1)
            assert attached.last.rows_stored >= len(text)


def test_a_beginning_that_stays_is_computed_once(blends):
    model = build(FAMILIES["llama"])
    asked = prompt(1, 0, question=2)
    with blend.attach(model, tokenizer(), config=PLAIN) as attached:
        attached.learn(*TEXTS)
        alone = answered(model, asked)
    with blend.attach(model, tokenizer(), config=PLAIN) as attached:
        attached.learn(*TEXTS)
        answered(model, prompt(2, 1))
        after_another = answered(model, asked)
        attached.learn(*TEXTS)
        with torch.no_grad():
            model.model.embed_tokens.weight[2:].mul_(1.5)
        answered(model, asked)
        answered(model, asked)
    ahead = [len(made.plan.ahead) for made in blends]
    assert after_another == alone
    assert ahead[0] == ahead[1] > ahead[2] == 0
    assert ahead[3:] == [ahead[0], 0], "rows of other weights are no beginning"


@pytest.fixture
def llama(blends):
    """A model that knows the passages."""
    model = build(FAMILIES["llama"])
    with blend.attach(model, tokenizer(), config=PLAIN) as attached:
        attached.learn(*TEXTS)
        model.attached = attached
        yield model


def alone(model, ids, **options):
    """The answers to prompts asked one by one."""
    return [answered(model, row[None, int((row == 0).sum()) :], **options)[0] for row in ids]


def test_prompts_of_one_batch_are_answered_as_alone(llama):
    short, long = prompt(2)[0], prompt(1, 0)[0]
    ids = torch.stack([torch.nn.functional.pad(row, (len(long) - len(row), 0)) for row in (short, long, long)])
    together = answered(llama, ids, attention_mask=(ids != 0).long())
    assert llama.attached.last.rows == len(short) + 2 * len(long)
    assert llama.attached.last.reason == ""
    assert together == alone(llama, ids)


def test_a_batch_in_which_one_prompt_has_known_text(llama):
    ids = torch.cat([prompt(1, 0), torch.tensor([[1, *words(285, "new")]])])
    expected = alone(llama, ids)
    assert answered(llama, ids) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"do_sample": True, "temperature": 0.8},
        {"num_return_sequences": 2, "do_sample": True},
        {"repetition_penalty": 1.3},
        {"return_dict_in_generate": True, "output_scores": True},
    ],
    ids=str,
)
def test_every_way_of_decoding_goes_on_from_the_blended_rows(llama, options, blends):
    ids = prompt(1, 0)
    given = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), **options}
    torch.manual_seed(1)
    out = llama.generate(ids, **given)
    assert llama.attached.last.reason == ""
    made = blends[-1]
    llama.attached.close()
    # The same rows as a cache that the user hands over.
    cache = transformers.DynamicCache()
    copies = given.get("num_beams", 1) * given.get("num_return_sequences", 1)
    for layer in range(4):
        cache.update(*(states[:, :, :-1].repeat(copies, 1, 1, 1) for states in made.cache.view(layer)), layer)
    torch.manual_seed(1)
    expected = llama.generate(ids, **{cache_argument(llama): cache}, **given)
    ours, theirs = (getattr(result, "sequences", result) for result in (out, expected))
    assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize(
    "draft", [lambda: {"assistant_model": build(FAMILIES["llama"], seed=1)}, lambda: {"prompt_lookup_num_tokens": 3}]
)
def test_a_draft_changes_no_answer(llama, draft):
    ids = prompt(1, 0)
    assert answered(llama, ids, **draft()) == answered(llama, ids)
    assert llama.attached.last.reason == ""


def own_cache(model, ids):
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(ids[:, :50], **{cache_argument(model): cache})
    return {cache_argument(model): cache}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (lambda model, ids: {"cache_implementation": "static"}, "StaticCache"),
        (own_cache, None),
        (
            lambda model, ids: {"attention_mask": torch.ones_like(ids).index_fill(1, torch.tensor([9]), 0)},
            "padded on the right",
        ),
        (lambda model, ids: {"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        (lambda model, ids: {"use_cache": False}, None),
    ],
)
def test_what_cannot_be_blended_is_left_alone(llama, options, reason, blends):
    ids = prompt(1, 0)
    attached = llama.attached
    out = llama.generate(ids, max_new_tokens=4, do_sample=False, **options(llama, ids))
    assert blends == []
    assert reason is None or reason in attached.last.reason
    attached.close()
    expected = llama.generate(ids, max_new_tokens=4, do_sample=False, **options(llama, ids))
    assert getattr(out, "sequences", out).tolist() == getattr(expected, "sequences", expected).tolist()


def test_logits_of_all_rows_are_the_models_own(llama, blends):
    ids = prompt(1, 0)
    with torch.no_grad():
        logits = llama(ids, **{cache_argument(llama): transformers.DynamicCache()}).logits
        scored = llama(ids).logits
    llama.attached.close()
    with torch.no_grad():
        expected = llama(ids).logits
    assert torch.equal(scored, expected)
    assert torch.equal(logits, expected)
    assert blends == []


def test_text_of_prompts_is_known_from_the_third_time_on(blends):
    model = build(FAMILIES["llama"])
    with blend.attach(model, tokenizer(), config=PLAIN) as attached:
        assert answered(model, prompt(0, 1, 2)) is not None
        assert (attached.last.reason, attached.last.learned) == ("nothing known", 0)
        answered(model, prompt(2, 0, 1, question=2))
        assert attached.last.learned >= 2
        answered(model, prompt(1, 2, 0, question=3))
        assert attached.last.learned == 0 or attached.last.hits >= 2
        assert attached.last.rows_stored > 150


def attributes(model):
    return {name: dict(value) if name.endswith("_hooks") else value for name, value in vars(model).items()}


def test_the_model_is_as_it_was():
    model = build(FAMILIES["llama"])
    model.train()
    before = attributes(model)
    with blend.attach(model, tokenizer()):
        assert not model.training
        assert attributes(model) != before
        with pytest.raises(ConfigError, match="attached already"):
            blend.attach(model, tokenizer())
    assert attributes(model) == before
    blend.attach(model, tokenizer()).close()
    assert attributes(model) == before


def test_an_error_in_the_middle_leaves_the_model_usable(llama, monkeypatch):
    ids = prompt(1, 0)
    expected = answered(llama, ids)

    class StoppedError(Exception):
        pass

    def stop(*_):
        raise StoppedError

    hook = llama.model.layers[2].register_forward_pre_hook(stop)
    with pytest.raises(StoppedError):
        answered(llama, ids)
    hook.remove()
    thread = threading.Thread(target=lambda: results.append(answered(llama, ids)))
    results = []
    thread.start()
    thread.join(30)
    assert results == [expected]


def test_threads_that_generate_at_once_get_their_own_answers(llama):
    orders = [(0, 1), (1, 2), (2, 0), (0, 2)] * 3
    expected = [answered(llama, prompt(*order)) for order in orders]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda order: answered(llama, prompt(*order)), orders)) == expected


def test_a_model_that_cannot_be_blended_is_refused_and_left_as_it_was():
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=96, bos_token_id=1, eos_token_id=2)
    gpt2 = transformers.GPT2LMHeadModel(config).train()
    before = attributes(gpt2)
    with pytest.raises(UnsupportedModelError):
        blend.attach(gpt2, tokenizer())
    assert attributes(gpt2) == before
    with pytest.raises(ConfigError, match=r"blend\.attach\(model, tokenizer\)"):
        blend.attach(build(FAMILIES["llama"]))


def test_a_text_generation_pipeline(llama):
    pipe = transformers.pipeline("text-generation", model=llama, tokenizer=tokenizer())
    text = tokenizer().decode(prompt(1, 0)[0, 1:])
    out = pipe(text, max_new_tokens=4, do_sample=False, return_full_text=False)
    assert llama.attached.last.hits >= 2
    assert len(out[0]["generated_text"].split()) <= 4
