"""Checks JSON schemas of clients in a process with limits, before this process compiles them.

Neither the library's validation nor its limits bound a compile: it compares all pairs of `patternProperties` (25 KB take 51 s)
and builds all states of `multipleOf` (one keyword takes 4 s and 300 MB), in a call that cannot be stopped. A compile depends on
the schema alone, so one that ends in the process takes about as long here. The process also takes the first steps of an answer,
where the library notices forms that are too large or that no answer has. Long texts are refused before: each step of an answer
costs time in proportion to them, in the engine's thread.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from blend.serve.request import FieldError
from blend_retrieval.limited import restrict, start_process

if TYPE_CHECKING:
    from llguidance import LLParserLimits, LLTokenizer

LONGEST_SCHEMAS = 1 << 17  # characters of a request's schemas together
LONGEST_TEXT = 1 << 13  # characters of a constant, a pattern or any other text in a schema
_CPU_S = 1  # a usual schema takes some ms, 1,000 required properties 30 ms
_MEMORY = 128 << 20  # bytes that compiling may allocate; a usual schema takes some MB
_MOST_LEXER_STATES = 50_000  # 1 to 2 KB each, during one answer
_TRIED_STEPS = 64
_EXACT = 1 << 53  # integers up to here are exact as 64-bit floats
_LONGEST_NUMBER = 40  # characters of it in a message
_INCLUSIVE = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}
_BOUNDS = (*_INCLUSIVE, *_INCLUSIVE.values())
TOO_LARGE = "the schema is too large to follow"
_MOST_WORDS = 200  # characters of the library's message


class Schema(NamedTuple):
    """A JSON schema as the library takes it. field: of the request, which errors name."""

    field: str
    text: str


def written_schema(field: str, schema: Mapping[str, Any], options: Mapping[str, Any]) -> Schema:
    """A schema of a request with the library's options.

    Raises `FieldError` for what an answer could break, unless the options are lenient, and for too long a text.
    """
    for value in _values(schema):
        if isinstance(value, str) and len(value) > LONGEST_TEXT:
            raise FieldError(f"{field}: a text has {len(value):,} characters; {LONGEST_TEXT:,} are allowed", field)
        if not options["lenient"] and (fault := _uncountable(value)):
            raise FieldError(f"{field}: {fault}", field)
    return Schema(field, json.dumps({**schema, "x-guidance": options}))


def _values(schema: Any) -> Iterator[Any]:
    """A schema and all that it holds, names too."""
    values: list[Any] = [schema]
    while values:
        value = values.pop()
        yield value
        if isinstance(value, Mapping):
            values += (*value.keys(), *value.values())
        elif isinstance(value, list):
            values += value


def _uncountable(value: Any) -> str:
    """Why the library would miscount this part of a schema; "" if it would not.

    It takes numbers as 64-bit floats, and a name that comes twice as two properties.
    """
    if isinstance(value, int) and abs(value) > _EXACT and float(value) != value:
        return f"the number {str(value)[:_LONGEST_NUMBER]} has more digits than a 64-bit float keeps; use text instead"
    if not isinstance(value, Mapping):
        return ""
    if switch := next((name for name in _BOUNDS if isinstance(value.get(name), bool)), None):
        return f"{switch} is true or false, as in draft 4 of JSON Schema; give the number itself"
    if not isinstance(value.get("minProperties"), int):
        return ""
    required = value.get("required")
    free = value["minProperties"] - (len(required) if isinstance(required, list) else 0)
    has_free_names = value.get("additionalProperties", True) is not False or bool(value.get("patternProperties"))
    if free < 2 or not has_free_names:
        return ""
    return f"minProperties {value['minProperties']} is not supported: one name could come twice; name them as required"


def parser_limits() -> LLParserLimits:
    """The limits of following an answer, for both processes."""
    from llguidance._lib import LLParserLimits

    return LLParserLimits(max_lexer_states=_MOST_LEXER_STATES, precompute_large_lexemes=False, verbose_errors=False)


def require_compilable(schemas: Sequence[Schema]) -> int:
    """Check that these schemas of one request can be compiled and followed; returns bytes that this takes.

    Raises `FieldError` if not, and `OSError` if no process can be started.
    """
    if (characters := sum(len(schema.text) for schema in schemas)) > LONGEST_SCHEMAS:
        field = schemas[0].field if len(schemas) == 1 else "tools"
        words = f"{characters:,} characters of JSON are more than {LONGEST_SCHEMAS:,}"
        raise FieldError(f"{field}: {words}", field)
    with start_process("blend.serve.forms.schemas", json.dumps(schemas).encode()) as process:
        answer, _ = process.communicate()
    status = process.returncode
    result = dict[str, Any]()
    for line in answer.splitlines():
        result |= json.loads(line)
    if not result:
        raise RuntimeError(f"the process that checks schemas ended with {status} before it began")
    field = result["field"]
    message = result.get("message", "")
    if status == -signal.SIGXCPU:
        message = f"the schema takes more than {_CPU_S} s to compile; simplify it"
    elif status:
        message = f"the schema takes more than {_MEMORY >> 20} MB to compile; simplify it"
    if message:
        raise FieldError(f"{field}: {message}", field)
    return int(result["bytes"])


def in_words(message: str) -> str:
    """A message of the library in one line."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:_MOST_WORDS]


