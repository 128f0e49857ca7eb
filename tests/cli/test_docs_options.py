"""Options that the documentation names exist in the command that it speaks of, and the defaults that it states are theirs."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from places import REPOSITORY

from blend.cli import blend

PAGES = sorted(
    page
    for page in (*(REPOSITORY / "docs").glob("*.md"), *REPOSITORY.glob("*.md"), REPOSITORY / "examples" / "README.md")
    if page.name not in ("cli.md", "CHANGELOG.md")
)
# Pages about one command: there an option without a command is one of that.
ABOUT = {
    "plan.md": "precompute",
    "analyze.md": "analyze",
    "census.md": "census",
    "serving.md": "serve",
    "metrics.md": "serve",
}
OF_CLAUDE_CODE = {"--bare", "--disallowedTools", "--system-prompt", "--tools"}
OF_ENGINES = {
    "--cache-reuse",
    "--chat-template",
    "--default-chat-template-kwargs",
    "--engine-type",
    "--kv-unified",
    "--slot-save-path",
    "--swa-full",
}
FOREIGN = OF_CLAUDE_CODE | OF_ENGINES | {"--exclude"}  # the last is rsync's
OPTION = re.compile(r"(?<![\w-])--[a-z][a-zA-Z0-9-]*")
CALL = re.compile(r"\bblend ((?:store )?[a-z]+)\b([^|;&#`]*)")
OF_OTHERS = re.compile(
    r"`((?!blend |--)[^`]*--[^`]*)`"
)  # code that begins with another program, or a command of `blend store`
# A number or a name in code, behind an option, that is called its default.
DEFAULT = re.compile(
    r"`(--[a-z][a-z0-9-]*)[^`]*`(?:(?!`--)[^|;]){0,80}?"
    r"(?:\b[Dd]efault:? (?:this )?(?:is )?(`\w+`|[\d.,]*\d)|(?<![\w.])(`\w+`|\d[\d.,]*)(?: [GM]B| %)? by default)"
)


class Option(NamedTuple):
    """An option as a command has it."""

    default: object
    explained: str


@cache
def commands() -> dict[str, dict[str, Option]]:
    """The options of each command by their names; of a group and its commands: `store`, `store stats`."""
    options_of: dict[str, dict[str, Option]] = {}

    def add(command: click.Command, name: str, context: click.Context) -> None:
        options = {
            written: Option(parameter.default, str(parameter.show_default) + str(parameter.help))
            for parameter in command.params
            if isinstance(parameter, click.Option)
            for written in (*parameter.opts, *parameter.secondary_opts)
        }
        options_of[name] = {**options, "--help": Option(False, "")}
        if isinstance(command, click.Group):
            for inner in command.list_commands(context):
                child = command.get_command(context, inner)
                assert child is not None
                add(child, f"{name} {inner}".strip(), context)

    with click.Context(blend) as context:
        add(blend, "", context)
    return options_of


@cache
def of_scripts() -> frozenset[str]:
    """Options of the scripts, which the documentation names too, and of what they and the examples call."""
    sources = [path for folder in ("scripts", "examples", ".ci") for path in (REPOSITORY / folder).rglob("*")]
    texts = (
        path.read_text(encoding="utf-8") for path in sources if path.is_file() and path.suffix in ("", ".py", ".yaml")
    )
    return frozenset(option for text in texts for option in OPTION.findall(text))


def sentences(text: str) -> Iterator[str]:
    """Sentences, items of lists, rows of tables and lines of code."""
    text = re.sub(r"\\\n\s*", "", text)
    prose = re.sub(
        r"^(?:```.*?^```|(?:    .*\n)+)", lambda code: code[0].replace("\n", "\n\n"), text, flags=re.S | re.M
    )
    for block in re.split(r"\n\s*\n|\n(?=\s*[-|*#\d])", prose):
        yield from re.split(r"(?<=[.:;]) (?=[A-Z`*])", " ".join(block.split()))


def unknown(page: Path, text: str) -> Iterator[str]:
    """Options that the command does not have that a sentence, or the page, speaks of."""
    known = commands()
    everything = {option for options in known.values() for option in options}
    for sentence in sentences(text):
        calls = [(name if name in known else name.split()[0], rest) for name, rest in CALL.findall(sentence)]
        calls = [(name, rest) for name, rest in calls if name in known]
        for name, rest in calls:
            yield from (f"blend {name} {option}" for option in OPTION.findall(rest) if option not in known[name])
        alone = set(OPTION.findall(OF_OTHERS.sub("", CALL.sub("", sentence))))
        others = set(OPTION.findall(" ".join(OF_OTHERS.findall(sentence))))
        yield from sorted(others - everything - of_scripts() - FOREIGN)
        named = {name for name, _ in calls} or {ABOUT.get(page.name, "")} - {""}
        of_named = {option for name in named for option in known[name]}
        for option in sorted(alone - of_named):
            if option in everything if named else option not in everything | of_scripts() | FOREIGN:
                yield f"{option} in: {sentence[:90]}"


def wrong_defaults(text: str) -> Iterator[str]:
    """Defaults that no command has for this option."""
    for option, behind, before in DEFAULT.findall(" ".join(text.split())):
        stated = (behind or before).strip("`").replace(",", "")
        owners = [options[option] for options in commands().values() if option in options]
        words = {word for owner in owners for word in re.findall(r"[\w.]*\w", f"{owner.default} {owner.explained}")}
        if owners and not words & set(spellings(stated)):
            yield f"{option}: {stated}"


def spellings(value: str) -> Iterator[str]:
    """A value as options may write it: also with decimals, in GB for MB, and as a share for per cent."""
    yield value
    if value.replace(".", "", 1).isdigit():
        yield from (f"{float(value) * factor:{form}}" for factor in (1, 0.001, 0.01) for form in ("g", ".1f"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_exist_and_defaults_fit(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert list(unknown(page, text)) == []
    assert list(wrong_defaults(text)) == []


def test_mistakes_are_noticed() -> None:
    plan, other = REPOSITORY / "docs" / "plan.md", REPOSITORY / "docs" / "stores.md"
    assert list(unknown(other, "Run `blend precompute docs --no-surrogate`.")) == ["blend precompute --no-surrogate"]
    assert list(unknown(other, "    blend store stats --corpus x \\\n        --nonsense")) != []
    assert list(unknown(plan, "One copy with `--no-surrogate`.")) != []
    assert list(unknown(other, "`blend answer` takes `--shard`.")) != []
    assert list(unknown(other, "Set `--no-such-option`.")) != []
    assert list(unknown(other, "Set `--ratio`; `blend answer --ratio 1` is exact.")) == []
    assert list(wrong_defaults("`--top-k` says how many chunks (default 9).")) == ["--top-k: 9"]
    assert list(wrong_defaults("`--top-k` says how many chunks (default 8).")) == []
    assert list(wrong_defaults("Less than `--min-score` is left out. The default is 0.2.")) == ["--min-score: 0.2"]
    assert list(wrong_defaults("The embedder (`--embedder`, `other` by default)")) == ["--embedder: other"]
    assert list(wrong_defaults("Rows (`--prefix-budget`, 2,000 MB by default)")) == ["--prefix-budget: 2000"]
