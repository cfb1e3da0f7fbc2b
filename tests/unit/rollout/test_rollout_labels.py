"""Version labels and model limits: whose weights, and what may be sent."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_klear.errors import RolloutError
from megatron_klear.rollout.labels import VersionLabels
from megatron_klear.rollout.limits import ModelLimits
from megatron_klear.types import GenerationRequest

REQUEST = GenerationRequest("r7", (0, 9), 3)


def test_a_label_gives_its_number_back() -> None:
    labels = VersionLabels("ab12")
    assert labels.text(31) == "ab12.31"
    assert [labels.number(labels.text(n)) for n in (0, 31)] == [0, 31]


@pytest.mark.parametrize("text", ("default", "", "31", "ab13.31", "ab12", "ab12.", "ab12.x", "ab12.-1", "x.ab12.3"))
def test_labels_of_others_have_no_number(text: str) -> None:
    assert VersionLabels("ab12").number(text) is None


def test_each_run_has_a_tag_of_its_own() -> None:
    assert VersionLabels().tag != VersionLabels().tag


@pytest.mark.parametrize(
    ("changes", "message"),
    (
        ({"token_ids": (0, 10)}, r"request r7 holds token id 10, expected ids from 0 to 9"),
        ({"token_ids": (-1,)}, r"request r7 holds token id -1, expected ids from 0 to 9"),
        ({"token_ids": ()}, r"request r7 needs at least one prompt token"),
        ({"max_new_tokens": 0}, r"request r7 needs at least one prompt token and one new token"),
        ({"max_new_tokens": 4}, r"r7: 2 prompt tokens \+ 4 new tokens = 6, but max_position_embeddings is 5"),
    ),
)
def test_what_no_engine_could_take_is_refused(changes: dict[str, object], message: str) -> None:
    limits = ModelLimits(vocab_size=10, max_context=5)
    limits.check(REQUEST)
    with pytest.raises(RolloutError, match=message):
        limits.check(dataclasses.replace(REQUEST, **changes))  # type: ignore[arg-type]
