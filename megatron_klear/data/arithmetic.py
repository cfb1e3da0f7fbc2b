"""The quickstart's problems, and a model folder small enough to learn them on a laptop. Standard library only.

Two-digit addition, units first. The demonstrations come from a careless teacher, who forgets to carry in most of the
problems that need it. So a model that imitates them (SFT) is right where nothing is carried, a little over half of the
problems, and only now and then elsewhere; it takes the reward of right answers (RL) to prefer the careful way. This
makes the quickstart's curve robust: accuracy after SFT is set by the data, not by when training stopped.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_klear.errors import DataError

SMALLEST, LARGEST = 10, 99
CARELESSNESS = 0.8
PAD, END = "<|endoftext|>", "<|im_end|>"
THINK, END_THINK = "<think>", "</think>"
CHARACTERS = "0123456789+-*=() .,\n"
# Adds nothing for a generation prompt: a problem ends with "=", and the model goes on from there.
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}" + END + "{% endif %}{% endfor %}"


@dataclass(frozen=True, slots=True)
class Problem:
    """The sum of two two-digit numbers."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """What the model is asked, like 58+67=."""
        return f"{self.a}+{self.b}="

    @property
    def needs_carry(self) -> bool:
        """True where the units add up to ten or more."""
        return self.a % 10 + self.b % 10 > 9

    def solution(self, *, forget_carry: bool = False) -> str:
        """A response with its steps: <think>8+7=15 5+6+1=12</think>125, or without the +1 where it is forgotten."""
        units = self.a % 10 + self.b % 10
        carry = int(self.needs_carry and not forget_carry)
        tens = self.a // 10 + self.b // 10 + carry
        second = f"{self.a // 10}+{self.b // 10}{'+1' * carry}={tens}"
        return f"{THINK}{self.a % 10}+{self.b % 10}={units} {second}{END_THINK}{tens}{units % 10}"

    @property
    def answer(self) -> str:
        """The right result alone."""
        return str(self.a + self.b)


@dataclass(frozen=True, slots=True)
class ProblemSets:
    """Problems to learn from, to practise on and to be judged by; no problem occurs twice."""

    sft: tuple[Problem, ...]
    rl: tuple[Problem, ...]
    held_out: tuple[Problem, ...]


def num_problems() -> int:
    """How many different problems there are."""
    return (LARGEST - SMALLEST + 1) ** 2


def problem_at(index: int) -> Problem:
    """The problem with this number, 0 <= index < num_problems()."""
    a, b = divmod(index, LARGEST - SMALLEST + 1)
    return Problem(SMALLEST + a, SMALLEST + b)


def demonstrations(problems: Sequence[Problem], *, carelessness: float, seed: int) -> list[str]:
    """The teacher's responses: the carry of a problem that needs one is forgotten with probability `carelessness`."""
    rng = random.Random(seed)
    return [problem.solution(forget_carry=rng.random() < carelessness) for problem in problems]


def draw_problems(*, num_sft: int, num_rl: int, num_eval: int, seed: int) -> ProblemSets:
    """Three disjoint sets. The held-out set depends on `seed` and `num_eval` alone, however much is trained on."""
    wanted = num_sft + num_rl + num_eval
    if wanted > num_problems():
        raise DataError(
            f"{wanted} problems wanted ({num_sft} sft, {num_rl} rl, {num_eval} eval), but only {num_problems()}"
            " different ones exist; lower --num-sft or --num-rl"
        )
    order = list(range(num_problems()))
    random.Random(seed).shuffle(order)
    drawn = tuple(problem_at(index) for index in order[:wanted])
    held_out, sft, rl = drawn[:num_eval], drawn[num_eval : num_eval + num_sft], drawn[num_eval + num_sft :]
    trained = {problem.prompt for problem in (*sft, *rl)}
    assert not any(problem.prompt in trained for problem in held_out), "a held-out problem is also trained on"
    return ProblemSets(sft, rl, held_out)


def vocabulary() -> dict[str, int]:
    """Token to id: the four whole tokens first, then single characters."""
    return {token: number for number, token in enumerate([PAD, END, THINK, END_THINK, *CHARACTERS])}


def tokenizer_json() -> dict[str, object]:
    """A fast tokenizer of single characters. The thinking tags are whole tokens, not special: decoding keeps them."""
    added = [
        {"id": number, "content": token, "special": token in (PAD, END)}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for number, token in enumerate([PAD, END, THINK, END_THINK])
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        # The unknown token is deliberately not in the vocabulary: a foreign character is an error, not a silent gap.
        "model": {"type": "WordLevel", "vocab": vocabulary(), "unk_token": "<unk>"},
    }


def tokenizer_config() -> dict[str, object]:
    """How transformers is to wrap it. (Its Qwen2 class would replace our splitting by its own and lose spaces.)"""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": CHAT_TEMPLATE,
    }


def model_config() -> dict[str, object]:
    """A dense Qwen3 of 0.8 million weights."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": 64,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": vocabulary()[END],
        "pad_token_id": vocabulary()[PAD],
    }


def generation_config() -> dict[str, object]:
    """What an engine has to stop at."""
    return {"eos_token_id": vocabulary()[END], "pad_token_id": vocabulary()[PAD]}


def write_model_folder(folder: Path) -> None:
    """config.json, generation_config.json and tokenizer files; no weights (the recipe starts from random ones)."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        "config.json": model_config(),
        "generation_config.json": generation_config(),
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": tokenizer_config(),
    }
    for name, content in contents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_rows(path: Path, rows: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number of problems; expected at least 1")
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{number} is not a share; expected a number from 0 to 1")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-klear arithmetic", description="Write the quickstart's problems and its tiny model folder."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; files of the same names are replaced")
    parser.add_argument("--num-sft", type=_count, default=4000, help="demonstrations for SFT (%(default)s)")
    parser.add_argument("--num-rl", type=_count, default=3500, help="problems with answers for RL (%(default)s)")
    parser.add_argument("--num-eval", type=_count, default=512, help="held-out problems (%(default)s)")
    parser.add_argument(
        "--carelessness", type=_share, default=CARELESSNESS, help="how often the teacher forgets a carry (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="which problems are drawn (%(default)s)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command `megatron-klear arithmetic`: writes sft.jsonl, rl.jsonl, eval.jsonl and model/ under --out."""
    args = _parser().parse_args(argv)
    sets = draw_problems(num_sft=args.num_sft, num_rl=args.num_rl, num_eval=args.num_eval, seed=args.seed)
    write_model_folder(args.out / "model")
    responses = demonstrations(sets.sft, carelessness=args.carelessness, seed=args.seed)
    pairs = zip(sets.sft, responses, strict=True)
    _write_rows(args.out / "sft.jsonl", ({"prompt": one.prompt, "response": said} for one, said in pairs))
    for name, problems in (("rl", sets.rl), ("eval", sets.held_out)):
        _write_rows(args.out / f"{name}.jsonl", ({"prompt": one.prompt, "label": one.answer} for one in problems))
    print(f"{args.out}: {len(sets.sft)} sft, {len(sets.rl)} rl, {len(sets.held_out)} held-out problems, and model/")
    return 0
