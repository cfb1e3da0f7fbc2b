"""Normalisation and the comparison that needs no library."""

from __future__ import annotations

import random
import time
from fractions import Fraction

import pytest

from megatron_klear.rewards.answers import Number, compare, exact_decimals, last_box, read_answer


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{6}, no: \boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{ 1 \right.}", r"\left\{ 1 \right."),
        (r"\boxed{a \\ b}", r"a \\ b"),
        (r"\boxed{}", ""),
        (r"\boxed{5} and \boxed{6", "5"),
        (r"stray } and { here: \boxed{5}", "5"),
        (r"\boxed{5", None),
        (r"\boxed 5", None),
        (r"\\boxed{5}", None),
        ("5", None),
        ("", None),
    ],
)
def test_the_last_balanced_box(text: str, box: str | None) -> None:
    assert last_box(text) == box


def test_ten_thousand_open_boxes_take_no_time() -> None:
    start = time.perf_counter()
    assert last_box(r"\boxed{" * 20_000) is None
    assert last_box(r"\boxed{5}" * 20_000) == "5"
    assert time.perf_counter() - start < 2.0


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5", 5),
        ("-5", -5),
        ("+5", 5),
        ("\u22125", -5),
        ("\uff11\uff12", 12),
        ("5.", 5),
        ("$5$", 5),
        (r"\(5\)", 5),
        ("1,234,567", 1234567),
        (r"10,\!080", 10080),
        (r"11,\! 111,\! 111,\! 100", 11111111100),
        (r"10{,}080", 10080),
        (r"\$32,348", 32348),
        (r"$\$32,348$", 32348),
        (r"\$18.90", Fraction(189, 10)),
        (".35625", Fraction(57, 160)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"-\dfrac12", Fraction(-1, 2)),
        (r"\frac{-1}{2}", Fraction(-1, 2)),
        (r"\frac9{19}", Fraction(9, 19)),
        (r"\frac{270}7\text{ degrees}", Fraction(270, 7)),
        (r"\dfrac{1}{29,\!322,\!216}", Fraction(1, 29322216)),
        ("2/3", Fraction(2, 3)),
        (r"1\frac{4}{5}", Fraction(9, 5)),
        (r"-137 \frac{1}{2}", Fraction(-275, 2)),
        ("1 4/5", Fraction(9, 5)),
        ("1e2", 100),
        ("1.5E-3", Fraction(3, 2000)),
        (r"1.6\times 10^{-19}", Fraction(16, 10**20)),
        (r"2 \cdot 10^5", 200000),
        (r"90^\circ", 90),
        ("90°", 90),
        (r"864 \mbox{ inches}^2", 864),
        (r"15\mbox{ cm}^{2}", 15),
        (r"5.4 \text{ cents}", Fraction(27, 5)),
        ("18 dollars", 18),
        ("5cm", 5),
        (r"5\,\mathrm{cm}", 5),
        ("60 miles per hour", 60),
        ("12 square feet", 12),
        (r"\text{five}", 5),
        ("Twelve", 12),
        (r"\mbox{four}", 4),
        (r"\text{5}", 5),
    ],
)
def test_numbers_are_read_exactly(text: str, value: Fraction) -> None:
    assert read_answer(text).number == Number(Fraction(value))


@pytest.mark.parametrize("text", [r"50\%", "50%", "50 percent", r"50\text{ percent}", r"50 \%"])
def test_percentages_keep_their_sign(text: str) -> None:
    assert read_answer(text).number == Number(Fraction(50), percent=True)


NOT_NUMBERS = [
    "", "x", "5x", "5t", "5m", r"5\text{ million}", "5 million", r"5\text{ or more}", r"3\mathrm{i}", r"3\text{i}",
    "5²", "5 6", "1,2", "1,23", "1.2.3", "--5", r"\frac{1}{0}", "1/0", r"1\frac{-1}{2}", "1e9999", "1" * 401, "e5",
    r"\frac{1}{2}\frac{1}{3}", "5!", "5^2", "(5)", "x=5", "inf", "nan", "1_000",
]  # fmt: skip