def main() -> None:
    """The process: checks the schemas on standard input."""
    from llguidance import LLTokenizer

    tokenizer = LLTokenizer("byte")  # its tokens are bytes
    limits = parser_limits()
    schemas = [Schema(*fields) for fields in json.load(sys.stdin.buffer)]
    before = _peak_bytes()
    restrict(_CPU_S, _mapped_bytes() + _MEMORY)
    for schema in schemas:
        _answer(field=schema.field)
        if message := _fault(schema.text, tokenizer, limits):
            _answer(message=in_words(message))
            return
    _answer(bytes=_peak_bytes() - before)


def _answer(**fields: str | int) -> None:
    """Write a line of the answer now: the process may be ended next."""
    sys.stdout.write(f"{json.dumps(fields)}\n")
    sys.stdout.flush()


def _fault(schema: str, tokenizer: LLTokenizer, limits: LLParserLimits) -> str:
    """Why the library cannot follow this schema; "" if it can."""
    from llguidance import LLMatcher

    grammar = LLMatcher.grammar_from_json_schema(schema)
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        return matcher.get_error()
    for step in range(_TRIED_STEPS):
        if matcher.is_stopped():
            break
        allowed = matcher.compute_logit_bias()
        if matcher.is_error():
            break
        # The highest byte that JSON may begin with opens an object. Later ones end texts and objects early.
        choose = allowed.rindex if step == 0 else allowed.index
        matcher.consume_token(choose(max(allowed)))
    message = matcher.get_error()
    if message.startswith("NoExtension"):
        return "no answer has this form; a reference may lead back to itself"
    return f"{TOO_LARGE}: {message}" if message else _reached_bound(schema, tokenizer, limits)


def _reached_bound(schema: str, tokenizer: LLTokenizer, limits: LLParserLimits) -> str:
    """Why the library does not keep an exclusive bound of this schema: it lets a number equal the bound; "" if it keeps all."""
    from llguidance import LLMatcher

    parts = [json.loads(schema)]
    options = parts[0]["x-guidance"]
    for part in _values(parts[0]):
        excluded = [name for name in _INCLUSIVE if isinstance(part, dict) and isinstance(part.get(name), int | float)]
        for name in excluded if not options["lenient"] else ():
            numbers = {key: part[key] for key in _BOUNDS if key in part}
            kind = "integer" if part.get("type") == "integer" else "number"
            alone = {"type": kind, **numbers, "x-guidance": options}
            for written in {f"{part[name]}", f"{part[name]:g}", "-0" if part[name] == 0 else "0"}:
                matcher = LLMatcher(
                    tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(alone)), log_level=0, limits=limits
                )
                reaches = float(written) == part[name] and matcher.consume_tokens([*written.encode()])
                if reaches and matcher.is_accepting():
                    return f"{name} {part[name]} is not supported beside these bounds; use {_INCLUSIVE[name]}"
    return ""


def _peak_bytes() -> int:
    """The most memory that this process has used."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _mapped_bytes() -> int:
    """The address space of this process; where the system does not show it, nothing limits it either."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[0]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
