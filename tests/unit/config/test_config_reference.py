"""docs/config.md is what the code says."""

from __future__ import annotations

from pathlib import Path

from megatron_klear.config.names import leaves_of
from megatron_klear.config.reference import render

PAGE = Path(__file__).resolve().parents[3] / "docs" / "config.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render(), "refresh it: python -m megatron_klear.config.reference > docs/config.md"


def test_every_setting_is_on_the_page() -> None:
    page = render()
    for leaf in (*leaves_of("sft").values(), *leaves_of("rl").values()):
        assert f"| `{leaf.name}` | " in page


def test_a_row_says_type_bounds_default_and_meaning() -> None:
    lines = render().splitlines()
    assert (
        "| `lr` | number >= 0 | needed | Peak learning rate. 0 is allowed (a soak run whose weights must not move). |"
        in lines
    )
    assert any(line.startswith("| `lr_decay_iters` | integer > 0 or null | `null` | Updates until") for line in lines)
    assert any(
        line.startswith('| `lr_decay_style` | `constant`, `linear`, `cosine` | `"constant"` |') for line in lines
    )
    assert "## `loss` with `type: gppo` (rl)" in lines
    assert "## `run` (sft, rl)" in lines
    # Raw, the tags would vanish from the page.
    assert not any("<think>" in line.replace("\\<", "") for line in lines)
