"""What `bench_retrieval` makes: notes that differ in their numbers, and a folder with a log, a table and notes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta

from _paths import PACKAGES  # noqa: F401 -- first: it puts the packages on the path

# isort: split
from blend_retrieval import Chunk

ROOMS = ("north store", "boat house", "mill", "lamp room", "quay office", "old forge", "net loft", "dry dock")
KINDS = ("valve", "pump", "gasket", "filter", "bearing", "hose", "clamp", "switch")
DEVICES = ("controller", "drive", "sensor", "relay", "heater", "panel")
REMEDIES = ("Restart it", "Call the service", "Replace the fuse", "Check the cable")
PEOPLE = ("Ann Bell", "Tom Reed", "Ida Voss", "Max Kern", "Lea Stone", "Jon Hale", "Eva Brand", "Kim Wells")
ASKED_EVERY = 3


def part_notes(count: int) -> tuple[list[Chunk], list[tuple[str, frozenset[str]]]]:
    """So many notes on parts, errors and extensions, and a question about every third of them."""
    choose = random.Random(5)
    chunks: list[Chunk] = []
    questions: list[tuple[str, frozenset[str]]] = []
    for number in range(count):
        title, text, question = (_part, _error, _extension)[number % 3](choose, number)
        chunks.append(Chunk(str(number), f"{number}.md", title, text, 0))
        if number // 3 % ASKED_EVERY == 0:
            questions.append((question, frozenset([str(number)])))
    return chunks, questions


def _part(choose: random.Random, number: int) -> tuple[str, str, str]:
    code = f"{choose.choice('ABCDEFGH')}{choose.choice('KLMNPR')}-{1000 + 7 * number}-{choose.choice('XYZ')}"
    place = f"{choose.choice(ROOMS)}, shelf {choose.randrange(1, 40)}"
    text = f"Part {code} is a {choose.choice(KINDS)}. It is kept in the {place}, and costs {choose.randrange(3, 300)} crowns."
    return "Parts", text, f"Where do we keep part {code}?"


def _error(choose: random.Random, number: int) -> tuple[str, str, str]:
    code = f"E{100 + number}{choose.choice('ABCD')}"
    fault = choose.choice(("low voltage", "no signal", "overheating", "a blocked valve", "a timeout"))
    wait = f"{choose.choice(REMEDIES)} and wait {choose.randrange(2, 30)} minutes."
    text = f"Error {code}: the {choose.choice(DEVICES)} reports {fault}. {wait}"
    return "Errors", text, f"What to do about error {code}?"


def _extension(choose: random.Random, number: int) -> tuple[str, str, str]:
    text = f"{choose.choice(PEOPLE)} works in the {choose.choice(ROOMS)}; the extension is {2000 + number}."
    return "Telephone", text, f"Whose extension is {2000 + number}?"


def log_lines(count: int) -> Sequence[str]:
    """The lines of a log of machines."""
    choose = random.Random(1)
    now = datetime(2026, 3, 1)
    lines = []
    for _ in range(count):
        now += timedelta(minutes=choose.randrange(3, 40))
        machine = f"{choose.choice(('pump', 'gate', 'lock', 'crane'))}-{choose.randrange(1, 6)}"
        event = choose.choice(("started", "stopped", "level 210 cm", "did not answer", "restarted after a timeout"))
        lines.append(f"{now:%Y-%m-%d %H:%M:%S} {choose.choice(('INFO', 'WARN', 'ERROR'))} {machine} {event}")
    return lines


def table_lines(count: int) -> Sequence[str]:
    """A table of parts, in Markdown without a ruler; the header first."""
    choose = random.Random(2)
    lines = ["| part | kind | shelf | stock |"]
    for row in range(count):
        shelf = f"{choose.choice('ABCD')}{choose.randrange(1, 30)}"
        lines.append(f"| P-{1000 + row} | {choose.choice(KINDS)} | {shelf} | {choose.randrange(90)} |")
    return lines


def notes() -> dict[str, str]:
    """Notes by their names."""
    return {
        "gate": "The lock gate is opened by the keeper on duty. In a storm above 8 Beaufort the gate stays shut.",
        "gate history": "The old wooden gate was replaced in 1978 by a steel one. It was built by the yard at Norden.",
        "pump": "The pumps keep the level of the basin at 250 cm. If a pump does not answer, Ida Voss is called.",
        "service": "Each pump is serviced in April by the firm Kern. The filter is changed every year.",
        "crane": "The crane lifts 12 tonnes. Only Tom Reed and Eva Brand may drive it. It is inspected in May.",
        "fees": "A berth costs 14 crowns a night for boats up to 8 metres, and 22 crowns for longer ones.",
        "office": "The harbour office is open from 8 to 16, closed on Sundays. The harbour master is Lea Stone.",
        "storms": "In a storm all boats move behind the mole. The keeper on duty rings the bell and shuts the gate.",
        "keepers": "The keepers are Jon Hale, Kim Wells and Sam Ford. The keeper on duty has the telephone 2200.",
        "fuel": "Diesel is sold at the quay from 9 to 12. The pump for diesel is next to the crane.",
        "water": "Drinking water is free for members. The taps are shut from November to March.",
        "winter": "Boats are lifted out of the water in the last week of October by the crane.",
        "stores": "Spare parts are kept in the north store. Valves and gaskets lie on the shelves A and B.",
        "orders": "What is short is ordered on Mondays from the firm Kern, with the signature of the harbour master.",
    }


ASKED = {
    "Who opens the lock gate, and what happens to it in a storm?": frozenset({"gate", "storms", "keepers"}),
    "Whom do we call if a pump does not answer?": frozenset({"pump"}),
    "When was the gate built?": frozenset({"gate history"}),
    "When are the pumps serviced, and by whom?": frozenset({"service"}),
    "Who may drive the crane, and when is it used for boats?": frozenset({"crane", "winter"}),
    "Where are spare valves kept, and who orders new ones?": frozenset({"stores", "orders"}),
    "At what level is the basin kept?": frozenset({"pump"}),
    "What does the keeper on duty do in a storm, and who are the keepers?": frozenset({"storms", "gate", "keepers"}),
    "How are parts that are short ordered?": frozenset({"orders", "stores"}),
}
