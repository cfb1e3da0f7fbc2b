r"""Short mathematical answers: find them, write them one way, and compare those that need no algebra.

Everything here is plain string work and exact rationals, some ten thousand answers a second. What it cannot decide
goes to math-verify, as `Answer.latex`. Decimals are exact everywhere: 0.6666667 is not 2/3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

# Longer ones are prose, or digits without end; both are left to the library and its deadline.
MAX_ANSWER_CHARS = 400

_BOX_OR_BRACE = re.compile(r"(?P<box>\\boxed\s*\{)|\\.|[{}]", re.DOTALL)

_UNICODE: dict[int, str] = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)} | {
    ord(character): latex
    for character, latex in {
        "\u3000": " ",
        "\u2212": "-",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "\u00d7": r"\times ",
        "°": r"^\circ ",
        "²": "^2",
        "³": "^3",
    }.items()
}

# In this order: thousands marks before the spaces they are made of, \frac spellings before its one-digit forms.
_SPELLINGS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?<=[0-9])(?:,\\!\s*|\{,\}|\\,)(?=[0-9]{3}(?![0-9]))", ""),
        (r"\\!", ""),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![a-zA-Z])", " "),
        (r"\\(?:left|right|displaystyle)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
        (r"\\frac\s*\{([^{}]*)\}\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\sqrt\s*([0-9])", r"\\sqrt{\1}"),
        (r"\\(?:textnormal|textrm|textbf|textit|mbox|hbox)\s*\{", r"\\text{"),
        (r"\\?\$", ""),
    )
)

_DELIMITERS = ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$"))

_WORD_UNITS = (
    r"(?:mm|cm|dm|km|ft|in|yd|lb|lbs|oz|kg|mg|ml|hr|hrs|min|sec|mph|deg"
    r"|inch(?:es)?|f(?:oo|ee)t|yards?|miles?|(?:milli|centi|kilo)?met(?:er|re)s?|lit(?:er|re)s?|gallons?"
    r"|(?:kilo)?grams?|pounds?|ounces?|seconds?|minutes?|hours?|days?|weeks?|months?|years?"
    r"|degrees?|dollars?|cents?|units?)"
)
_UNIT = re.compile(
    r"\s*(?:\\text\s*\{(?P<text>[A-Za-z .,/-]*)\}"
    rf"|(?<![A-Za-z\\])(?:(?:square|cubic|sq)\s+)?(?P<word>{_WORD_UNITS}|\\mathrm\s*\{{\s*{_WORD_UNITS}\s*\}})"
    rf"(?:\s*(?:/|per)\s*{_WORD_UNITS})?)"
    r"\s*(?:\^\s*\{?[23]\}?)?$"
)
_DEGREE = re.compile(r"\s*\^\s*\{?\s*\\(?:circ|degree)\s*\}?$")
_PERCENT = re.compile(r"\s*(?:\\?%|\bpercent|\\text\s*\{\s*percent\s*\})$")
# Words that change the value or the meaning of the number before them: "5 million" is not 5.
_MEANINGFUL_WORDS = (
    "hundred thousand million billion trillion dozen percent percentage half halves third thirds quarter quarters"
    " tenth tenths squared cubed factorial pi e i and or to not more less than at least most mod"
)
_NOT_UNITS = frozenset(_MEANINGFUL_WORDS.split())

_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_CHOICE = re.compile(r"\(([A-Za-z])\)")
_LOOSE_SPACE = re.compile(r"(?<![0-9])\s+|\s+(?![0-9])")
_ONE_CHARACTER_BRACES = re.compile(r"([_^])\{([A-Za-z0-9])\}")
_BASED = re.compile(r"([0-9][0-9A-F]*)_\{?([0-9]{1,2})\}?")

_DECIMAL = re.compile(
    r"(?P<sign>[+-]?)\s*(?P<whole>[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.(?P<decimals>[0-9]+))?"
    r"(?:(?:[eE]|\s*(?:\\times|\\cdot)\s*10\s*\^\s*)\{?(?P<exponent>[+-]?[0-9]{1,3})\}?)?"
)
_FRACTION = re.compile(
    r"(?P<sign>[+-]?)\s*(?:(?P<whole>[0-9]+)\s*(?=\\)|(?P<spaced>[0-9]+)\s+)?"
    r"(?:\\frac\s*\{\s*(?P<top>-?[0-9]+)\s*\}\s*\{\s*(?P<bottom>-?[0-9]+)\s*\}"
    r"|(?P<plain_top>[0-9]+)\s*/\s*(?P<plain_bottom>[0-9]+))"
)
_PLAIN_DECIMAL = re.compile(r"(?<![\w.^])([0-9]{0,99})\.([0-9]{1,99})(?![0-9.])")
_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen twenty"
)
_NUMBER_WORDS = {word: number for number, word in enumerate(_WORDS.split())}


@dataclass(frozen=True, slots=True)
class Number:
    """An exact rational. `percent` says that a percent sign followed it; `value` is the number before the sign."""

    value: Fraction
    percent: bool = False

    def equals(self, other: Number) -> bool:
        """Exact equality. Against a plain number, 50% may stand for 50 as well as for 0.5: labels use both."""
        if self.percent == other.percent:
            return self.value == other.value
        percent, plain = (self, other) if self.percent else (other, self)
        return plain.value in (percent.value, percent.value / 100)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer, in the forms it is compared in."""

    latex: str  # cleaned, without units; what the library reads
    key: str  # the same without spaces and \text wrappers: equal keys are equal answers
    number: Number | None
    is_text: bool  # nothing but words in a \text{...}

    @property
    def is_plain(self) -> bool:
        """True where no library is needed to know that this is an answer at all."""
        return bool(self.key) and (self.number is not None or self.is_text or _BASED.fullmatch(self.key) is not None)


