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


def test_every_loss_has_its_own_table_and_a_section_inside_a_section_one_of_its_own() -> None:
    headings = [line for line in render().splitlines() if line.startswith("## `loss")]
    names = ["ppo", "grpo", "clip_higher", "gppo", "ce_gppo", "cispo", "gspo", "package.module:function"]
    assert headings == [*(f"## `loss` with `type: {name}` (rl)" for name in names), "## `loss.erc` (rl)"]
    tables = dict(zip(names, render().split("## `loss` with")[1:], strict=True))
    assert "| `erc` | section or null | `null` |" in tables["gspo"]
    assert "| `gppo_beta_low` |" in tables["ce_gppo"]
    assert "| `gppo_beta_low` |" not in tables["cispo"]
    own, erc = tables["package.module:function"].split("## `loss.erc`")
    assert "| `type` | text | needed | Dotted path;" in own
    assert "| `erc` |" not in own
    assert "| `erc_low` | number > 0, < 1 | `0.05` |" in erc


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
    assert any(line.startswith("| `resume` | true or false or `auto` | `false` | true: go on from") for line in lines)
    assert "## `loss` with `type: gppo` (rl)" in lines
    assert "## `run` (sft, rl)" in lines
    assert any(
        line.startswith("| `eps_clip` | number > 0, < 1 or null | `0.2` | The weight is at least") for line in lines
    )
    # Raw, the tags would vanish from the page.
    assert not any("<think>" in line.replace("\\<", "") for line in lines)
