"""Mathematics: exact comparison where it is enough, math-verify in killable processes where it is not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

from megatron_klear.rewards.answers import (
    MAX_ANSWER_CHARS,
    Answer,
    compare,
    exact_decimals,
    last_box,
    read_answer,
    to_ascii,
)
from megatron_klear.rewards.format import final_answer
from megatron_klear.rewards.pool import Job, Verdict, WorkerPool
from megatron_klear.types import RewardRequest, Score

CACHE_SIZE = 10_000


@dataclass(frozen=True, slots=True)
class Prediction:
    """What is judged of a response: the content of its last box, or (`boxed` False) everything after the thinking."""

    text: str
    boxed: bool


# A label and what is judged against it.
Pair = tuple[str, Prediction]


def find_prediction(response: str) -> Prediction:
    r"""The last `\boxed{...}` after the last `</think>`; without one, the whole remainder, maybe empty."""
    remainder = final_answer(response)
    box = last_box(remainder)
    return Prediction(remainder, boxed=False) if box is None else Prediction(box, boxed=True)


class VerdictCache:
    """The last verdicts by (gold, prediction). Failures are not kept: the next try may be luckier."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._verdicts: OrderedDict[Pair, Verdict] = OrderedDict()

    def get(self, key: Pair) -> Verdict | None:
        """The verdict, if there is one; it is then the last to be forgotten."""
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
        return self._verdicts.get(key)

    def put(self, key: Pair, verdict: Verdict) -> None:
        """Keep a verdict, and forget the one unused for longest if there are too many."""
        if verdict in ("timeout", "worker_died"):
            return
        self._verdicts[key] = verdict
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > self._size:
            self._verdicts.popitem(last=False)


class MathReward:
    """Scores answers against LaTeX labels. Owns its worker processes: `close()` it, or use it in a `with`."""

    def __init__(self, *, correct: float, incorrect: float, timeout_s: float, num_workers: int) -> None:
        self._correct = correct
        self._incorrect = incorrect
        self._pool = WorkerPool(num_workers=num_workers, timeout_s=timeout_s)
        self._cache = VerdictCache(CACHE_SIZE)

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the verifiers that run now; none before the first answer that needs one."""
        return self._pool.pids

    def __call__(self, requests: Sequence[RewardRequest]) -> list[Score]:
        """One score a request, in order. Equal pairs of label and answer are judged once."""
        keys = [(request.prompt.answer, find_prediction(request.response)) for request in requests]
        verdicts: dict[Pair, Verdict | None] = {key: self._judge_quickly(*key) for key in dict.fromkeys(keys)}
        hard = [key for key, verdict in verdicts.items() if verdict is None]
        found = self._pool.run([_job(read_answer(gold), prediction) for gold, prediction in hard])
        for key, verdict in zip(hard, found, strict=True):
            self._cache.put(key, verdict)
            verdicts[key] = verdict
        return [self._score(verdicts[key], key[1]) for key in keys]

    def parses(self, answer: str) -> bool:
        """True if `answer` can serve as a label."""
        return self.parses_all([answer])[0]

    def parses_all(self, answers: Sequence[str]) -> list[bool]:
        """Which answers can serve as labels: plain numbers, words, and what the library reads before its deadline."""
        golds = [read_answer(answer) for answer in answers]
        hard = [gold.latex for gold in golds if gold.key and not gold.is_plain]
        found = iter(self._pool.run([Job(exact_decimals(latex)) for latex in hard]))
        return [gold.is_plain or (bool(gold.key) and next(found) == "correct") for gold in golds]

    def _judge_quickly(self, gold_text: str, prediction: Prediction) -> Verdict | None:
        gold = read_answer(gold_text)
        if not gold.key:
            return "bad_gold"
        if not prediction.text:
            return "wrong"
        if len(prediction.text) <= MAX_ANSWER_CHARS:
            same = compare(gold, read_answer(prediction.text))
            if same is not None:
                return "correct" if same else "wrong"
        return self._cache.get((gold_text, prediction))

    def _score(self, verdict: Verdict | None, prediction: Prediction) -> Score:
        assert verdict is not None
        if verdict == "correct":
            return Score(self._correct, "correct")
        if verdict in ("timeout", "worker_died", "bad_gold"):
            return Score(None, verdict, failure=verdict)
        return Score(self._incorrect, verdict if prediction.text else "no_answer")

    def close(self) -> None:
        """End the worker processes."""
        self._pool.close()

    def __enter__(self) -> MathReward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _job(gold: Answer, prediction: Prediction) -> Job:
    latex = exact_decimals(gold.latex)
    # Only short answers are normalised here: nothing that a model writes may keep this process busy.
    if prediction.boxed and len(prediction.text) <= MAX_ANSWER_CHARS:
        return Job(latex, exact_decimals(read_answer(prediction.text).latex))
    return Job(latex, to_ascii(prediction.text), prediction.boxed)
