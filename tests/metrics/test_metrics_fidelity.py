import math

import pytest
import torch

from blend.compare import ROWS_AT_ONCE, kl_divergence, top1_agreement


def plain_kl(reference: list[float], other: list[float]) -> float:
    """From the definition, in Python floats, without logarithms of sums."""
    p = [math.exp(value) / sum(map(math.exp, reference)) for value in reference]
    q = [math.exp(value) / sum(map(math.exp, other)) for value in other]
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("tokens", [ROWS_AT_ONCE, ROWS_AT_ONCE + 1])
def test_kl_agrees_with_its_definition_row_by_row(tokens):
    reference, other = torch.randn(2, tokens, 63, dtype=torch.float64)
    expected = list(map(plain_kl, reference.tolist(), other.tolist()))
    torch.testing.assert_close(kl_divergence(reference, other), torch.tensor(expected, dtype=torch.float64))


def test_kl_does_not_depend_on_shifts_and_survives_huge_logits():
    reference, other = torch.randn(2, 5, 111).double()
    torch.testing.assert_close(kl_divergence(reference + 1e4, other - 1e4), kl_divergence(reference, other))
    assert kl_divergence(torch.tensor([[1e4, 0.0]]), torch.tensor([[1e4, 0.0]])).item() == 0
    assert kl_divergence(torch.tensor([[1e4, 0.0]]), torch.tensor([[0.0, 1e4]])).item() == pytest.approx(1e4)


def test_kl_of_equal_distributions_is_zero_and_never_negative():
    logits = torch.randn(200, 500)
    divergence = kl_divergence(logits, logits + 1e-9)
    assert divergence.dtype == torch.float64
    assert (divergence >= 0).all()
    assert divergence.max() < 1e-12


def test_kl_of_half_precision_logits_is_computed_in_full_precision():
    reference, other = torch.randn(2, 3, 50).bfloat16()
    torch.testing.assert_close(kl_divergence(reference, other), kl_divergence(reference.double(), other.double()))


def test_excluded_tokens():
    excluded = torch.tensor([[0.0, 0.0, -math.inf]])
    everything = torch.tensor([[0.0, 0.0, 0.0]])
    assert kl_divergence(excluded, excluded).item() == 0
    assert kl_divergence(excluded, everything).item() == pytest.approx(math.log(3 / 2))
    assert kl_divergence(everything, excluded).item() == math.inf


def test_no_tokens():
    assert kl_divergence(torch.empty(0, 7), torch.empty(0, 7)).shape == (0,)
    assert top1_agreement(torch.empty(0, 7), torch.empty(0, 7)) is None


def test_top1_agreement_by_hand():
    reference = torch.tensor([[1.0, 2.0, 0.0], [5.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 3.0, 1.0]])
    other = torch.tensor([[0.0, 9.0, 0.0], [0.0, 5.0, 0.0], [0.0, 0.0, 7.0], [0.0, 3.0, 2.9]])
    assert top1_agreement(reference, other) == 0.75


def test_logits_of_a_forward_pass_that_went_wrong_are_refused():
    with pytest.raises(ValueError, match="contain NaN"):
        kl_divergence(torch.zeros(1, 2), torch.tensor([[0.0, math.nan]]))
