"""The forms of requests of a soak: all protocols, whole and streamed; stop texts, schemas, calls, several answers, edits."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx

from _servers import CHAT
from _soak_serve import Answer, Question, Reference, Visitors, references

Json = dict[str, Any]

COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
SESSIONS = 4  # of the edited conversations
VERSIONS = 4  # of what an edit changes
SCHEMA: Json = {"type": "object", "properties": {"gates": {"type": "integer"}}, "required": ["gates"]}
SCHEMA |= {"additionalProperties": False}
FUNCTION = {"name": "look_up", "description": "Looks a harbour up.", "parameters": SCHEMA}


class Asked(NamedTuple):
    """A question in one form. shown: its name in messages."""

    shown: str
    path: str
    body: Json
    question: Question


class Reply(NamedTuple):
    """The texts of all answers, calls included, and what `blend serve` adds."""

    texts: list[str]
    extension: Mapping[str, Any]


def texts_of(document: Mapping[str, Any]) -> list[str]:
    """The text of each answer of a whole reply, in any protocol, with the calls behind it."""
    if "output" in document:
        parts = [part for item in document["output"] for part in item.get("content", ())]
        return ["".join(part["text"] for part in parts)]
    if "content" in document:
        return ["".join(block["text"] for block in document["content"] if block["type"] == "text")]
    texts = []
    for choice in document["choices"]:
        message = choice.get("message", {})
        calls = message.get("tool_calls") or ()
        text = choice.get("text") or message.get("content") or ""
        texts.append(text + "".join(map(_call, calls)))
    return texts


def _call(call: Mapping[str, Any]) -> str:
    return f"{call['function']['name']}({call['function']['arguments']})"


def reply_of_stream(lines: Sequence[str]) -> Reply:
    """The answers of a stream, in any protocol. Raises ValueError if it did not end, or ended with an error."""
    texts = defaultdict[int, str](str)
    extension: Json = {}
    ended = False
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            ended = ended or data == "[DONE]"
            continue
        event = json.loads(data)
        if "error" in event:
            raise ValueError(f"a stream failed: {data[:200]}")
        kind = event.get("type", "")
        ended = ended or kind in ("response.completed", "response.incomplete", "message_stop")
        for place in (event, event.get("response"), event.get("message")):
            extension |= (place or {}).get("kvblend") or {}
        if kind == "response.output_text.delta":
            texts[0] += event["delta"]
        elif kind == "content_block_delta":
            texts[0] += event["delta"].get("text", "")
        for choice in event.get("choices", ()):
            delta = choice.get("delta") or {}
            calls = delta.get("tool_calls") or ()
            texts[choice["index"]] += choice.get("text") or delta.get("content") or "".join(map(_call, calls))
    if not ended:
        raise ValueError("a stream ended before its answer")
    return Reply([texts[index] for index in sorted(texts)] or [""], extension)


def in_protocol(path: str, body: Json) -> Json:
    """A body of chat completions in another protocol."""
    body = dict(body)
    if path == RESPONSES:
        body["input"] = body.pop("messages")
        body["max_output_tokens"] = body.pop("max_tokens")
    elif path == MESSAGES and "stop" in body:
        body["stop_sequences"] = body.pop("stop")
    return body


async def forms_of(client: httpx.AsyncClient, questions: Sequence[Question]) -> list[tuple[Question, Sequence[str]]]:
    """The questions in further forms, with their answers alone, and the protocols that have the form."""
    forms: list[tuple[Question, Sequence[str]]] = [(question, (CHAT, RESPONSES, MESSAGES)) for question in questions]
    for question in questions[:: max(1, len(questions) // 4)]:
        answer = question.references[0].answer.text
        middle = answer[len(answer) // 3 : len(answer) // 3 + 4]
        tools = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
        schema = {"type": "json_schema", "json_schema": {"name": "gates", "schema": SCHEMA, "strict": True}}
        further: list[tuple[str, Json, Sequence[str]]] = [
            ("stop", {"stop": [middle, *(f"{middle}{number}" * 90 for number in range(8))]}, (CHAT, MESSAGES)),
            ("schema", {"response_format": schema}, (CHAT,)),
            ("calls", tools, (CHAT,)),
        ]
        for name, fields, paths in further:
            forms.append((await asked_alone(client, f"{question.name}, {name}", {**question.body, **fields}), paths))
    for number, question in enumerate(questions[:4]):
        body = {**_plain(question), "prompt": question.body["documents"][0]["text"]}
        forms.append((await asked_alone(client, f"text {number}", body, COMPLETIONS), (COMPLETIONS,)))
    return forms


def _plain(question: Question) -> Json:
    """The body of a question without what it asks."""
    return {name: value for name, value in question.body.items() if name not in ("documents", "messages")}


async def edited_versions(client: httpx.AsyncClient, question: Question) -> list[Question]:
    """A conversation in versions that differ in a number near its beginning."""
    text = question.body["documents"][0]["text"]
    versions = []
    for version in range(VERSIONS):
        turns = [
            {"role": "user", "content": f"It is {version + 1} o'clock.\n\n{text}"},
            {"role": "assistant", "content": "I have read it."},
            *question.body["messages"],
        ]
        versions.append(await asked_alone(client, f"edit {version}", {**_plain(question), "messages": turns}))
    return versions


async def asked_alone(client: httpx.AsyncClient, name: str, body: Json, path: str = CHAT) -> Question:
    """A question with its answers alone."""
    if path == CHAT:
        return Question(name, body, await references(client, body, texts_of))
    response = await client.post(path, json={**body, "logprobs": 2, "kvblend": {"method": "full", "cold": True}})
    response.raise_for_status()
    document = response.json()
    logprobs = document["choices"][0]["logprobs"]
    tokens = []
    for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True):
        likeliest, second, *_ = [*sorted(top.values(), reverse=True), -100.0]
        tokens.append((token, likeliest - second))
    return Question(name, body, [Reference(Answer(texts_of(document)[0], ("full",)), tuple(tokens))])


@dataclass
class FormVisitors(Visitors):
    """Visitors who also ask in all forms. forms: questions with their protocols. edits: versions of a conversation."""

    forms: Sequence[tuple[Question, Sequence[str]]] = ()
    edits: Sequence[Question] = ()
    _fresh: int = field(default=0, init=False)

    @property
    def kinds(self) -> dict[Any, int]:
        """What visitors come for, with how often."""
        return {**super().kinds, self.ask_in_a_form: 60, self.edit: 15, self.bring: 5, self.forget: 2}

    async def ask_in_a_form(self) -> None:
        """Ask in any protocol, whole or streamed, for one answer or several, blended, in full or past all memory."""
        question, paths = self.draws.choice(self.forms)
        path = self.draws.choice(paths)
        extension = self.draws.choice([{}, {}, {"method": "full"}, {"method": "full", "cold": True}, {"cold": True}])
        body = {**in_protocol(path, dict(question.body)), "kvblend": extension}
        if path in (CHAT, COMPLETIONS):
            body["n"] = self.draws.choice([1, 1, 3])
            if self.draws.random() < 0.3:
                body |= {"logprobs": True, "top_logprobs": 5} if path == CHAT else {"logprobs": 5}
        await self._judged(question, path, body, stream=self.draws.random() < 0.5)

    async def edit(self) -> None:
        """Go on in a session whose beginning changes."""
        question = self.draws.choice(self.edits)
        session = f"session-{self.draws.randrange(SESSIONS)}"
        extension = {"session": session, "edits": self.draws.choice(["exact", "checked", "checked", "fast"])}
        body = {**question.body, "user": "an editor", "kvblend": extension}
        await self._judged(question, CHAT, body, stream=False)

    async def bring(self) -> None:
        """Bring a text that is new: its answer in full, from memory or not, is one."""
        self._fresh += 1
        words = " ".join(f"Ship {self.draws.randrange(10_000)} lies at berth {number}." for number in range(40))
        body = {**self.questions[0].body, "documents": [{"title": f"Berths {self._fresh}", "text": words}]}
        question = Question("new text", body, (await references(self.client, body, texts_of))[1:])
        await self._judged(question, CHAT, {**body, "kvblend": {"method": "full"}}, stream=True)

    async def forget(self) -> None:
        """Delete a session."""
        response = await self.client.delete(f"/v1/sessions/session-{self.draws.randrange(SESSIONS)}")
        self.ledger.counts[f"session deleted, status {response.status_code}"] += 1

    async def _judged(self, question: Question, path: str, body: Json, *, stream: bool) -> None:
        """Ask, and compare each answer with the same one alone."""
        name = f"{question.name} at {path}{', streamed' if stream else ''}"
        async with self.client.stream("POST", path, json={**body, "stream": stream}) as response:
            if response.status_code != 200:
                content = await response.aread()
                self.refused(name, response.status_code, content)
                return
            lines = [line async for line in response.aiter_lines()]
        if stream:
            reply = reply_of_stream(lines)
        else:
            document = json.loads("\n".join(lines))
            reply = Reply(texts_of(document), document.get("kvblend", {}))
        self.ledger.counts["streamed" if stream else "whole"] += 1
        for text in reply.texts:
            self.ledger.judge(name, Answer.of(text, reply.extension), question.references)

    def refused(self, name: str, status: int, content: bytes) -> None:
        """Judge a refusal of a question that is in order."""
        if status < 429:
            self.ledger.wrong(f"{name}: status {status}: {content[:200]!r}")
        else:
            self.ledger.counts[f"status {status}"] += 1
