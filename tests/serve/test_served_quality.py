"""A quality that is asked for, in the engine: the same rows in pieces, beside other prompts."""

from collections.abc import Callable

import httpx
import pytest
from cases import cache_chunks, make_layout
from engines import MakeEngine, ask
from rooms import QUESTION
from served import CHAT, Served

from blend.config import BlendConfig
from blend.eval.estimates import FixedRatio
from blend.model.generate import generate
from blend.quality import RATIOS, Estimator, Signals
from blend.sampling import Sampling

ASKED = BlendConfig(quality=0.05)


@pytest.fixture(autouse=True)
def _verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `blend verify` had passed for models with recurrent layers."""
    monkeypatch.setattr("blend.prefill.resources.may_blend", lambda decoder: True)


def estimator() -> Estimator:
    told = [0.01 * 1.3**i for i in range(20)]
    signals = [[Signals(0.5, one * share) for share in (1, 0.5, 0.2, 0.1)] for one in told]
    kl = [tuple(one * share for share in (1, 0.5, 0.2, 0.1)) for one in told]
    return Estimator(tuple(map(tuple, signals)), tuple(kl), ((False,) * 4,) * len(kl))


LAYOUT = make_layout(chunks=(23, 31, 27, 40))


@pytest.mark.parametrize("name", ["llama", "qwen3.5", "bamba", "falcon-h1", "lfm2"])
@pytest.mark.parametrize("ratio", [RATIOS[0], RATIOS[-1], 1.0])
def test_in_pieces_beside_others_it_is_the_same(name: str, ratio: float, make_engine: MakeEngine) -> None:
    engine = make_engine(name, pass_rows=18, most_running=4)
    blender = engine.blender
    cache_chunks(blender, LAYOUT)
    blender.estimators = FixedRatio(ratio)
    blend = blender.prefill(LAYOUT, config=ASKED)
    assert blend.quality is not None
    expected = list(generate(blender.decoder, blend, LAYOUT.token_ids, max_new_tokens=6, eos_token_id=None).token_ids)
    sampling = Sampling(max_tokens=6, ignore_eos=True)
    for answer in [ask(engine, LAYOUT, sampling, config=ASKED, cold=True) for _ in range(3)]:
        assert answer.wait().tokens == expected
        assert answer.figures.quality["ratio"] == blend.quality.ratio


def test_a_request_names_its_quality(serve: Callable[..., Served]) -> None:
    served = serve()
    rag = served.state.service.tenant("").rag()
    library = rag.blender.library(rag.template.prefix)
    library.store.write_artifact(library.isolated.identity.quality_name, estimator().to_bytes())

    def ask_for(**own: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 2}
        return httpx.post(
            f"{served.url}{CHAT}", json={**body, "kvblend": {"retrieve": {"top_k": 4}, **own}}, timeout=60
        )

    plain, generous, strict = (
        ask_for(**own).json()["kvblend"]["figures"] for own in ({}, {"quality": 50}, {"quality": 1e-6})
    )
    assert plain["quality"] is None
    assert (generous["quality"]["ratio"], generous["quality"]["target"]) == (RATIOS[0], 50)
    assert (strict["quality"]["ratio"], strict["quality"]["kl"]) == (1.0, 0.0)
    assert strict["rows_computed"] > generous["rows_computed"]
    assert served.counts()["expected_kl_count"] == 2
    assert ask_for(quality=0).status_code == 400
