from __future__ import annotations

import math
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from megatron_klear.errors import DataError
from megatron_klear.report import theme
from megatron_klear.report.curves import PANELS, curves_svg, plot_curves, series, smoothed


def records(num_steps: int, *metrics: str) -> list[dict[str, float]]:
    return [{"step": step, **dict.fromkeys(metrics, 0.1 * step)} for step in range(1, num_steps + 1)]


def test_series_is_ordered_and_has_gaps_for_what_is_not_finite() -> None:
    found = series([{"step": 2, "m": 4.0}, {"step": 1, "m": math.inf}, {"step": 3, "other": 1.0}], "m")
    assert found is not None
    np.testing.assert_array_equal(found.steps, [1, 2])
    np.testing.assert_array_equal(found.values, [math.nan, 4.0])


@pytest.mark.parametrize("lines", [[], [{"step": 1}], [{"step": 1, "m": math.nan}]])
def test_series_without_a_finite_value_is_none(lines: list[dict[str, float]]) -> None:
    assert series(lines, "m") is None


def test_smoothed_is_the_mean_of_the_neighbours() -> None:
    values = np.array([1.0, 2.0, 6.0, math.nan, math.nan, math.nan, 5.0])
    expected = [1.5, 3.0, 4.0, 6.0, math.nan, 5.0, 5.0]
    np.testing.assert_allclose(smoothed(values, 3), expected)


def test_png_is_1200_pixels_wide_and_not_empty(tmp_path: Path) -> None:
    path = plot_curves({"a": records(20, "train/loss", "rollout/reward")}, tmp_path / "deep" / "curves.png")
    with Image.open(path) as image:
        assert image.width == 1200
        pixels = np.asarray(image.convert("RGB"))
    colour = np.array(list(bytes.fromhex(theme.SERIES[0].light[1:])))
    assert (pixels == colour).all(axis=-1).sum() > 100


def test_only_panels_with_data_are_drawn() -> None:
    svg = curves_svg({"a": records(3, "train/loss"), "b": records(3, "eval/accuracy")})
    titles = [panel.title for panel in PANELS if f">{panel.title}<" in svg]
    assert titles == ["Loss", "Held-out accuracy"]


def test_every_panel_can_be_drawn_at_once() -> None:
    metrics = [metric for panel in PANELS for metric in panel.metrics]
    svg = curves_svg({"a": records(12, *metrics), "b": records(1, *metrics)})
    assert sum(f">{panel.title}<" in svg.replace("&gt;", ">") for panel in PANELS) == len(PANELS)


def test_svg_is_well_formed_named_and_coloured_by_variables() -> None:
    svg = curves_svg({"<run>": records(3, "train/loss"), "b": records(3, "train/loss")})
    root = ElementTree.fromstring(svg)
    assert root.tag.endswith("svg")
    assert "<run>" in [element.text for element in root.iter() if element.tag.endswith("text")]
    for name in ("series-1", "series-2", "ink", "muted", "surface"):
        assert f"var(--{name})" in svg
    assert not [colour.light for colour in theme.CHART if colour.light in svg]


def test_more_runs_than_colours_can_be_drawn() -> None:
    svg = curves_svg({f"run {i}": records(3, "train/loss") for i in range(8)})
    assert "run 7" in svg


def test_nothing_to_plot_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing to plot in a: expected at least one finite value of train/loss"):
        plot_curves({"a": records(3, "train/lr")}, tmp_path / "curves.png")
