"""The contract that Megatron multiplies gradients by one."""

from __future__ import annotations

import pytest
import torch

from megatron_klear.parallel.scale import assert_sum_contract, balance_loss_coefficient, loss_tuple


def test_a_loss_goes_to_megatron_as_it_is() -> None:
    loss, report = torch.tensor(3.0, requires_grad=True), {"a": 1}
    scaled, num_tokens, same_report = loss_tuple(loss, report)
    assert scaled is loss and same_report is report
    # An integer zero: Megatron divides gradients by the summed count, and leaves them alone at 0.
    assert num_tokens.dtype == torch.int and num_tokens.item() == 0 and num_tokens.shape == ()


def test_the_contract_holds() -> None:
    assert_sum_contract(calculate_per_token_loss=True, gradient_scaling_factor=1.0)


def test_averaging_is_refused() -> None:
    with pytest.raises(AssertionError, match="calculate_per_token_loss must be True: losses are sums"):
        assert_sum_contract(calculate_per_token_loss=False, gradient_scaling_factor=1.0)
    with pytest.raises(AssertionError, match=r"DDP scales gradients by 0\.5, expected 1\.0"):
        assert_sum_contract(calculate_per_token_loss=True, gradient_scaling_factor=0.5)


def test_the_balance_loss_is_divided_by_all_micro_batches() -> None:
    assert balance_loss_coefficient(0.6, num_micro_batches=3, data_size=4) == pytest.approx(0.05)
