"""Linear layers whose products are oneDNN's: the gradients of torch's, in every layout."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from dist.pool import Pool
from dist.world import ONE, Arrays, Layout
from megatron_klear_kernels.linear.autograd import FAST_FROM

ALL, NONE = 0, 1 << 60
LAYERS, LINEARS = 2, 4


@functools.cache
def by_torch(pool: Pool) -> Arrays:
    gradients, num_products = pool.run(1, "dist.jobs_linear:one_update", ONE, NONE)[0]
    assert num_products == 0
    return gradients


@pytest.mark.parametrize(
    "layout",
    [
        ONE,
        Layout(tp=2),
        Layout(tp=2, sp=True),
        Layout(tp=2, pp=2),
        Layout(recompute="full"),
        Layout(recompute="selective layernorm"),
        Layout(tp=2, recompute="selective layernorm"),
    ],
    ids=str,
)
def test_gradients_do_not_depend_on_whose_products_they_are(pool: Pool, layout: Layout) -> None:
    found, num_products = pool.run(layout.world_size, "dist.jobs_linear:one_update", layout, ALL)[0]
    wanted = by_torch(pool)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert np.linalg.norm(found[name] - gradient) <= 1e-5 * np.linalg.norm(gradient), name
    # Four layers' linear layers: in the pass before the update, its forward (again with full recompute), its backward.
    assert num_products >= (0 if layout.sp else LAYERS // layout.pp * LINEARS * 4)


def test_the_products_of_this_model_are_too_small_for_onednn_by_default(pool: Pool) -> None:
    found, num_products = pool.run(1, "dist.jobs_linear:one_update", ONE, FAST_FROM)[0]
    assert num_products == 0
    for name, gradient in by_torch(pool).items():
        np.testing.assert_array_equal(found[name], gradient, err_msg=name)
