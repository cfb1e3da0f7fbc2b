"""Greedy accuracy with an engine and a reward made by hand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from megatron_klear.config.recipe import EvalConfig, RewardConfig
from megatron_klear.data.template import ChatTokenizer
from megatron_klear.errors import DataError, RewardError
from megatron_klear.training.evaluate import Evaluator, load_evaluator
from megatron_klear.types import Completion, GenerationRequest, Piece, Prompt, RewardRequest, Score

WORDS = ("<eos>", "one", "two", "three", "?")
EOS = WORDS.index("<eos>")
ARITHMETIC = RewardConfig(type="arithmetic", format="none")


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    return ChatTokenizer(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="?"))


class LastTokenEngine:
    """Repeats the prompt's last token and stops, or, for token 3, runs into the limit."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    @property
    def weight_version(self) -> int:
        return 0

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self.requests += requests
        made = []
        for request in requests:
            last = request.token_ids[-1]
            ids, reason = ((last,) * 4, "length") if last == 3 else ((last, EOS), "stop")
            made.append(Completion(request.request_id, ids, (-1.0,) * len(ids), reason, (Piece(len(ids), 0),)))
        return made

    def load_weights(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise NotImplementedError


class ExactReward:
    """Right if the response is the answer and was not cut off; `broken` answers cannot be verified."""

    def __init__(self, *, broken: Sequence[str] = ()) -> None:
        self.broken = broken
        self.requests: list[RewardRequest] = []

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        self.requests += requests
        return [self.judge(request) for request in requests]

    def judge(self, request: RewardRequest) -> Score:
        if request.response in self.broken:
            return Score(None, "timeout", failure="timeout")
        if request.truncated:
            return Score(-1.0, "truncated")
        right = request.response == request.prompt.answer
        # A reward of 1 is not what counts: recipes may set other numbers.
        return Score(0.25, "correct") if right else Score(1.0, "incorrect")

    def close(self) -> None:
        pass


PROBLEMS = (
    Prompt("a", (4, 1), answer="one"),
    Prompt("b", (4, 2), answer="two"),
    Prompt("c", (4, 2), answer="three"),
    Prompt("d", (4, 3), answer="three three three three"),
)


def test_accuracy_counts_answers_whose_reason_is_correct(tokenizer: ChatTokenizer) -> None:
    reward = ExactReward()
    accuracy = Evaluator(PROBLEMS, reward, tokenizer, EvalConfig()).run(LastTokenEngine())
    assert (accuracy.num_correct, accuracy.num_problems, accuracy.value) == (2, 4, 0.5)
    assert accuracy.reasons == Counter(correct=2, incorrect=1, truncated=1)
    assert [request.response for request in reward.requests] == ["one", "two", "two", "three three three three"]
    assert [request.truncated for request in reward.requests] == [False, False, False, True]


def test_each_problem_is_answered_once_and_greedily(tokenizer: ChatTokenizer) -> None:
    engine = LastTokenEngine()
    Evaluator(PROBLEMS, ExactReward(), tokenizer, EvalConfig(max_response_len=6)).run(engine)
    assert [request.token_ids for request in engine.requests] == [prompt.token_ids for prompt in PROBLEMS]
    for request in engine.requests:
        assert (request.temperature, request.max_new_tokens, request.stop_token_ids) == (0.0, 6, (EOS,))


def test_an_accuracy_over_a_part_of_the_problems_is_refused(tokenizer: ChatTokenizer) -> None:
    evaluator = Evaluator(PROBLEMS, ExactReward(broken=["two"]), tokenizer, EvalConfig())
    with pytest.raises(RewardError, match=r"evaluation could not verify 2 of 4 answers: Counter\(\{'timeout': 2\}\)"):
        evaluator.run(LastTokenEngine())


def test_without_problems_there_is_no_evaluator(tokenizer: ChatTokenizer) -> None:
    assert load_evaluator(EvalConfig(), ARITHMETIC, ExactReward(), tokenizer, max_context=64) is None


def problem_file(tmp_path: Path, *rows: tuple[str, str]) -> str:
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "label": label}) + "\n" for prompt, label in rows))
    return str(path)


def test_problems_come_from_the_recipe_and_unreadable_answers_are_left_out(
    tmp_path: Path, tokenizer: ChatTokenizer
) -> None:
    path = problem_file(tmp_path, ("one ?", "1"), ("two ?", "not a number"), ("three ?", "3"))
    config = EvalConfig(prompt_data=path, max_response_len=6)
    evaluator = load_evaluator(config, ARITHMETIC, ExactReward(), tokenizer, max_context=64)
    assert evaluator is not None
    assert [(prompt.answer, prompt.token_ids) for prompt in evaluator.prompts] == [("1", (1, 4)), ("3", (3, 4))]


def test_a_problem_that_leaves_no_room_for_the_answer_is_an_error(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    """Dropping it would give an accuracy over other problems than those that were asked for."""
    config = EvalConfig(prompt_data=problem_file(tmp_path, ("one two three ?", "1")), max_response_len=6)
    with pytest.raises(DataError, match="the prompt has 4 tokens"):
        load_evaluator(config, ARITHMETIC, ExactReward(), tokenizer, max_context=9)
