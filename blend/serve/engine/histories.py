"""The latest prompts of each end user, and what their edits have shown."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from cachetools import LRUCache

from blend.layout import common_length
from blend.serve.engine.edits import Edit, EditEvidence, Spelling, edit_of
from blend.serve.engine.prefixes import Conversation
from blend.serve.request import ANYONE, RequestOrigin
from blend.serve.shares import Holder, Shares

if TYPE_CHECKING:
    from blend.layout import PromptLayout
    from blend.serve.prompt import Prompt

_MOST_TOKENS = 1 << 20  # of the prompts that are known
_LATEST = 16  # prompts of an author that are known
_COMPARED = 4  # of these, with a prompt that may edit one
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


class _Latest(NamedTuple):
    """An author's latest prompts, the latest first, and whom they count for."""

    prompts: tuple[EarlierPrompt, ...]
    holder: Holder


class Histories:
    """The latest prompts of each author: an end user, or one of its sessions. Threads may share it.

    most_tokens: of all prompts. Beyond it the least recently used make room, first those of clients and end users that exceed
    their shares.

    Attributes:
        spell: what token ids spell.

    """

    def __init__(self, spell: Spelling, most_tokens: int = _MOST_TOKENS) -> None:
        self.spell = spell
        self._most_tokens = most_tokens
        self._lock = threading.Lock()
        self._latest: OrderedDict[tuple[str, str], _Latest] = OrderedDict()  # least recently used first
        self._sizes = Counter[Holder]()  # tokens
        self._doubted: LRUCache[tuple[str, str], bool] = LRUCache(_MOST_DOUBTED)

    def of(self, owner: str, author: str) -> tuple[EarlierPrompt, ...]:
        """An author's latest prompts, the latest first; their rows may be gone."""
        with self._lock:
            return self._prompts(owner, author)

    def _prompts(self, owner: str, author: str) -> tuple[EarlierPrompt, ...]:
        latest = self._latest.get((owner, author))
        if latest is None:
            return ()
        self._latest.move_to_end((owner, author))
        return latest.prompts

    def _set(self, key: tuple[str, str], prompts: tuple[EarlierPrompt, ...], holder: Holder) -> None:
        """Replace an author's prompts. Those of holders beyond their shares make room."""
        self._remove(key)
        self._latest[key] = _Latest(prompts, holder)
        self._sizes[holder] += _tokens_of(prompts)
        excess = sum(self._sizes.values()) - self._most_tokens
        shares = Shares(self._most_tokens, self._sizes, self._sizes)
        for author, latest in list(self._latest.items()):
            if excess > 0 and shares.exceeded_by(latest.holder):
                tokens = _tokens_of(latest.prompts)
                shares.remove(latest.holder, tokens)
                excess -= tokens
                self._remove(author)

    def _remove(self, key: tuple[str, str]) -> None:
        latest = self._latest.pop(key, None)
        if latest is not None:
            self._sizes[latest.holder] -= _tokens_of(latest.prompts)
            self._sizes += Counter()  # without those that have none

    def edit(self, prompt: Prompt, layout: PromptLayout) -> FoundEdit | None:
        """How the prompt edits the latest one that holds enough of it; None if it goes on behind one, or edits none.

        A prompt that goes on behind an earlier one edits none that is another conversation from there: subagents differ in
        their task, and each goes on with files that others have read, too.

        layout: the prompt behind the rows that are reused.
        """
        if not layout.places:
            return None
        ids = layout.token_ids
        latest = self.of(prompt.request.tenant, prompt.author)
        own = max((len(earlier.conversation.prompt) for earlier in latest if _goes_on(ids, earlier)), default=0)
        related = [earlier for earlier in latest if common_length(ids, earlier.conversation.ids) >= own]
        for earlier in related[:_COMPARED]:
            if _goes_on(ids, earlier):
                return None
            edit = edit_of(layout, earlier.conversation.ids)
            if edit is not None:
                return FoundEdit(edit, earlier)
        return None

    def note(
        self,
        author: str,
        conversation: Conversation,
        evidence: EditEvidence | None,
        *,
        exact: bool,
        origin: RequestOrigin = ANYONE,
    ) -> None:
        """Note that a prompt with its answer was kept.

        Args:
            author: whose prompt it is; one without an author is not noted.
            conversation: under which its rows are kept.
            evidence: of its edits; None if it edits none, and keeps that of the prompt behind which it goes on.
            exact: whether its rows are full prefill's. They end a doubt.
            origin: whose it is.

        """
        if not author:
            return
        key = conversation.owner, author
        ids = conversation.prompt
        with self._lock:
            if origin.ended():  # under the lock: `forget` comes later, or came before
                return
            before = [earlier for earlier in self._prompts(*key) if earlier.conversation.prompt != ids]
            if exact:
                self._doubted.pop(key, None)
            if evidence is None:
                gone_on = next((earlier for earlier in before if _goes_on(ids, earlier)), None)
                if gone_on is not None and gone_on.evidence is not None:
                    evidence = gone_on.evidence.extended(len(conversation.ids))
            noted = EarlierPrompt(conversation, evidence)
            self._set(key, (noted, *before[: _LATEST - 1]), origin.holder)

    def found(self, author: str, conversation: Conversation, evidence: EditEvidence) -> None:
        """Note what a comparison found, unless the prompt is forgotten or doubted meanwhile."""
        key = conversation.owner, author
        with self._lock:
            latest = self._prompts(*key)
            has_it = [earlier.conversation == conversation and earlier.evidence is not None for earlier in latest]
            if any(has_it):
                pairs = zip(latest, has_it, strict=True)
                prompts = tuple(earlier._replace(evidence=evidence) if is_it else earlier for earlier, is_it in pairs)
                self._latest[key] = self._latest[key]._replace(prompts=prompts)

    def doubt(self, owner: str, author: str) -> tuple[EarlierPrompt, ...]:
        """Full prefill gave another answer than moved rows did: none move until a prompt of this author was exact.

        Returns the author's latest prompts.
        """
        with self._lock:
            self._doubted[owner, author] = True
            latest = self._prompts(owner, author)
            if latest:
                prompts = tuple(earlier._replace(evidence=None) for earlier in latest)
                self._latest[owner, author] = self._latest[owner, author]._replace(prompts=prompts)
            return latest

    def is_doubted(self, owner: str, author: str) -> bool:
        """Whether no rows may move in this author's prompts."""
        with self._lock:
            return (owner, author) in self._doubted

    def forget(self, owner: str, author: str) -> None:
        """Forget an author's prompts."""
        with self._lock:
            self._remove((owner, author))


def _goes_on(ids: Sequence[int], earlier: EarlierPrompt) -> bool:
    """Whether a prompt begins with all of an earlier one."""
    prompt = earlier.conversation.prompt
    return len(prompt) < len(ids) and tuple(ids[: len(prompt)]) == prompt


def _tokens_of(prompts: Sequence[EarlierPrompt]) -> int:
    return sum(earlier.tokens for earlier in prompts)
