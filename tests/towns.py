"""Documents about towns that never were: several chunks of 64 tokens each, told apart by their numbers."""

from pathlib import Path

TOPICS = ("harbour", "orchard", "glacier", "library", "foundry", "market", "lighthouse", "quarry")


def document(topic: str, number: int) -> str:
    """The Markdown of one."""
    paragraphs = (
        f"The {topic} of town {number} opened in {1800 + 7 * number + part}. Its keeper number {part} counts "
        f"{13 * part + number} visitors a day. The {topic} has {part + 2} gates and a bell of {100 + part} kilograms."
        for part in range(6)
    )
    return f"# The {topic}\n\n" + "\n\n".join(paragraphs) + "\n"


def documents() -> dict[str, str]:
    """File names and their texts, one a topic."""
    return {f"{topic}.md": document(topic, number) for number, topic in enumerate(TOPICS)}


def write_documents(folder: Path) -> dict[str, str]:
    """Make the folder with all of them in it."""
    folder.mkdir(parents=True)
    texts = documents()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return texts
