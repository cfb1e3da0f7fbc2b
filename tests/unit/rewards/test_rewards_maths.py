"""Mathematics with the library: a corpus of judgements, deadlines, deaths, and what happens to the workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe
from pathlib import Path

import psutil
import pytest

from megatron_klear.errors import RewardError
from megatron_klear.rewards.maths import MathReward, Prediction, VerdictCache, find_prediction
from megatron_klear.rewards.pool import Job, WorkerPool
from megatron_klear.types import Prompt, RewardRequest, Score

ROOT = Path(__file__).resolve().parents[3]
DATA = ROOT.parent / "shared" / "data" / "math"

HANG = "10^{10^{10}}"
FAILURES = ("timeout", "worker_died", "bad_gold")


@pytest.fixture(scope="module")
def reward() -> Iterator[MathReward]:
    with MathReward(correct=1.0, incorrect=-1.0, timeout_s=20.0, num_workers=1) as reward:
        yield reward


def request(gold: str, answer: str) -> RewardRequest:
    return RewardRequest(Prompt("p", (), answer=gold), f"<think>x</think>{answer}")


def boxed(gold: str, answer: str) -> RewardRequest:
    return request(gold, rf"\boxed{{{answer}}}")


# (label, what follows </think>, verdict). The first block holds the library's known mistakes and what we do instead.
CORPUS = [
    (r"\frac{2}{3}", r"\boxed{0.6666667}", "wrong"),
    (r"\frac{2}{3}", "It is $0.6666667$.", "wrong"),
    (r"\sqrt{2}", r"\boxed{1.41421356}", "wrong"),
    (r"\sqrt{2}", "It is $1.41421356$.", "wrong"),
    (r"\sqrt{2}", r"\boxed{1.4142135623730950488016887242097}", "wrong"),
    (r"\frac{\pi}{3}", r"\boxed{1.047197551196597746}", "wrong"),
    (r"(\frac{2}{3},2)", r"\boxed{(0.6666667,2)}", "wrong"),
    (r"1.6\times 10^{-19}", r"\boxed{1.7\times 10^{-19}}", "wrong"),
    (r"10^{-20}\pi", r"\boxed{10^{-21}\pi}", "wrong"),
    ("204_5", r"\boxed{204_7}", "wrong"),
    ("7", r"First \boxed{6} ... actually \boxed{7}", "correct"),
    ("6", r"First \boxed{6} ... actually \boxed{7}", "wrong"),
    ("100", r"\boxed{1e2}", "correct"),
    ("[0,1]", r"\boxed{0\le x\le 1}", "correct"),
    ("(0,1]", r"\boxed{0<x≤1}", "correct"),
    ("[0,1]", r"\boxed{0<x<1}", "wrong"),
    ("12", "\\boxed{\uff11\uff12}", "correct"),
    ("5", r"\boxed{\text{five}}", "correct"),
    ("5", r"\boxed{\text{six}}", "wrong"),
    (r"$\$32,348$", r"\boxed{32348}", "correct"),
    (r"\$32,\!348", r"\boxed{\$32,348}", "correct"),
    ("5", r"\boxed{5t}", "wrong"),
    ("5", r"\boxed{5\text{ million}}", "wrong"),
    ("5", r"\boxed{}", "no_answer"),
    ("5", "", "no_answer"),
    ("", r"\boxed{5}", "bad_gold"),
    (r"\frac{", r"\boxed{5}", "bad_gold"),
    # what needs algebra
    ("p - q", r"\boxed{-q+p}", "correct"),
    ("p - q", r"\boxed{q-p}", "wrong"),
    (r"3\sqrt{13}", r"\boxed{\sqrt{117}}", "correct"),
    (r"3\sqrt{13}", r"\boxed{\sqrt{118}}", "wrong"),
    (r"\frac{3\pi}{10}", r"\boxed{0.3\pi}", "correct"),
    (r"(a+5)(b+2)", r"\boxed{ab+2a+5b+10}", "correct"),
    (r"\frac{\sqrt{3}}{3}", r"\boxed{\frac{1}{\sqrt3}}", "correct"),
    ("1,-2", r"\boxed{-2, 1}", "correct"),
    ("1,-2", r"\boxed{1, 2}", "wrong"),
    ("5", r"\boxed{5, 7}", "wrong"),
    ("(1,2)", r"\boxed{(2,1)}", "wrong"),
    ("(3,4]", r"\boxed{[3,4]}", "wrong"),
    (r"1 \pm \sqrt{19}", r"\boxed{1+\sqrt{19}, 1-\sqrt{19}}", "correct"),
    (r"x \in [-2,7]", r"\boxed{[-2,7]}", "correct"),
    ("x=5", r"\boxed{5}", "correct"),
    ("5", r"\boxed{x=5}", "correct"),
    ("x=5", r"\boxed{x=6}", "wrong"),
    ("y = 2x + 3", r"\boxed{2x+3}", "correct"),
    (r"(0,9) \cup (9,36)", r"\boxed{(0,9)\cup(9,36)}", "correct"),
    (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\boxed{\begin{pmatrix} 0.2 \\ -3.6 \end{pmatrix}}", "correct"),
    (r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}", r"\boxed{\begin{pmatrix} 0.2 \\ 3.6 \end{pmatrix}}", "wrong"),
    ("6 - 5i", r"\boxed{-5i + 6}", "correct"),
    (r"12\pi", r"\boxed{12\pi \text{ cm}^2}", "correct"),
    (r"(2,\infty)", r"\boxed{(2,∞)}", "correct"),
    ("1024", r"\boxed{2^{10}}", "correct"),
    ("x^2", r"\boxed{x²}", "correct"),
    ("5", r"\boxed{\frac{}{}}", "not_parsed"),
    # no box: the last expression of the remainder
    ("18", "The final answer is 18 dollars.", "correct"),
    ("18", "It is $18$.", "correct"),
    ("18", "It is $17$.", "wrong"),
    (r"\frac72", r"So we get $\frac{14}{4}$.", "correct"),
    ("18", "18", "correct"),
    ("18", "I do not know.", "not_parsed"),
    ("18", "x" * 5000 + " $18$", "correct"),
]  # fmt: skip


def test_the_corpus(reward: MathReward) -> None:
    scores = reward([request(gold, answer) for gold, answer, _ in CORPUS])
    judged = [(gold, answer, score.reason) for (gold, answer, _), score in zip(CORPUS, scores, strict=True)]
    assert judged == CORPUS
    for score in scores:
        if score.reason in FAILURES:
            assert score == Score(None, score.reason, failure=score.reason)
        else:
            assert score == Score(1.0 if score.reason == "correct" else -1.0, score.reason)


@pytest.mark.parametrize(
    ("response", "prediction"),
    [
        (r"<think>\boxed{5}</think>", Prediction("", boxed=False)),
        (r"<think>\boxed{5}", Prediction("", boxed=False)),
        (r"<think>\boxed{5}</think> so 6", Prediction("so 6", boxed=False)),
        (r"<think>\boxed{5}</think>\boxed{6}", Prediction("6", boxed=True)),
        (r"<think>a</think>\boxed{5}</think>\boxed{6}", Prediction("6", boxed=True)),
        (r"\boxed{5}", Prediction("5", boxed=True)),
    ],
)
def test_a_box_inside_the_thoughts_is_no_answer(reward: MathReward, response: str, prediction: Prediction) -> None:
    assert find_prediction(response) == prediction
    (score,) = reward([RewardRequest(Prompt("p", (), answer="6"), response)])
    expected = {"": "no_answer", "5": "wrong"}.get(prediction.text, "correct")
    assert score.reason == expected


def test_verdicts_are_cached_and_plain_numbers_need_no_worker() -> None:
    with MathReward(correct=1.0, incorrect=-1.0, timeout_s=20.0, num_workers=3) as reward:
        assert [score.reason for score in reward([boxed("5", "5.0"), boxed("5", "6")])] == ["correct", "wrong"]
        assert reward.worker_pids == []
        assert reward([boxed("x+1", "1+x")] * 8) == [Score(1.0, "correct")] * 8
        (pid,) = reward.worker_pids  # eight equal answers are one job
        os.kill(pid, signal.SIGSTOP)  # whoever asks it now waits for good
        assert reward([boxed("x+1", "1+x")]) == [Score(1.0, "correct")]


def test_the_cache_forgets_what_was_unused_for_longest_and_keeps_no_failure() -> None:
    cache = VerdictCache(2)
    first, second, third = (("g", Prediction(text, boxed=True)) for text in "abc")
    cache.put(first, "correct")
    cache.put(second, "wrong")
    assert cache.get(first) == "correct"
    cache.put(third, "timeout")
    assert cache.get(third) is None and cache.get(second) == "wrong" and cache.get(first) == "correct"
    cache.put(third, "wrong")
    assert cache.get(second) is None and cache.get(third) == "wrong" and cache.get(first) == "correct"


def test_a_hanging_answer_is_killed_at_its_deadline_and_the_others_are_judged() -> None:
    requests = [
        boxed("y+1", "1+y"),
        boxed("5", HANG),
        boxed("y+2", "2+y"),
        boxed("5", "9^9^9^9"),
        boxed("y+3", "y+4"),
        boxed(HANG, "5"),
    ]
    with MathReward(correct=1.0, incorrect=-1.0, timeout_s=1.0, num_workers=1) as reward:
        reward(requests[:1])
        start = time.monotonic()
        scores = reward(requests)
        elapsed = time.monotonic() - start
    reasons = [score.reason for score in scores]
    # The library refuses some towers at once and hangs on others; neither may be paid or disturb its neighbours.
    assert reasons[3] in ("wrong", "not_parsed", "timeout") and reasons[5] in ("wrong", "timeout")
    assert [reasons[0], reasons[1], reasons[2], reasons[4]] == ["correct", "timeout", "correct", "wrong"]
    assert scores[1] == Score(None, "timeout", failure="timeout")
    assert 1.0 <= elapsed < 30.0


def test_several_workers_keep_the_order(reward: MathReward) -> None:
    jobs = [Job(f"x+{number}", f"{number + number % 3}+x") for number in range(12)]
    pool = WorkerPool(num_workers=2, timeout_s=20.0)
    verdicts = pool.run(jobs)
    assert len(set(pool.pids)) == 2
    pids = pool.pids
    pool.close()
    assert verdicts == ["correct" if number % 3 == 0 else "wrong" for number in range(12)]
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert pool.pids == [] and pool.run([]) == []


def test_a_worker_that_dies_costs_one_answer_and_is_replaced() -> None:
    pool = WorkerPool(num_workers=1, timeout_s=20.0)
    try:
        assert pool.run([Job("x+1", "1+x")]) == ["correct"]
        (first,) = pool.pids
        os.kill(first, signal.SIGKILL)  # while idle: nobody's answer
        while psutil.Process(first).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        assert pool.run([Job("x+1", "1+x")]) == ["correct"]
        (second,) = pool.pids
        assert second != first
        with subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -KILL {second}"]):
            assert pool.run([Job("5", HANG), Job("x+1", "1+x")]) == ["worker_died", "correct"]
    finally:
        pool.close()


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def test_after_an_interrupt_no_answer_of_the_interrupted_batch_is_taken_for_a_later_one() -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise Interrupted

    pool = WorkerPool(num_workers=1, timeout_s=20.0)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        pool.run([Job("x+1", "1+x")])
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interrupted):
            pool.run([Job("5", HANG)])
        assert pool.pids == []
        assert pool.run([Job("x+1", "2+x")]) == ["wrong"]
    finally:
        signal.signal(signal.SIGALRM, before)
        pool.close()


def test_a_worker_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    pool = WorkerPool(num_workers=2, timeout_s=1.0)
    with pytest.raises(RewardError, match=r"did not become ready \(exit code 1\).*pip install math-verify"):
        pool.run([Job("x+1", "1+x")])
    pool.close()


PARENT = """
from megatron_klear.rewards.pool import Job, WorkerPool
pool = WorkerPool(num_workers=1, timeout_s=9.0)
pool.run([Job("x+1", "1+x")])
print(*pool.pids, flush=True)
input()
"""


def test_an_idle_worker_ends_with_its_parent() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        worker = psutil.Process(int(parent.stdout.readline()))
        assert worker.ppid() == parent.pid
        parent.kill()
    gone, _ = psutil.wait_procs([worker], timeout=15.0)
    assert gone == [worker]


def test_a_busy_worker_that_nobody_kills_ends_by_itself() -> None:
    ours, theirs = Pipe()
    with theirs, ours:
        code = f"from megatron_klear.rewards.worker import main; main({theirs.fileno()}, 0.3)"
        with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, pass_fds=[theirs.fileno()]) as worker:
            assert ours.recv_bytes() == b"ready"
            ours.send_bytes(json.dumps({"gold": "5", "prediction": HANG, "boxed": True}).encode())
            try:
                assert worker.wait(timeout=15.0) == -signal.SIGPROF
            finally:
                worker.kill()


def answers_of(name: str) -> list[str]:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"{path.name} is not beside this checkout")
    if name == "math500.json":
        return [row["answer"] for row in json.loads(path.read_text())]
    rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    return [row["meta"]["answer"] if "meta" in row else row["answer"].split("####")[-1].strip() for row in rows]


@pytest.mark.parametrize(("name", "number"), [("math500.json", 500), ("gsm8k_test.jsonl", 1319), ("aime24.jsonl", 30)])
def test_every_label_of_a_real_data_set_is_its_own_right_answer(reward: MathReward, name: str, number: int) -> None:
    golds = answers_of(name)
    scores = reward([boxed(gold, gold) for gold in golds])
    assert sum(score.reason == "correct" for score in scores) == len(golds) == number


def test_the_library_agrees_and_refuses_other_labels(reward: MathReward) -> None:
    golds = answers_of("math500.json")[::10]
    pool = WorkerPool(num_workers=1, timeout_s=20.0)
    try:
        assert all(reward.parses_all(golds))
        own = pool.run([Job(gold, gold) for gold in golds])
    finally:
        pool.close()
    assert own == ["correct"] * 50
    others = [boxed(gold, other) for gold, other in zip(golds, golds[1:] + golds[:1], strict=True) if gold != other]
    assert [score.reason for score in reward(others)] == ["wrong"] * len(others)
    assert len(others) >= 45
