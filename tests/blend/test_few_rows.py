"""Linear layers over few rows multiply in other ways, and are left as they were found."""

from __future__ import annotations

import pytest
import torch

from blend.model import cpu
from blend.model.cpu import BY_COLUMNS, MOST_ROWS, FewRows, few_rows_pay_off


class Own(torch.nn.Linear):
    """A layer of somebody's own."""


@pytest.mark.parametrize("rows", [1, 2, BY_COLUMNS, BY_COLUMNS + 1, 45, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("bias", [True, False])
def test_the_result_is_the_same(rows: int, bias: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(24, 40, bias=bias), torch.nn.Linear(40, 8, bias=bias))
    x = torch.randn(1, rows, 24, generator=torch.Generator().manual_seed(rows))
    with torch.inference_mode():
        expected = model(x)
        with FewRows(model):
            found = model(x)
    assert torch.allclose(found, expected, atol=1e-5)
    assert found.is_contiguous()
    assert found.shape == expected.shape


def test_the_model_is_left_as_found_and_what_others_replaced_stays() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Own(4, 4), torch.nn.Linear(4, 4))
    mine = vars(model[2])["forward"] = lambda x: x
    turn = FewRows(model)
    with turn:
        assert "forward" in vars(model[0])
        assert "forward" not in vars(model[1])
        assert vars(model[2])["forward"] is mine
        with turn:
            pass
        assert "forward" in vars(model[0])
    assert "forward" not in vars(model[0])
    assert vars(model[2])["forward"] is mine


def test_a_pass_that_records_gradients_is_left_to_torch() -> None:
    place = torch.device("cpu"), torch.float32
    with torch.enable_grad():
        assert not few_rows_pay_off(8, *place)
    with torch.no_grad():
        assert few_rows_pay_off(8, *place) == torch.backends.mkl.is_available()
        assert not few_rows_pay_off(1, *place)
        assert not few_rows_pay_off(MOST_ROWS + 1, *place)


def test_without_the_private_function_few_rows_are_multiplied_as_many_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(24, 40))
    x = torch.randn(1, 2 * BY_COLUMNS, 24, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = model(x)
        monkeypatch.setattr(cpu, "ONEDNN_LINEAR", "_none_of_this_name")
        with FewRows(model):
            assert torch.equal(model(x), expected)