def last_box(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` whose braces balance; None if there is none."""
    # One pass whatever comes: a model may write ten thousand boxes and close none.
    opened: list[int | None] = []  # for each open brace: where the content of its box starts, or None
    last: tuple[int, int] | None = None
    for token in _BOX_OR_BRACE.finditer(text):
        if token.group() == "}":
            start = opened.pop() if opened else None
            if start is not None and (last is None or start > last[0]):
                last = (start, token.start())
        elif token.group() == "{" or token["box"]:
            opened.append(token.end() if token["box"] else None)
    return None if last is None else text[last[0] : last[1]].strip()


@lru_cache(maxsize=8192)
def read_answer(text: str) -> Answer:
    """Normalise a label, or the content of a box. The rules and their reasons stand in docs/rewards.md."""
    cleaned = _clean(text)
    latex = _strip_unit(cleaned)
    words = _TEXT.sub(r"\1", latex).strip()
    number = _read_number(words)
    is_text = number is None and _TEXT.fullmatch(latex) is not None
    key = _ONE_CHARACTER_BRACES.sub(r"\1\2", _LOOSE_SPACE.sub("", words))
    return Answer(latex, _CHOICE.sub(r"\1", key) if is_text else key, number, is_text)


def compare(gold: Answer, prediction: Answer) -> bool | None:
    """True or False where no algebra is needed, None where the library must decide."""
    if gold.is_text or prediction.is_text:
        if _text_key(gold) == _text_key(prediction):
            return True
        # Words are only ever equal to themselves; a formula may still equal what a \text hides.
        return False if gold.is_text else None
    if gold.key == prediction.key:
        return True
    based = _compare_based(gold.key, prediction.key)
    if based is not None:
        return based
    if gold.number is not None and prediction.number is not None:
        return gold.number.equals(prediction.number)
    return None


def exact_decimals(latex: str) -> str:
    r"""Write decimals as fractions (`0.3\pi` -> `\frac{3}{10}\pi`), so that the library never rounds."""
    return _PLAIN_DECIMAL.sub(lambda match: rf"\frac{{{int(match[1] + match[2])}}}{{{10 ** len(match[2])}}}", latex)


def to_ascii(text: str) -> str:
    """Fullwidth characters as ASCII, common mathematical characters as LaTeX."""
    return text.translate(_UNICODE)


def _clean(text: str) -> str:
    text = to_ascii(text).strip()
    for opening, closing in _DELIMITERS:
        if text.startswith(opening) and text.endswith(closing) and len(text) > len(opening) + len(closing):
            text = text[len(opening) : -len(closing)]
    for pattern, replacement in _SPELLINGS:
        text = pattern.sub(replacement, text)
    return text.strip().rstrip(".,").strip()


def _strip_unit(latex: str) -> str:
    latex = _DEGREE.sub("", latex)
    unit = _UNIT.search(latex)
    if unit is None or not any(character.isdigit() for character in latex[: unit.start()]):
        return latex
    words = re.findall(r"[a-z]+", (unit["text"] or "").lower())
    return latex if _NOT_UNITS.intersection(words) else latex[: unit.start()].strip()


def _read_number(text: str) -> Number | None:
    if len(text) > MAX_ANSWER_CHARS:
        return None
    if text.lower() in _NUMBER_WORDS:
        return Number(Fraction(_NUMBER_WORDS[text.lower()]))
    digits = _PERCENT.sub("", text)
    value = _read_decimal(digits)
    if value is None:
        value = _read_fraction(digits)
    return None if value is None else Number(value, percent=digits != text)


def _read_decimal(text: str) -> Fraction | None:
    match = _DECIMAL.fullmatch(text)
    if match is None or not (match["whole"] or match["decimals"]):
        return None
    decimals = match["decimals"] or ""
    value = Fraction(int(match["whole"].replace(",", "") + decimals), 10 ** len(decimals))
    value *= Fraction(10) ** int(match["exponent"] or 0)
    return -value if match["sign"] == "-" else value


def _read_fraction(text: str) -> Fraction | None:
    match = _FRACTION.fullmatch(text)
    if match is None:
        return None
    top, bottom = int(match["top"] or match["plain_top"]), int(match["bottom"] or match["plain_bottom"])
    whole = int(match["whole"] or match["spaced"] or 0)
    # A mixed number has no signs inside: 1\frac{-1}{2} is a product, and nothing is divided by zero.
    if bottom == 0 or (whole and (top < 0 or bottom < 0)):
        return None
    value = whole + Fraction(top, bottom)
    return -value if match["sign"] == "-" else value


def _text_key(answer: Answer) -> str:
    return _CHOICE.sub(r"\1", answer.key).casefold()


def _compare_based(gold: str, prediction: str) -> bool | None:
    """Numbers with a base, 204_5: the library forgets the base. Left out by the prediction it counts as the label's."""
    gold_based, based = _BASED.fullmatch(gold), _BASED.fullmatch(prediction)
    if gold_based is None:
        return False if based is not None and _DECIMAL.fullmatch(gold) else None
    if based is not None:
        return gold_based.groups() == based.groups()
    return gold_based[1] == prediction if prediction.isalnum() else None