@pytest.mark.parametrize("text", NOT_NUMBERS)
def test_what_is_not_a_plain_number_is_left_to_the_library(text: str) -> None:
    assert read_answer(text).number is None


@pytest.mark.parametrize(
    ("gold", "prediction", "same"),
    [
        ("5", "5", True),
        ("5", "6", False),
        ("0.5", r"\frac12", True),
        (r"\frac{2}{3}", "0.6666667", False),
        ("0.33", r"\frac13", False),
        ("100", "1e2", True),
        (r"1.6\times 10^{-19}", r"1.7\times 10^{-19}", False),
        ("50", r"50\%", True),
        ("0.5", r"50\%", True),
        (r"50\%", "0.5", True),
        (r"50\%", r"0.5\%", False),
        ("11", "1 1", None),
        ("-5", "5", False),
        # text
        (r"\text{Evelyn}", "Evelyn", True),
        (r"\text{Evelyn}", r"\textbf{evelyn}", True),
        (r"\text{Evelyn}", "Evelyn Jones", False),
        (r"\text{even}", r"\text{odd}", False),
        (r"\text{(C)}", "C", True),
        (r"\text{(C)}", "(C)", True),
        (r"\text{C}", "(D)", False),
        ("C", r"\text{(C)}", True),
        (r"\text{A,B,E}", r"\text{A}, \text{B}, \text{E}", True),
        ("x", r"\text{y}", None),
        # bases
        ("204_5", "204_{5}", True),
        ("4210_{5}", "4210_5", True),
        ("52_8", "52", True),
        ("52_8", "42", False),
        ("204_5", "204_7", False),
        ("52", "52_8", False),
        ("2A_{16}", "2A_{16}", True),
        # spelling only
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\dfrac{\pi}{2})", True),
        (r"x^{2}+1", "x^2 + 1", True),
        (r"11\sqrt2", r"11 \sqrt{2}", True),
        ("π", r"\pi", True),
        (r"\begin{pmatrix} -2 \\ -14 \end{pmatrix}", r"\begin{pmatrix}-2\\-14\end{pmatrix}", True),
        # undecided
        (r"\sqrt{2}", "1.41421356", None),
        ("p - q", "-q + p", None),
        ("1,-2", "-2,1", None),
        ("x=5", "5", None),
    ],
)  # fmt: skip
def test_comparison_without_the_library(gold: str, prediction: str, same: bool | None) -> None:
    assert compare(read_answer(gold), read_answer(prediction)) is same


def test_random_rationals_equal_themselves_in_every_spelling() -> None:
    rng = random.Random(0)
    for _ in range(300):
        value = Fraction(rng.randint(-9999, 9999), rng.choice([1, 2, 4, 5, 8, 10, 25, 100]))
        sign, size = ("-" if value < 0 else ""), abs(value)
        decimal = f"{sign}{size.numerator * (10**8 // size.denominator) / 10**8:.8f}"
        top, bottom = 3 * size.numerator, 3 * size.denominator
        spellings = [f"{sign}{top}/{bottom}", rf"{sign}\frac{{{top}}}{{{bottom}}}", decimal, f"${decimal}$"]
        golds = [read_answer(spelling) for spelling in spellings]
        assert all(gold.number == Number(value) for gold in golds), (value, spellings)
        assert compare(golds[0], read_answer(f"{sign}{top + 1}/{bottom}")) is False


def test_decimals_become_fractions_for_the_library() -> None:
    assert exact_decimals(r"0.3\pi + x^{.5}") == r"\frac{3}{10}\pi + x^{\frac{5}{10}}"
    assert exact_decimals("x0.5 + x^0.5 + 1.2.3") == "x0.5 + x^0.5 + 1.2.3"
