"""Whether a line of plain text reads like words or like code. Where it may be either, it is not taken for a heading."""

from __future__ import annotations

import re

_KEYWORDS = (
    "assert async await begin break case catch cd class const continue def del do done echo elif else end esac except "
    "export fi for from function git global if import int lambda let ls make mkdir npm pass pip print raise return rm "
    "static sudo switch try var void while with yield"
)
_STATEMENTS = "ALTER CMD COPY CREATE DELETE DROP ENTRYPOINT ENV FROM INSERT RUN SELECT UPDATE WORKDIR"
_KEYWORD = re.compile(rf"(?:{_KEYWORDS.replace(' ', '|')})\b")
_STATEMENT = re.compile(rf"(?:{_STATEMENTS.replace(' ', '|')})\b")
PROMPT = re.compile(r">>>|\.\.\.(?: |$)|In ?\[\d*\]:|Out ?\[\d*\]:|[$%] ")
_CODE = re.compile(
    r"""[^\w\s]*[=<>|&;{}\[\]\\]                    # opens with signs
    | .*[;{}\[(=\\+&|]$                            # ends with signs
    | [\w.\[\]'", ]+?\s*(?:[-+*/%|&:]|//|\*\*)?=     # an assignment
    | [\w.]+\(.*[(),:]$                            # a call
    | -?\s*[\w."'-]+:(?:\s+\S+)?$                  # a key of YAML, alone or with one word
    | [a-z][\w.-]*\s(?:.*\s)?--?[A-Za-z]           # a command with an option
    | diff\s--git|@@\s|---\s|\+\+\+\s|[-+]\w        # a patch
    | [/.~]*/\w | //|/\*|@\w                       # a path, a comment, a decorator
    | .*(?:::|->|=>|==|!=|&&|\|\|)""",
    re.VERBOSE,
)
_LINK = re.compile(r"!?\[[^\]]*\]\(")
_ITEM = re.compile(r"(?:[-*+•]|\d+[.)]) +\S|```|~~~|> ?[^\s>]|\| ?\S|#{1,6} +\S")
_VERSION = re.compile(r"v?\d+(?:\.\d+){2,}(?:$|\W)")
_SIGNS = re.compile(r"[={}\[\];\\|<>\t]|  |[A-Za-z0-9_]\(|::|->|&&|\.\.")
_OPENING = "\"'“‘«(（《〈【「『*`_¿¡"
_CLOSING = ".,;:。，；：、…({[-/"


def like_heading(words: str) -> bool:
    """Whether these could be the words of a heading: mostly letters, no sentence, no columns, nothing of code."""
    if _SIGNS.search(words) or words[-1] in _CLOSING or _KEYWORD.match(words) or PROMPT.match(words):
        return False
    if not (words[0].isalnum() or (words[0] in _OPENING and not words.startswith("* "))):
        return False
    if not (_VERSION.match(words) or any(sign.isalpha() for sign in words)):
        return False
    return 2 * sum(sign.isalnum() for sign in words) >= len(words.replace(" ", ""))


def like_code(line: str) -> bool:
    """Whether a line may be code, output, configuration or a patch."""
    words = line.strip()
    if line.startswith(("    ", "\t")):
        return True
    if _LINK.match(words):
        return False
    return any(kind.match(words) for kind in (PROMPT, _KEYWORD, _STATEMENT, _CODE))


def like_prose(line: str) -> bool:
    """Whether a line could follow a heading: it opens a sentence, an item, a quote, a table row, a fence or a heading."""
    if line.startswith(("    ", "\t")):
        return False
    words = line.strip()
    if _ITEM.match(words) or _LINK.match(words):
        return True
    if like_code(line) or (not words[:1].isalnum() and words[:1] not in _OPENING):
        return False
    first = next((sign for sign in words if sign.isalpha()), "")
    return bool(first) and (not first.islower() or len(words.split()) >= 5)
