"""The latest prompts of each end user, and what their edits have shown."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cachetools import LRUCache

from blend.serve.engine.edits import Edit, EditEvidence, Spelling, edit_of
from blend.serve.engine.prefixes import Conversation

if TYPE_CHECKING:
    from blend.layout import PromptLayout
    from blend.serve.prompt import Prompt

_MOST_TOKENS = 1 << 20  # of the prompts that are known
_LATEST = 4  # prompts of an author
_MOST_DOUBTED = 1024  # authors


class EarlierPrompt(NamedTuple):
    """A prompt with its answer. evidence: of the edits that led to it; None if none did."""

    conversation: Conversation
    evidence: EditEvidence | None = None

    @property
    def tokens(self) -> int:
        """Of the prompt and its answer."""
        return len(self.conversation.prompt) + len(self.conversation.answer)


class FoundEdit(NamedTuple):
    """An edit, and the prompt that it edits."""

    edit: Edit
    earlier: EarlierPrompt


class Histories:
    """The latest prompts of each author: an end user, or one of its sessions. Threads may share it.

    Attributes:
        spell: what token ids spell.

    """

    def __init__(self, spell: Spelling) -> None:
        self.spell = spell
        self._lock = threading.Lock()
        self._latest: LRUCache[tuple[str, str], tuple[EarlierPrompt, ...]] = LRUCache(_MOST_TOKENS, _tokens_of)
        self._doubted: LRUCache[tuple[str, str], bool] = LRUCache(_MOST_DOUBTED)

    def of(self, owner: str, author: str) -> tuple[EarlierPrompt, ...]:
        """An author's latest prompts, the latest first; their rows may be gone."""
        with self._lock:
            return self._latest.get((owner, author), ())

    def edit(self, prompt: Prompt, layout: PromptLayout) -> FoundEdit | None:
        """How the prompt edits the latest one that holds enough of it; None if it goes on behind one, or edits none.

        layout: the prompt behind the rows that are reused.
        """
        ids = layout.token_ids
        for earlier in self.of(prompt.request.tenant, prompt.author):
            if not layout.places or _goes_on(ids, earlier):
                return None
            edit = edit_of(layout, earlier.conversation.ids)
            if edit is not None:
                return FoundEdit(edit, earlier)
        return None

    def note(self, author: str, conversation: Conversation, evidence: EditEvidence | None, *, exact: bool) -> None:
        """Note that a prompt with its answer was kept.

        Args:
            author: whose prompt it is; one without an author is not noted.
            conversation: under which its rows are kept.
            evidence: of its edits; None if it edits none, and keeps that of the prompt behind which it goes on.
            exact: whether its rows are full prefill's. They end a doubt.

        """
        if not author:
            return
        key = conversation.owner, author
        ids = conversation.prompt
        with self._lock:
            before = [earlier for earlier in self._latest.get(key, ()) if earlier.conversation.prompt != ids]
            if exact:
                self._doubted.pop(key, None)
            if evidence is None:
                gone_on = next((earlier for earlier in before if _goes_on(ids, earlier)), None)
                if gone_on is not None and gone_on.evidence is not None:
                    evidence = gone_on.evidence.extended(len(conversation.ids))
            noted = EarlierPrompt(conversation, evidence)
            self._latest[key] = (noted, *before[: _LATEST - 1])

    def found(self, author: str, conversation: Conversation, evidence: EditEvidence) -> None:
        """Note what a comparison found, unless the prompt is forgotten or doubted meanwhile."""
        key = conversation.owner, author
        with self._lock:
            latest = self._latest.get(key, ())
            has_it = [earlier.conversation == conversation and earlier.evidence is not None for earlier in latest]
            if any(has_it):
                pairs = zip(latest, has_it, strict=True)
                self._latest[key] = tuple(
                    earlier._replace(evidence=evidence) if is_it else earlier for earlier, is_it in pairs
                )

    def doubt(self, owner: str, author: str) -> tuple[EarlierPrompt, ...]:
        """Full prefill gave another answer than moved rows did: none move until a prompt of this author was exact.

        Returns the author's latest prompts.
        """
        with self._lock:
            self._doubted[owner, author] = True
            latest = self._latest.get((owner, author), ())
            if latest:
                self._latest[owner, author] = tuple(earlier._replace(evidence=None) for earlier in latest)
            return latest

    def is_doubted(self, owner: str, author: str) -> bool:
        """Whether no rows may move in this author's prompts."""
        with self._lock:
            return (owner, author) in self._doubted

    def forget(self, owner: str, author: str) -> None:
        """Forget an author's prompts."""
        with self._lock:
            self._latest.pop((owner, author), None)


def _goes_on(ids: Sequence[int], earlier: EarlierPrompt) -> bool:
    """Whether a prompt begins with all of an earlier one."""
    prompt = earlier.conversation.prompt
    return len(prompt) < len(ids) and tuple(ids[: len(prompt)]) == prompt


def _tokens_of(prompts: Sequence[EarlierPrompt]) -> int:
    return sum(earlier.tokens for earlier in prompts)
