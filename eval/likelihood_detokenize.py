"""Detokenizers: undo the word splitting of old benchmark corpora, so that a model sees text as it has read it.

Published zero-shot perplexities depend on them (MDLM, SEDD, BD3-LM and Duo apply them to Wikitext, PTB, LM1B, Lambada
and the scientific papers; those of Wikitext and PTB come from Megatron-LM). Each is a list of rules applied in order;
they are kept exactly, oddities included, because numbers are comparable only under the same rules. Read next:
`likelihood_text.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

Rule = tuple[str, str] | tuple[re.Pattern[str], str]
"""(text or pattern, replacement); every occurrence, from left to right, without overlap."""


def apply_rules(text: str, rules: Sequence[Rule]) -> str:
    """The text after all rules in their order."""
    for what, by in rules:
        text = text.replace(what, by) if isinstance(what, str) else what.sub(by, text)
    return text


WIKITEXT: tuple[Rule, ...] = (
    ("s '", "s'"),
    (re.compile(r"/' [0-9]/"), "/'[0-9]/"),  # as published; it was meant for digits and hardly ever matches
    (" @-@ ", "-"),
    (" @,@ ", ","),
    (" @.@ ", "."),
    (" : ", ": "),
    (" ; ", "; "),
    (" . ", ". "),
    (" ! ", "! "),
    (" ? ", "? "),
    (" , ", ", "),
    (re.compile(r"\(\s*([^\)]*?)\s*\)"), r"(\1)"),
    (re.compile(r"\[\s*([^\]]*?)\s*\]"), r"[\1]"),
    (re.compile(r"{\s*([^}]*?)\s*}"), r"{\1}"),
    (re.compile(r"\"\s*([^\"]*?)\s*\""), r'"\1"'),
    (re.compile(r"'\s*([^']*?)\s*'"), r"'\1'"),
    ("= = = =", "===="),
    ("= = =", "==="),
    ("= =", "=="),
    (" ° ", "°"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)

PTB: tuple[Rule, ...] = (
    (" 's", "'s"),
    ("s ' ", "s' "),
    (" n't", "n't"),
    (" \n ", "\n"),
    ("\\/", "/"),
    *((" N ", " 1 "),) * 10,  # numbers in a row share their spaces, so one pass misses every other
    ("$ 1", "$1"),
    ("# 1", "#1"),
    ("<unk>", "?"),
)

LM1B: tuple[Rule, ...] = (
    ("http : / / ", "http://"),
    ("https : / / ", "https://"),
    (re.compile(r" '(\w+)"), r"'\1"),
    (re.compile(r" (\w+) \. "), r" \1. "),
    (re.compile(r" (\w+) \.$"), r" \1."),
    (" ? ", "? "),
    (re.compile(r" \?$"), "?"),
    (" ! ", "! "),
    (re.compile(r" !$"), "!"),
    (" , ", ", "),
    (" : ", ": "),
    (" ; ", "; "),
    (" / ", "/"),
    (re.compile(r"\" ([^\"]+) \""), r'"\1"'),
    (re.compile(r"' ([^']+) '"), r"'\1'"),
    (re.compile(r"\( ([^\(\)]+) \)"), r"(\1)"),
    (re.compile(r"\[ ([^\[\]]+) \]"), r"[\1]"),
    ("$ ", "$"),
    ("£ ", "£"),
)


def none(text: str) -> str:
    """The text as it is."""
    return text


def wikitext(text: str) -> str:
    """Wikitext-2 and Wikitext-103, raw or not."""
    return apply_rules(text, WIKITEXT)


def ptb(text: str) -> str:
    """Penn Treebank as `ptb_text_only` has it: N for numbers, <unk> for rare words."""
    return apply_rules(text, PTB)


def lm1b(text: str) -> str:
    """One Billion Words."""
    return apply_rules(text, LM1B)


def lambada(text: str) -> str:
    """Lambada in OpenAI's form: straight quotes, and a line break before the text, stripped."""
    return "\n" + text.replace("“", '"').replace("”", '"').strip()


def scientific_papers(text: str) -> str:
    """Arxiv and Pubmed: the rules of Wikitext, then those of LM1B."""
    return lm1b(wikitext(text))


DETOKENIZERS: dict[str, Callable[[str], str]] = {
    "none": none,
    "wikitext": wikitext,
    "ptb": ptb,
    "lm1b": lm1b,
    "lambada": lambada,
    "scientific_papers": scientific_papers,
}
"""Name -> function of the text of one document."""
